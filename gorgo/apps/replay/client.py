"""One request over HTTP, from its scheduled time to its record. Never raises for errors of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import httpx

from gorgo.apps.replay.options import ReplayOptions
from gorgo.apps.replay.records import ReplayRecord
from gorgo.apps.replay.stream import StreamReader
from gorgo.apps.replay.transport import PoolTransport
from gorgo.apps.traces import TraceRequest
from gorgo.core.numeric import parse_number
from gorgo.errors import ReplayError

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
        self._url = f"{options.url.rstrip('/')}/v1/chat/completions"
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
                await self._exchange(record, body)
        except TimeoutError:
            record.error = f"timeout: not complete after {self._timeout_s:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError) as error:
            record.error = _reason(error)
        return record

    async def _exchange(self, record: ReplayRecord, body: bytes) -> None:
        headers = {"x-request-id": record.id}
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
