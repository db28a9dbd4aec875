"""One answer in the simulated engine, from its first token to its last byte: a class per kind of response.

Owns what is sent when a token comes. `Served` is the request that the engine model steps. Those of one HTTP request,
one per prompt and sample, are siblings; the first is the stream that the pieces of the response arrive at. Subclasses
say how a token looks. A streamed response is written straight to the connection's transport by whoever delivers it,
with no task in between: its handler sends the headers and waits for the end.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import sqrt
from typing import Any
from zlib import crc32

from gorgo.core.prompt.fingerprint import TEXT_TOKEN_BYTES, simulated_tokens
from gorgo.lab.engine_server import shapes
from gorgo.lab.engine_server.job import CHAT, Job
from gorgo.lab.sim.engine.request import EngineRequest

# Text of a simulated engine: four ASCII bytes per token, the same answer to the same prompt.
#
# Owns the words and the rule that one token is four bytes of UTF-8 text. The words stand on one long tape; an answer is
# a stretch of it that starts at a place given by the prompt, so that a token, a text or a cache key is one slice. An
# answer in JSON is cut into tokens in the same way; its last token may be shorter.


TOKEN_BYTES = TEXT_TOKEN_BYTES

_CONSONANTS = b"bdfgklmnprstvz"
_VOWELS = b"aeiou"
#: A prime, so that the tape does not repeat in step with anything.
_WORDS = 977


def token_count(text: bytes) -> int:
    """Tokens of a text: four bytes each, the last one perhaps shorter. An empty prompt still has one."""
    return max(1, -(-len(text) // TOKEN_BYTES))


def cache_key(text: bytes, adapter: str | None = None) -> bytes:
    """The text as whole tokens, the last one filled up; the first one differs for each adapter."""
    return simulated_tokens(text, adapter)


def vector(text: bytes) -> list[float]:
    """A small unit vector that depends on the text alone, for `/v1/embeddings`."""
    raw = [byte - 127.5 for byte in blake2b(text, digest_size=16).digest()]
    length = sqrt(sum(value * value for value in raw))
    return [value / length for value in raw]


class Tape:
    """All answers of up to `longest` tokens.

    Example
    -------
    >>> tape = Tape(longest=100)
    >>> start = tape.start(b"Hello")
    >>> tape.text(start, 3) == tape.token(start, 1) + tape.token(start, 2) + tape.token(start, 3)
    True
    """

    def __init__(self, *, longest: int) -> None:
        words = [_word(number) for number in range(_WORDS)]
        self._bytes = b"".join(words) * (longest // _WORDS + 2)
        self._places = {word: number * TOKEN_BYTES for number, word in enumerate(words)}

    def start(self, prompt: bytes) -> int:
        """Where the answer to `prompt` begins, in bytes: behind its last word, if that is one of the tape's.

        So an engine that is given the beginning of an answer goes on with it, as a model would.
        """
        offset = self._places.get(prompt[-TOKEN_BYTES:])
        if offset is not None:
            return (offset + TOKEN_BYTES) % (_WORDS * TOKEN_BYTES)
        return crc32(prompt) % _WORDS * TOKEN_BYTES

    def token(self, start: int, number: int) -> bytes:
        """The `number`th token, counted from one."""
        at = start + number * TOKEN_BYTES
        return self._bytes[at - TOKEN_BYTES : at]

    def text(self, start: int, tokens: int) -> bytes:
        """The first `tokens` tokens together."""
        return self._bytes[start : start + tokens * TOKEN_BYTES]

    def ids(self, start: int, tokens: int) -> list[int]:
        """Token ids of that text."""
        first = start // TOKEN_BYTES
        return [number % _WORDS for number in range(first, first + tokens)]


class WordAnswer:
    """An answer of `tokens` words of a tape."""

    def __init__(self, tape: Tape, prompt: bytes, tokens: int) -> None:
        self._tape = tape
        self._start = tape.start(prompt)
        self.tokens = tokens
        self.key = tape.text(self._start, tokens)

    def token(self, number: int) -> bytes:
        return self._tape.token(self._start, number)

    def text(self, tokens: int) -> bytes:
        return self._tape.text(self._start, tokens)

    def ids(self, tokens: int) -> list[int]:
        return self._tape.ids(self._start, tokens)


class JsonAnswer:
    """An answer of given text, cut off after `limit` tokens."""

    def __init__(self, data: bytes, limit: int) -> None:
        self._data = data
        self.tokens = min(limit, token_count(data))
        self.key = cache_key(self.text(self.tokens))

    @property
    def is_whole(self) -> bool:
        return self.tokens * TOKEN_BYTES >= len(self._data)

    def token(self, number: int) -> bytes:
        return self._data[(number - 1) * TOKEN_BYTES : number * TOKEN_BYTES]

    def text(self, tokens: int) -> bytes:
        return self._data[: tokens * TOKEN_BYTES]

    def ids(self, tokens: int) -> list[int]:
        return list(range(tokens))


def _word(number: int) -> bytes:
    """Three letters and a space, different for each number."""
    middle, rest = number % len(_VOWELS), number // len(_VOWELS)
    first, last = rest % len(_CONSONANTS), rest // len(_CONSONANTS) % len(_CONSONANTS)
    return bytes((_CONSONANTS[first], _VOWELS[middle], _CONSONANTS[last])) + b" "


#: A client that leaves this much unread is cut off: some 20,000 events, more than an answer has.
_MAX_UNREAD_BYTES = 4 * 1024 * 1024

#: Arrives in place of a piece where a fault resets the connection.
_RESET = b"reset"

Send = Callable[["Served", bytes, float], None]


class ResponseFormat(ABC):
    """The JSON of one API: of a whole response, and of the events of a stream."""

    @abstractmethod
    def whole(self, answers: Sequence[Served]) -> object:
        """Return the response to all prompts and samples."""

    def opening(self, _served: Served) -> bytes:
        """Return what precedes the first token of an answer."""
        return b""

    def delta(self, _served: Served, _token: str) -> bytes:
        """Return the event of one token."""
        return b""

    def closing(self, _served: Served) -> bytes:
        """Return the end of an answer, and that of the response if all answers are finished."""
        return b""


class Served(EngineRequest, ABC):
    """A request and its answer.

    Parameters
    ----------
    job, index:
        The parsed body, and which of its answers this is: the samples of the first prompt, then those of the next.
    rid, head:
        The id in the engine, and the fields that start each object of the response.
    form:
        The JSON of the API.
    tape:
        Source of the answer's text.
    send:
        Takes a piece of the response and the time at which it leaves the engine; `deliver` is called at its arrival.
    transport, chunked:
        The client's connection, and whether each piece is framed as an HTTP chunk (not for an HTTP/1.0 client).
    """

    def __init__(
        self,
        job: Job,
        index: int,
        *,
        rid: str,
        head: dict[str, Any],
        form: ResponseFormat,
        tape: Tape,
        send: Send,
        transport: asyncio.Transport,
        chunked: bool = True,
    ) -> None:
        prompt, sample = divmod(index, job.samples)
        text = job.prompts[prompt] if job.prompts else job.text
        self.answer = _answer(job, tape, text, sample)
        super().__init__(
            cache_key(text, job.adapter),
            prompt_tokens=token_count(text),
            output_tokens=self.answer.tokens,
            output_key=self.answer.key,
        )
        self.job = job
        self.index = index
        self.prompt = text
        self.rid = rid
        self.head = head
        self.form = form
        self.transport = transport
        #: All answers of the HTTP request; `join` makes them one response.
        self.siblings: Sequence[Served] = (self,)
        self.lead: Served = self
        #: The samples of the same prompt, which start when it is cached.
        self.followers: Sequence[Served] = ()
        #: When the engine made the last token.
        self.ended_s: float | None = None
        #: When the latest piece arrives; infinite for a response that hangs.
        self.last_arrival_s = 0.0
        #: The first piece is there, the last one is there.
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.hangs_at: int | None = None
        self.resets_at: int | None = None
        self._send = send
        self._frame: Callable[[bytes], bytes] = shapes.frame if chunked else bytes
        self._opened = False
        self._pending: list[bytes] = []
        self._last_piece: bytes | None = None
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the parts that are the same for every token."""

    @abstractmethod
    def emit(self, now: float) -> None:
        """The engine made one token more at `now`."""

    @abstractmethod
    def deliver(self, piece: bytes) -> None:
        """A piece of the response arrives."""

    def close(self) -> None:
        """Stop sending: the response is complete, or its client disconnected."""
        self.last_arrival_s = float("inf")
        self._opened = False

    @property
    def all_finished(self) -> bool:
        """Whether this was the last answer of the response: a step ends several before the first of them is sent."""
        return all(one.ended_s is not None for one in self.siblings)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all answers; a prompt counts once, as cached as its first sample found it."""
        prompts = self.siblings[:: self.job.samples]
        return shapes.usage(
            prompt_tokens=sum(one.prompt_tokens for one in prompts),
            output_tokens=sum(one.emitted for one in self.siblings),
            cached_tokens=sum(one.cached_tokens for one in prompts),
        )

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.answer.text(self.emitted).decode("ascii")

    @property
    def is_cut(self) -> bool:
        """Whether the answer ends at the given length, not at its own end."""
        if isinstance(self.answer, JsonAnswer):
            return not self.answer.is_whole
        return self.job.is_limited

    def _end(self, piece: bytes, now: float) -> None:
        """Send the last piece of the response."""
        self.lead._last_piece = piece
        self._send(self.lead, piece, now)

    def _strike(self, now: float) -> None:
        """Let an injected fault happen where the response has got to."""
        if self.emitted == self.resets_at:
            self._send(self, _RESET, now)
        if self.emitted in (self.hangs_at, self.resets_at):
            self.last_arrival_s = float("inf")


def _answer(job: Job, tape: Tape, text: bytes, sample: int) -> WordAnswer | JsonAnswer:
    if job.output.json is not None:
        return JsonAnswer(job.output.json, job.output_tokens if job.is_limited else token_count(job.output.json))
    return WordAnswer(tape, text + b"\0%d" % sample if sample else text, job.output_tokens)


def join(answers: Sequence[Served]) -> Served:
    """Make them the answers of one response, and return the first, at which its pieces arrive."""
    samples = answers[0].job.samples
    for answer in answers:
        answer.siblings, answer.lead = answers, answers[0]
    for first in range(0, len(answers), samples):
        answers[first].followers = answers[first + 1 : first + samples]
    return answers[0]


class Streamed(Served):
    """A response in server-sent events, written to the transport as they arrive."""

    def open(self) -> None:
        """Write the arrived pieces after the headers; later pieces are written as they arrive."""
        self._opened = True
        pending, self._pending = self._pending, []
        for piece in pending:
            self.deliver(piece)

    def deliver(self, piece: bytes) -> None:
        transport = self.transport
        if not self._opened:
            self._pending.append(piece)
            if not self.started.done():
                self.started.set_result(None)
        elif transport.is_closing():
            return  # Its handler is about to be cancelled.
        elif piece is _RESET or transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            transport.abort()
        else:
            transport.write(piece)
            if piece is self._last_piece and not self.done.done():
                self.done.set_result(None)

    def _send_edge(self, opening: bytes, piece: bytes, now: float) -> None:
        """Send the first token with all that starts the answer, or the last one with all that ends it."""
        piece = opening + piece
        if self.finished:
            self.ended_s = now
            piece += self.form.closing(self)
        if self.finished and self.all_finished:
            self._end(self._frame(piece), now)
        else:
            self._send(self.lead, self._frame(piece), now)


class EventStream(Streamed):
    """A stream whose events its API makes one by one."""

    def emit(self, now: float) -> None:
        opening = self.form.opening(self) if self.emitted == 1 else b""
        piece = self.form.delta(self, self.answer.token(self.emitted).decode("ascii"))
        if 1 < self.emitted < self.output_tokens:
            self._send(self.lead, self._frame(piece), now)
        else:
            self._send_edge(opening, piece, now)
        self._strike(now)


class TokenStream(Streamed):
    """Words of chat and text completions: an event per token, of which only the token differs."""

    def _prepare(self) -> None:
        make = shapes.chat_token_event if self.job.route == CHAT else shapes.completion_token_event
        self._before, self._after = make(self.head, self.index)
        #: The same, framed: tokens are all of one length, so that the frame is too.
        gap = b"\0" * TOKEN_BYTES
        framed = self._frame(self._before + gap + self._after)
        self._framed_before, self._framed_after = framed.split(gap)

    def emit(self, now: float) -> None:
        number = self.emitted
        token = self.answer.token(number)
        if 1 < number < self.output_tokens:
            self._send(self.lead, self._framed_before + token + self._framed_after, now)
        else:
            opening = self.form.opening(self) if number == 1 else b""
            self._send_edge(opening, self._before + token + self._after, now)
        if self.hangs_at is not None or self.resets_at is not None:
            self._strike(now)


class Whole(Served):
    """An answer in one piece, once the last token of all answers is there."""

    body = b""

    def emit(self, now: float) -> None:
        if self.hangs_at is not None or self.resets_at is not None:
            self._strike(now)
        if self.finished:
            self.ended_s = now
            if self.all_finished:
                self._end(json.dumps(self.form.whole(self.siblings)).encode(), now)

    def deliver(self, piece: bytes) -> None:
        if piece is _RESET:
            self.transport.abort()
        elif not self.done.done():
            self.body = piece
            self.done.set_result(None)
