"""One request of a replay over HTTP, from its scheduled time to its record, and the sums over records.

Owns the options and the result of a replay, the record (`ReplayRecord`) and the sums over records while they come, in
bounded memory (`Tally`), the client, which never raises for errors of the server, the parser of one streamed answer
(`StreamReader`), and the proxy's HTTP client as a transport of httpx (`PoolTransport`). Leaves the schedule to
`gorgo.lab.replay`.
"""

from __future__ import annotations

import asyncio
import ssl
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from signal import Signals
from string import punctuation
from urllib.parse import quote

import httpx
import numpy as np

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
from gorgo.lab.failures import count_cause
from gorgo.lab.results import ResultRow, ServedTally, Spread
from gorgo.lab.sim.records import ClientRecord
from gorgo.lab.traces import TraceFilters, TraceRequest
from gorgo.live.http.headers import Header
from gorgo.live.upstream.client import UpstreamPool, encode_head, request_line
from gorgo.live.upstream.response import HttpResponse

#: Requests in flight at once; more wait, which shows as slip. Beyond this one client process measures itself.
MAX_IN_FLIGHT = 2048
#: A proxy with its engines on two busy cores listens after about five seconds.
PORT_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """One replay of one trace against one base URL.

    Parameters
    ----------
    trace:
        Path of the trace.
    url:
        Base URL of any OpenAI-compatible router or engine; `/v1/chat/completions` is added.
    filters:
        Filters of the trace.
    time_scale:
        Multiplies the time between requests; 2.0 = half the load.
    out:
        Folder for `requests.jsonl` and `results.json`; made if needed. None: nothing is written.
    model:
        Model to ask for; None: the first that `GET /v1/models` names.
    api_key:
        Sent as a bearer token.
    port_wait_s:
        How long to wait for a router that does not listen yet.
    request_timeout_s:
        A request that is not complete so long after it was sent is an error.
    closed_loop:
        A session's turn is sent a think time after the end of the answer before it, not at its time in the trace.
    policy, weights:
        For the result row, where the caller knows them; otherwise the policy is read from the responses.
    show_progress:
        Progress on stderr: a bar on a terminal, else a line now and then.
    label:
        Words before the progress.
    """

    trace: Path
    url: str = "http://127.0.0.1:8080"
    filters: TraceFilters = field(default_factory=TraceFilters)
    time_scale: float = 1.0
    out: Path | None = None
    model: str | None = None
    api_key: str | None = None
    port_wait_s: float = PORT_WAIT_S
    request_timeout_s: float = 600.0
    max_in_flight: int = MAX_IN_FLIGHT
    closed_loop: bool = False
    policy: str | None = None
    weights: Mapping[str, float] | None = None
    show_progress: bool = True
    label: str = "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay: result row, duration, a warning about the trace, and the signal that ended it early."""

    row: ResultRow
    wall_s: float
    warning: str | None = None
    interrupted_by: Signals | None = None

    @property
    def exit_code(self) -> int:
        """0 if every request succeeded, else 1; 128 and the signal's number after an interrupt, as of a shell."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return 1 if self.row.errors else 0


@dataclass(slots=True, kw_only=True)
class ReplayRecord(ClientRecord):
    """One request, and what only the summary uses. Values that a router does not report are None."""

    policy: str | None = None
    estimated_cached_tokens: float | None = None
    gaps_s: tuple[float, ...] = ()

    @property
    def slip_s(self) -> float:
        """How late it was sent."""
        return max(0.0, self.sent_s - self.scheduled_s)


class LogHistogram:
    """Counts of positive values in bins that grow by 1 %, so a quantile is right within 1 %.

    A replay can have millions of token gaps; this is 16 kB however many there are. The mean is exact.
    """

    LOW, HIGH, GROWTH = 1e-6, 1e4, 1.01

    def __init__(self) -> None:
        self._bins = np.zeros(int(np.log(self.HIGH / self.LOW) / np.log(self.GROWTH)) + 1, dtype=np.int64)
        self._sum = 0.0
        self.count = 0

    def add(self, values: tuple[float, ...]) -> None:
        if values:
            clipped = np.clip(values, self.LOW, self.HIGH)
            places = (np.log(clipped / self.LOW) / np.log(self.GROWTH)).astype(np.int64)
            np.add.at(self._bins, np.minimum(places, len(self._bins) - 1), 1)
            self._sum += float(np.sum(values))
            self.count += len(values)

    def quantile(self, share: float) -> float | None:
        """The middle of the bin in which it lies; None without a value."""
        if not self.count:
            return None
        bin_index = int(np.searchsorted(np.cumsum(self._bins), share * self.count))
        return float(self.LOW * self.GROWTH ** (bin_index + 0.5))

    def spread(self, *, factor: float = 1.0) -> Spread:
        """Mean and quantiles times `factor` (1000 for ms)."""
        if not self.count:
            return Spread()
        p50, p95, p99 = ((self.quantile(share) or 0.0) * factor for share in (0.5, 0.95, 0.99))
        return Spread(self._sum / self.count * factor, p50, p95, p99)


class Tally:
    """Everything the result row needs of the records so far."""

    def __init__(self) -> None:
        self.n = 0
        #: Failed requests by cause.
        self.failures: dict[str, int] = {}
        self._ttft_ms, self._e2e_s, self._slip_ms = array("d"), array("d"), array("d")
        self._prediction_error_ms = array("d")
        self._gaps_s, self._ttft_s = LogHistogram(), LogHistogram()
        self._served = ServedTally()
        self._replicas: Counter[str] = Counter()
        self._policies: Counter[str] = Counter()
        self._cached = _Share()
        self._estimated = _Share()

    def add(self, record: ReplayRecord) -> None:
        """Counts one ended request. Latencies are of those that succeeded; slip is of all."""
        self.n += 1
        self._slip_ms.append(record.slip_s * 1000)
        self._served.add(record)
        if record.error is not None:
            count_cause(self.failures, record.error)
            return
        if record.replica is not None:
            self._replicas[record.replica] += 1
        if record.policy is not None:
            self._policies[record.policy] += 1
        self._cached.add(record.cached_tokens, of=record.input_tokens)
        self._estimated.add(record.estimated_cached_tokens, of=record.input_tokens)
        self._gaps_s.add(record.gaps_s)
        self._add_latency(record)

    def _add_latency(self, record: ReplayRecord) -> None:
        if record.ttft_ms is None or record.e2e_s is None:
            return
        self._ttft_ms.append(record.ttft_ms)
        self._ttft_s.add((record.ttft_ms / 1000,))
        self._e2e_s.append(record.e2e_s)
        if record.predicted_ttft_ms is not None:
            self._prediction_error_ms.append(abs(record.predicted_ttft_ms - record.ttft_ms))

    @property
    def error_count(self) -> int:
        return sum(self.failures.values())

    def ttft_s_p95(self) -> float | None:
        """So far, within 1 %; cheap enough for a progress bar."""
        return self._ttft_s.quantile(0.95)

    def row(self, options: ReplayOptions, *, planned: int | None = None) -> ResultRow:
        """Return the result row; `planned` are the requests of the trace."""
        served = self._replicas.total()
        most_common = self._policies.most_common(1)
        return ResultRow(
            trace=Path(options.trace).name,
            time_scale=options.time_scale,
            policy=options.policy or (most_common[0][0] if most_common else None),
            weights=options.weights,
            seed=options.filters.seed,
            source="live",
            n=self.n,
            errors=self.error_count,
            ttft_ms=Spread.of(self._ttft_ms),
            e2e_s=Spread.of(self._e2e_s),
            itl_ms=self._gaps_s.spread(factor=1000),
            cache_hit=self._cached.value,
            cache_hit_estimated=self._estimated.value,
            share={name: count / served for name, count in sorted(self._replicas.items())},
            prediction_error_ms=Spread.of(self._prediction_error_ms),
            slip_ms_p95=Spread.of(self._slip_ms).p95,
            planned=planned,
            failures=dict(self.failures),
            **self._served.fields(),
        )


class _Share:
    """A sum over a sum, of the requests for which both are known."""

    def __init__(self) -> None:
        self._part, self._whole = 0.0, 0.0

    def add(self, part: float | None, *, of: float) -> None:
        if part is not None:
            self._part += part
            self._whole += of

    @property
    def value(self) -> float | None:
        return self._part / self._whole if self._whole else None


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
        has_content = [self._read(event) for event in self._events.feed(chunk)]
        if not (any(has_content) or self._events.overflowed):
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
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ReplayError(f"{url}: {error}; expected http://HOST:PORT") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ReplayError(f"{url}: expected http://HOST:PORT")
    port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    failed: OSError | None = None
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(parsed.host, port)
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
