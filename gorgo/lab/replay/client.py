"""One request over HTTP, from its scheduled time to its record. Never raises for errors of the server.

Owns the client of a replay, the parser of one streamed answer (`StreamReader`), and the proxy's HTTP client as a
transport of httpx (`PoolTransport`). Leaves the schedule to `gorgo.lab.replay.run`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from math import inf
from string import punctuation
from urllib.parse import quote

import httpx

from gorgo.config.values import REPLICA_KEEP_ALIVE_S
from gorgo.core.numeric import parse_number
from gorgo.core.stream import (
    SseEvent,
    SseReader,
    StreamEnd,
    Usage,
    UsageReader,
    content_rule,
    end_of_stream,
    error_status,
    parse_event,
)
from gorgo.errors import ReplayError
from gorgo.lab.replay.options import ReplayOptions
from gorgo.lab.replay.summary import ReplayRecord
from gorgo.lab.traces import TraceRequest
from gorgo.live.http.headers import Header
from gorgo.live.upstream.client import UpstreamPool, encode_head, request_line
from gorgo.live.upstream.response import HttpResponse

ROUTE = "/v1/chat/completions"


class StreamReader:
    """Timing and usage of one stream of chat completion chunks, by the proxy's rules of content, errors and ends.

    A gap is the time between two arrivals of content after the first. Tokens that arrive together make one gap, and a
    chunk without content makes none: the end, usage, a comment, a part of an event.
    """

    def __init__(self) -> None:
        self.first_content_s: float | None = None
        self.gaps_s: list[float] = []
        self._last_s = 0.0
        #: Of the first error event.
        self._error_status: int | None = None
        self._events = SseReader(max_lines=inf)
        self._has_content = content_rule(ROUTE)
        self._usage = UsageReader()

    def feed(self, chunk: bytes, *, now: float) -> None:
        """Bytes as they came, at `now`."""
        self._usage.feed(chunk)
        # An event that is too long for the reader has content, and so has what comes behind it.
        found = [self._read(event) for event in self._events.feed(chunk)]
        if not (any(found) or self._events.overflowed):
            return
        if self.first_content_s is None:
            self.first_content_s = now
        else:
            self.gaps_s.append(now - self._last_s)
        self._last_s = now

    def _read(self, event: SseEvent) -> bool:
        """Return whether an event has content; note an error."""
        data = parse_event(event.data)
        if self._error_status is None:
            self._error_status = error_status(event.name, data)
        return self._error_status is None and self._has_content(data)

    @property
    def usage(self) -> Usage | None:
        """As the engine reports it."""
        return self._usage.usage()

    def error(self) -> str | None:
        """Why the stream, now at its end, is not a whole answer."""
        if self._error_status is not None:
            if self.first_content_s is None:
                return f"stream error {self._error_status}: before any content"
            return "stream error: an error event in the stream"
        if self.first_content_s is None:
            return "no content: the stream ended without any"
        if end_of_stream(ROUTE, self._usage.tail) is not StreamEnd.COMPLETE:
            return "truncated: the stream ended without a finish reason, usage or [DONE]"
        return None


# The proxy's HTTP client as a transport of httpx: `httpx.AsyncClient` over the pools of several origins.
#
# It speaks HTTP/1.1 only; proxies and redirects are the caller's. The proxy calls a pool directly: httpx's objects cost
# a request tens of microseconds.


#: A request's body is collected before it is sent, because a repeated request needs it. Above any prompt.
MAX_BODY_BYTES = 256 * 1024 * 1024


class PoolTransport(httpx.AsyncBaseTransport):
    """Sends the requests of an `httpx.AsyncClient`.

    Parameters
    ----------
    tls:
        Authorities and certificate for `https`; the system's authorities by default.
    keep_alive_s:
        Time for which an idle connection stays open.

    Example
    -------
    >>> transport = PoolTransport()
    >>> client = httpx.AsyncClient(transport=transport)
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, keep_alive_s: float = REPLICA_KEEP_ALIVE_S) -> None:
        self._tls = tls
        self._keep_alive_s = keep_alive_s
        self._pools: dict[tuple[str, str, int | None], UpstreamPool] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        body = await _body_of(request)
        try:
            start = request_line(request.method.encode(), request.url.raw_path)
            head = encode_head(start, _with_length(request.headers.raw, body))
        except ValueError as failure:
            raise httpx.LocalProtocolError(str(failure)) from None
        read_s = timeout.get("read")
        limit_s = None if read_s is None else read_s + (timeout.get("connect") or 0.0)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._pool(request.url).send(
                    head, body, connect_timeout_s=timeout.get("connect"), head_only=request.method == "HEAD"
                )
        except TimeoutError:
            raise httpx.ReadTimeout("no response") from None
        stream = response if read_s is None else _TimedStream(response, read_s)
        return httpx.Response(
            response.status, headers=response.headers, stream=stream, extensions={"http_version": b"HTTP/1.1"}
        )

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    def _pool(self, url: httpx.URL) -> UpstreamPool:
        key = (url.scheme, url.host, url.port)
        pool = self._pools.get(key)
        if pool is None:
            if url.scheme not in ("http", "https"):
                raise httpx.UnsupportedProtocol(f"{url.scheme!r}: expected http or https")
            if self._tls is None:
                self._tls = ssl.create_default_context()
            pool = self._pools[key] = UpstreamPool(url, tls=self._tls, keep_alive_s=self._keep_alive_s)
        return pool


class _TimedStream(httpx.AsyncByteStream):
    """A response's body with a limit of the time between two reads."""

    def __init__(self, response: HttpResponse, limit_s: float) -> None:
        self._response = response
        self._limit_s = limit_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = aiter(self._response)
        while True:
            try:
                async with asyncio.timeout(self._limit_s):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise httpx.ReadTimeout(f"no bytes within {self._limit_s} s") from None
            if chunk is None:
                return
            yield chunk

    async def aclose(self) -> None:
        await self._response.aclose()


async def _body_of(request: httpx.Request) -> bytes:
    stream = request.stream
    if isinstance(stream, httpx.ByteStream):
        return b"".join(stream)
    assert isinstance(stream, httpx.AsyncByteStream), "the request of an asynchronous client"
    parts: list[bytes] = []
    size = 0
    async for part in stream:
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise httpx.LocalProtocolError(f"a body of more than {MAX_BODY_BYTES} bytes")
    return b"".join(parts)


def _with_length(headers: list[Header], body: bytes) -> list[Header]:
    """Return the headers with a length in the place of a transfer coding: the whole body is known."""
    others = [(name, value) for name, value in headers if name.lower() != b"transfer-encoding"]
    return headers if len(others) == len(headers) else [*others, (b"Content-Length", b"%d" % len(body))]


#: Below the keep-alive of common servers (5 s), so that no request uses a connection that is being closed.
KEEP_ALIVE_S = 2.0
CONNECT_TIMEOUT_S = 10.0
#: Between two attempts to reach a port that nothing listens on.
PORT_RETRY_S = 0.1
#: Longest stored text of an error.
ERROR_CHARACTERS = 200


def open_http(options: ReplayOptions) -> httpx.AsyncClient:
    """A client with one pooled connection per request in flight. Only the request's own bound times out a read."""
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if options.api_key is not None:
        headers["authorization"] = f"Bearer {options.api_key}"
    return httpx.AsyncClient(
        transport=PoolTransport(keep_alive_s=KEEP_ALIVE_S),
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        trust_env=False,
    )


async def wait_for_port(url: str, *, wait_s: float, on_wait: Callable[[], None]) -> None:
    """Return when the address of the URL accepts a connection; raise `ReplayError` after `wait_s`.

    `on_wait` is called once, after the first attempt that fails.
    """
    try:
        place = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ReplayError(f"{url}: {error}; expected http://HOST:PORT") from None
    if place.scheme not in ("http", "https") or not place.host:
        raise ReplayError(f"{url}: expected http://HOST:PORT")
    port = place.port or {"http": 80, "https": 443}[place.scheme]
    failed: OSError | None = None
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(place.host, port)
                except OSError as error:
                    if failed is None:
                        on_wait()
                    failed = error
                    await asyncio.sleep(PORT_RETRY_S)
                else:
                    writer.close()
                    return
    except TimeoutError:
        why = "no answer" if failed is None else failed.strerror or str(failed)
        raise ReplayError(f"{url}: no connection within {wait_s:g} s ({why}); is the router up?") from None


async def first_model(http: httpx.AsyncClient, url: str) -> str:
    """Return the first model that the router names; raises `ReplayError` without one."""
    address = f"{url.rstrip('/')}/v1/models"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            response = await http.get(address)
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
        raise ReplayError(f"GET {address}: {_reason(error)}; is the router up? (or name a model)") from None
    except (ValueError, LookupError, TypeError):
        raise ReplayError(f"GET {address}: the answer names no model; name one") from None


class ReplayClient:
    """Sends requests to one base URL.

    Parameters
    ----------
    clock:
        Monotonic seconds; the replay starts at `start_s` of it.
    run:
        Prefix of request ids, different for each replay.
    """

    def __init__(
        self, http: httpx.AsyncClient, options: ReplayOptions, *, clock: Callable[[], float], start_s: float, run: str
    ) -> None:
        self._http = http
        self._url = f"{options.url.rstrip('/')}{ROUTE}"
        self._timeout_s = options.request_timeout_s
        self._clock = clock
        self._start_s = start_s
        self._run = run

    async def send(self, request: TraceRequest, body: bytes, scheduled_s: float) -> ReplayRecord:
        """Sends it now and reads the answer to its end."""
        record = ReplayRecord(
            id=f"{self._run}-{request.index}",
            scheduled_s=scheduled_s,
            sent_s=self._now_s(),
            input_tokens=request.input_tokens,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(record, body, request.session)
        except TimeoutError:
            record.error = f"timeout: not complete after {self._timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            record.error = _reason(error)
        return record

    async def _exchange(self, record: ReplayRecord, body: bytes, session: str | None) -> None:
        headers = {"x-request-id": record.id}
        if session is not None:
            headers["x-session-id"] = quote(session, safe=punctuation)  # a header has printable ASCII alone
        async with self._http.stream("POST", self._url, content=body, headers=headers) as response:
            record.status = response.status_code
            _read_headers(record, response.headers)
            if response.status_code != 200:
                text = (await response.aread())[: 4 * ERROR_CHARACTERS].decode(errors="replace")
                record.error = f"http {response.status_code}: {text[:ERROR_CHARACTERS]}"
                return
            await self._read_stream(record, response)

    async def _read_stream(self, record: ReplayRecord, response: httpx.Response) -> None:
        reader = StreamReader()
        try:
            async for chunk in response.aiter_raw():
                reader.feed(chunk, now=self._now_s())
        finally:  # values before the break are valid
            if reader.first_content_s is not None:
                record.ttft_ms = (reader.first_content_s - record.scheduled_s) * 1000
            record.gaps_s = tuple(reader.gaps_s)
            _read_usage(record, reader)
        record.e2e_s = self._now_s() - record.scheduled_s
        record.error = reader.error()

    def _now_s(self) -> float:
        return self._clock() - self._start_s


def _read_headers(record: ReplayRecord, headers: Mapping[str, str]) -> None:
    record.replica = headers.get("x-gorgo-replica")
    record.region = headers.get("x-gorgo-region")
    record.policy = headers.get("x-gorgo-policy")
    version = parse_number(headers.get("x-gorgo-weights-version"))
    record.weights_version = None if version is None else int(version)
    record.predicted_ttft_ms = parse_number(headers.get("x-gorgo-predicted-ttft-ms"))
    record.estimated_cached_tokens = parse_number(headers.get("x-gorgo-estimated-cached-tokens"))


def _read_usage(record: ReplayRecord, reader: StreamReader) -> None:
    usage = reader.usage
    if usage is not None:
        record.input_tokens = record.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        record.cached_tokens = usage.cached_tokens
        record.output_tokens = usage.output_tokens


def _reason(error: Exception) -> str:
    """Name the system's error behind a failed connection."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(cause).__name__}: {str(cause)[:ERROR_CHARACTERS]}"
