"""The bytes of the benchmark: requests that the load sends, events that the engine answers, and how both are read.

The two ends of the benchmark must cost little, so both read just as much HTTP/1.1 as the other end and the relays
between them write; anything else is an error that the report shows.
"""

from __future__ import annotations

import json
import random

MODEL = "bench"
#: A client's, in each request.
KEY = "bench-0123456789abcdef0123456789abcdef"
_DEADLINE_MS = 60_000
#: In each token event and nowhere else; the load counts it.
TOKEN_MARK = b'"delta":{"content":" token"'

#: Width of the number that the load puts between the parts of a request.
NUMBER_BYTES = 8

_NUMBER = b"@" * NUMBER_BYTES
_WORDS = ("the", "prompt", "of", "a", "benchmark", "is", "plain", "text", "its", "length", "is", "what", "counts")
_MARK_TAIL = len(TOKEN_MARK) - 1
_HEAD_BYTES_MAX = 64 * 1024


def request(size: int, *, variant: int, tokens: int, gap_ms: int, stream: bool = True) -> tuple[bytes, bytes]:
    """A POST /v1/chat/completions with a body of `size` bytes: a chat of several turns when it is large.

    In two parts, between which `NUMBER_BYTES` digits make every prompt end differently, as in life.
    """
    rng = random.Random(variant)
    messages = _history(rng, size)
    body: dict[str, object] = {"model": MODEL, "messages": messages, "stream": stream}
    body |= {"max_completion_tokens": tokens, "seed": gap_ms}  # the engine takes the seed for the gap between tokens
    if stream:
        body["stream_options"] = {"include_usage": True}
    messages[-1]["content"] = _text(rng, size - len(_dump(body))) + messages[-1]["content"]
    before, _, after = _dump(body).partition(_NUMBER)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\naccept: */*\r\n"
        f"authorization: Bearer {KEY}\r\nx-slo-ttft-ms: {_DEADLINE_MS}\r\n"
    )
    length = len(before) + NUMBER_BYTES + len(after)
    return f"{head}content-length: {length}\r\n\r\n".encode() + before, after


def number_in(body: bytes, key: bytes, default: int) -> int:
    """The number after `"key":`, found without parsing the JSON around it.

    >>> number_in(b'{"max_tokens": 12}', b"max_tokens", 1)
    12
    """
    at = body.find(b'"' + key + b'":')
    if at < 0:
        return default
    digits = body[at + len(key) + 3 : at + len(key) + 20].lstrip()
    end = next((place for place, byte in enumerate(digits) if not 48 <= byte <= 57), len(digits))
    return int(digits[:end] or default)


class ResponseReader:
    """Reads one response after another from the bytes of a connection, and counts token events.

    Knows a content length and chunked coding. `feed` says whether the response is complete.

    Example
    -------
    >>> reader = ResponseReader()
    >>> reader.feed(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{"), reader.feed(b"}"), reader.status
    (False, True, 200)
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the last response."""
        self.status = 0
        self.tokens = 0
        self._buffer = b""
        self._chunked = False
        self._wanted: int | None = None  # bytes still to come: of the body, or of this chunk and its line end
        self._last = False  # the chunk being read is the empty one that ends the body
        self._tail = b""

    def feed(self, data: bytes) -> bool:
        """Take `data`; True at the end of the response. Raises ValueError for what it does not know."""
        if not self.status:
            data = self._head(self._buffer + data)
            if not self.status:
                return False
        return self._chunks(data) if self._chunked else self._plain(data)

    def _head(self, data: bytes) -> bytes:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > _HEAD_BYTES_MAX:
                raise ValueError("a response head without end")
            self._buffer = data
            return b""
        self._buffer = b""
        lines = head.lower().split(b"\r\n")
        self.status = int(lines[0].split()[1])
        fields = dict(line.split(b":", 1) for line in lines[1:])
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        self._wanted = None if self._chunked else int(fields[b"content-length"])
        return rest

    def _plain(self, data: bytes) -> bool:
        assert self._wanted is not None
        self._wanted -= len(data)
        if self._wanted < 0:
            raise ValueError("more bytes than the content length")
        self._count(data)
        return self._wanted == 0

    def _chunks(self, data: bytes) -> bool:
        data = self._buffer + data
        at, end = 0, len(data)
        while at < end:
            if self._wanted is None:
                line = data.find(b"\r\n", at)
                if line < 0:
                    break
                size = int(data[at:line], 16)
                self._wanted, self._last, at = size + 2, size == 0, line + 2
            take = min(self._wanted, end - at)
            self._wanted -= take
            line_end = min(take, max(0, 2 - self._wanted))
            self._count(data[at : at + take - line_end])
            at += take
            if self._wanted == 0:
                self._wanted = None
                if self._last:
                    return True
        self._buffer = data[at:]
        return False

    def _count(self, body: bytes) -> None:
        text = self._tail + body
        self.tokens += text.count(TOKEN_MARK)
        self._tail = text[-_MARK_TAIL:]


def _history(rng: random.Random, size: int) -> list[dict[str, str]]:
    """Turns up to about `size` bytes, and the last message, still empty but for its number."""
    messages = [{"role": "system", "content": _text(rng, min(120, size // 4))}]
    left = size - 500
    while left > 900:
        length = min(left, rng.choice((300, 900, 2200)))
        messages.append({"role": "user" if len(messages) % 2 else "assistant", "content": _text(rng, length)})
        left -= length + 36
    return [*messages, {"role": "user", "content": _NUMBER.decode()}]


def _dump(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _text(rng: random.Random, size: int) -> str:
    words: list[str] = []
    length = 0
    while length < size:
        words.append(rng.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]
