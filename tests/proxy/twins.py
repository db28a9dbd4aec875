"""Exchanges for two proxies at once: the own HTTP and that of `gorgo serve --plain`, over real sockets.

Each exchange is made of its number and a seed: what the client sends and in which pieces, and what the engine answers
and in which. Each proxy has engines of its own, which answer alike. Their clock stands still within an exchange, round
trips are set, and the kernel's pacing is not read, so a decision depends on what was served before and on nothing else.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from gorgo.live.request.parse import INFERENCE_ROUTES

#: A client or an engine that is silent for this long has failed, s.
SILENT_S = 20.0
#: Of a body, beyond which the proxies of the twins refuse it.
LIMIT_BYTES = 64 * 1024
#: Headers of one connection alone.
HOP = frozenset({"connection", "transfer-encoding", "date"})
PREFIXES = tuple(f"You are assistant {n}. " + "Answer with care and cite. " * 40 * (n + 1) for n in range(6))
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut bytes at random places, most often nowhere."""
    cuts = sorted(rng.sample(range(1, len(data)), min(rng.choice((0, 0, 1, 2, 7)), len(data) - 1))) if data else []
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def in_chunks(rng: random.Random, data: bytes, trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces(rng, data) if part) + b"0\r\n" + trailer


# -- what a client sends


@dataclass(frozen=True, slots=True)
class Sent:
    """One request in pieces."""

    method: str
    pieces: Sequence[bytes]


def request_of(seed: int, number: int) -> Sent:
    """Return the request of an exchange."""
    rng = random.Random(f"client {seed} {number}")
    method, path, body, headers = _request(rng)
    lines = [f"{method} {path} HTTP/1.1", "host: gorgo", f"x-request-id: twin-{number}", *headers]
    raw = body
    if body and rng.random() < 0.1:
        raw, lines = gzip.compress(body, mtime=0), [*lines, "content-encoding: gzip"]
    if method == "POST" and rng.random() < 0.25:
        lines.append("transfer-encoding: chunked")
        raw = in_chunks(rng, raw) + b"\r\n"
    elif method == "POST" or body:
        lines.append(f"content-length: {len(raw)}")
    return Sent(method, pieces(rng, "\r\n".join(lines).encode() + b"\r\n\r\n" + raw))


def _request(rng: random.Random) -> tuple[str, str, bytes, list[str]]:
    headers = ["content-type: application/json"]
    if rng.random() < 0.3:
        headers.append(f"x-session-id: s{rng.randrange(20)}")
    if rng.random() < 0.1:
        headers += ["accept-encoding: gzip", "cookie: a=b", "x-odd: " + "v" * rng.randrange(200)]
    kind = rng.random()
    if kind < 0.8:
        return (
            "POST",
            rng.choice(INFERENCE_ROUTES[:6]) if kind < 0.7 else rng.choice(INFERENCE_ROUTES),
            _body(rng),
            headers,
        )
    good = _body(rng)
    odd: tuple[tuple[str, str, bytes, list[str]], ...] = (
        ("POST", INFERENCE_ROUTES[0], good[:-3], headers),
        ("POST", INFERENCE_ROUTES[0], b"[]", headers),
        ("POST", INFERENCE_ROUTES[0], b"", headers),
        ("POST", INFERENCE_ROUTES[0], b'{"model": "m", "messages": []}', headers),
        ("POST", INFERENCE_ROUTES[0], good, ["content-type: text/plain"]),
        ("POST", INFERENCE_ROUTES[0], good, [*headers, "content-encoding: compress"]),
        ("POST", INFERENCE_ROUTES[0], b'{"a": "' + b"x" * LIMIT_BYTES + b'"}', headers),
        ("POST", "/v1/unknown", good, headers),
        ("POST", "/v1/chat%2fcompletions", good, headers),
        ("GET", INFERENCE_ROUTES[0], b"", []),
        ("PUT", INFERENCE_ROUTES[0], good, headers),
        ("GET", "/health", b"", []),
        ("HEAD", "/health", b"", []),
        ("GET", "/ready", b"", []),
        ("GET", "/v1/models", b"", []),
        ("GET", "/v1/models/none", b"", []),
        ("POST", "/health", good, headers),
        ("GET", "/nothing", b"", []),
    )
    return rng.choice(odd)


def _body(rng: random.Random) -> bytes:
    text = rng.choice(PREFIXES) + " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "prompt": text,
        "text": text,
        "input": text,
        "query": text,
        "documents": [text],
        "max_tokens": rng.choice((1, 16, 128)),
    }
    if rng.random() < 0.6:
        fields["stream"] = True
    if rng.random() < 0.2:
        fields["stream_options"] = {"include_usage": True}
    return json.dumps(fields).encode()


# -- what an engine answers


def _event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def answer_of(seed: int, replica: int, request_id: str, *, streams: bool) -> tuple[list[bytes], bool]:
    """Return the bytes of an answer in pieces, and whether the connection ends behind them."""
    rng = random.Random(f"engine {seed} {replica} {request_id}")
    usage = {"prompt_tokens": rng.randrange(1, 4000), "completion_tokens": rng.randrange(1, 128)}
    usage["prompt_tokens_details"] = {"cached_tokens": rng.randrange(usage["prompt_tokens"])}  # type: ignore[assignment]
    extra = rng.choice(("", "", "set-cookie: a=1\r\nset-cookie: b=2\r\n", "x-engine: 1\r\n", "server: e\r\n"))
    kind = rng.random()
    if kind < 0.04:
        return [b"" if kind < 0.02 else b"HTTP/1.1 200 OK\r\ncontent-le"], True
    if kind < 0.16:
        status = rng.choice((400, 404, 422, 429, 500, 503))
        said = json.dumps({"error": {"message": f"no {rng.randrange(100)}", "code": status}}).encode()
        # In one piece: whether a connection is used again depends on what of an unwanted answer has come.
        return [_whole(f"{status} No", "application/json", extra, said)], False
    if streams and kind < 0.9:
        return _stream(rng, usage, extra)
    answer = {
        "id": "a",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * rng.randrange(400)}}],
    }
    said = json.dumps({**answer, "usage": usage}).encode()
    if rng.random() < 0.1:
        extra, said = f"{extra}content-encoding: gzip\r\n", gzip.compress(said, mtime=0)
    if rng.random() < 0.3:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{extra}transfer-encoding: chunked\r\n\r\n"
        return pieces(rng, head.encode() + in_chunks(rng, said) + b"\r\n"), False
    if rng.random() < 0.1:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{extra}connection: close\r\n\r\n"
        return pieces(rng, head.encode() + said), True
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" if rng.random() < 0.1 else b""
    whole = _whole("200 OK", "application/json", extra, said)
    if rng.random() < 0.05:
        return pieces(rng, interim + whole[:-5]), True
    return pieces(rng, interim + whole), rng.random() < 0.05


def _whole(status: str, media_type: str, extra: str, said: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {media_type}\r\n{extra}content-length: {len(said)}\r\n\r\n"
    return head.encode() + said


def _stream(rng: random.Random, usage: object, extra: str) -> tuple[list[bytes], bool]:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{extra}transfer-encoding: chunked\r\n\r\n".encode()
    events = [_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})]
    for _ in range(rng.randrange(1, 40)):
        events.append(_event({"choices": [{"index": 0, "delta": {"content": rng.choice(WORDS)}}]}))
        if rng.random() < 0.02:
            events.append(b": a comment\n\n")
    events.append(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    events += [_event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]
    fault = rng.random()
    if fault < 0.05:
        events = [*events[: rng.randrange(len(events))], _event({"error": {"message": "out of memory", "code": 500}})]
    trailer = b"x-engine: 1\r\n" if rng.random() < 0.1 else b""
    body = in_chunks(rng, b"".join(events), trailer) + b"\r\n"
    if 0.05 < fault < 0.12:  # breaks off
        return pieces(rng, head + body[: rng.randrange(len(body))]), True
    return pieces(rng, head + body), False


@dataclass
class Engine:
    """One replica of one twin."""

    seed: int
    number: int
    port: int = 0
    #: Connections that it ends at this time.
    closing: int = 0
    #: Heads, without what differs by the address, and bodies as they came.
    heard: list[tuple[str, bytes]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
                body = await reader.readexactly(int(lines.get("content-length", "0")))
                if not head.startswith("POST"):
                    writer.write(b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                    continue
                lines.pop("host")
                said = (f"{head.split()[1]} {sorted(lines.items())}", body)
                # A kept connection that is lost: sent once more. httpx does not say whether a byte of an answer came.
                if self.heard[-1:] != [said]:
                    self.heard.append(said)
                streams = b'"stream":true' in body.replace(b" ", b"")
                parts, ends = answer_of(self.seed, self.number, lines["x-request-id"], streams=streams)
                for part in parts:
                    writer.write(part)
                    await asyncio.sleep(0)
                if ends:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closing += 1
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.closing -= 1


@asynccontextmanager
async def engines(seed: int, count: int) -> AsyncIterator[list[Engine]]:
    """Engines that listen until the end of the block."""
    made, servers = [Engine(seed, number) for number in range(count)], []
    for each in made:
        server = await asyncio.start_server(each.serve, "127.0.0.1", 0, limit=1 << 20)
        each.port = server.sockets[0].getsockname()[1]
        servers.append(server)
    try:
        yield made
    finally:
        for server in servers:
            server.close()


# -- what a client gets


@dataclass(frozen=True, slots=True)
class Got:
    """An answer without what belongs to its connection."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    complete: bool


class Client:
    """A client with one connection at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, sent: Sent) -> Got:
        """Send a request and return its answer.

        Again on a new connection if a kept one ends before it: a refusal before the end of a body ends one.
        """
        is_new = self._link is None
        try:
            return await self._exchange(sent)
        except (ConnectionError, asyncio.IncompleteReadError) as failure:
            if is_new or (isinstance(failure, asyncio.IncompleteReadError) and failure.partial):
                raise
            self.close()
            return await self._exchange(sent)

    async def _exchange(self, sent: Sent) -> Got:
        if self._link is None:
            self._link = await asyncio.open_connection(*self._address, limit=1 << 20)
        reader, writer = self._link
        for part in sent.pieces:
            writer.write(part)
            await asyncio.sleep(0)
        async with asyncio.timeout(SILENT_S):
            got, ends = await _read(reader, sent.method)
        if ends:
            self.close()
        return got

    def close(self) -> None:
        if self._link is not None:
            self._link[1].close()
            self._link = None


async def _read(reader: asyncio.StreamReader, method: str) -> tuple[Got, bool]:
    """Return the answer, and whether its connection ends with it."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    status = int(first.split()[1])
    headers = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines)]
    named, body, complete = dict(headers), b"", True
    try:
        if method == "HEAD" or status in (204, 304):
            pass
        elif named.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(named["content-length"]))
    except (asyncio.IncompleteReadError, ConnectionError):
        complete = False
    shown = tuple(sorted(pair for pair in headers if pair[0] not in HOP))
    return Got(status, shown, body, complete), not complete or named.get("connection") == "close"
