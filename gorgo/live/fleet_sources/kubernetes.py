"""Sources in a Kubernetes cluster: pods by label, EndpointSlices of a Service, an InferencePool.

Owns GET requests to the API server (`ApiClient`): pages of a list and lines of a watch, both bounded; the requests that
follow a collection of the API (`Collection`); and the source made of them (`KubernetesSource`). Leaves the replicas of
objects to `gorgo.fleet_sources.kubernetes`. A result is published when every collection that it needs was listed once,
and after each change of one. Token and authorities are read before each request, because Kubernetes replaces both while
the process runs.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from gorgo.config.fleet import SERVICE_ACCOUNT, FleetSourceConfig, KubernetesApiConfig
from gorgo.errors import ConfigError, GorgoError
from gorgo.fleet_sources.entries import Found
from gorgo.fleet_sources.kubernetes import (
    SERVICE_LABEL,
    Document,
    EndpointSlice,
    InferencePool,
    Pod,
    found_pods,
    found_slices,
    mapping,
    read_node,
    read_pod,
    read_pool,
    read_slice,
    selector_text,
    text,
)
from gorgo.fleet_sources.list_watch import PAGE_OBJECTS, WATCH_S, ListPage, ListWatch, OpenWatch, Pause
from gorgo.live.fleet_sources.reports import Reports
from gorgo.live.upstream.address import connect_cause

#: A page has at most a hundred objects, and etcd stores at most 1.5 MB of one.
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
#: Of an error's message.
_MAX_ERROR_BYTES = 64 * 1024
#: A token has a few kB, a bundle of authorities less than a megabyte.
_MAX_FILE_BYTES = 1024 * 1024
_CONNECT_S = 5.0
#: A page of a slow server.
_PAGE_S = 30.0
#: The server ends a watch by then; if it does not, the connection is dead.
_WATCH_READ_S = WATCH_S + 10.0
#: A silent path is noticed within half a minute, which a watch without events would not show.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]


class ApiError(GorgoError):
    """A request got no usable answer. `status` is 0 without one; `broken` says that the connection was at fault."""

    def __init__(self, message: str, status: int = 0, *, broken: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.broken = broken


def api_url(config: KubernetesApiConfig, environ: Mapping[str, str]) -> str:
    """Return the URL of the API server. Raises `ConfigError` outside of a cluster."""
    if config.url is not None:
        return config.url.rstrip("/")
    host = environ.get("KUBERNETES_SERVICE_HOST", "")
    port = environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or environ.get("KUBERNETES_SERVICE_PORT") or "443"
    if not host:
        raise ConfigError("no cluster: KUBERNETES_SERVICE_HOST is not set; expected api.url in the source")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def own_namespace(environ: Mapping[str, str], folder: Path = Path(SERVICE_ACCOUNT)) -> str:
    """Return the namespace of the proxy's pod. Raises `ConfigError` outside of one."""
    given = environ.get("POD_NAMESPACE", "")
    if given:
        return given
    try:
        return (folder / "namespace").read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("no pod: its namespace is not known; expected namespace in the source") from error


class ApiClient:
    """Requests to one server.

    Parameters
    ----------
    url:
        Of the server. A token is sent over TLS alone.
    """

    def __init__(self, url: str, config: KubernetesApiConfig) -> None:
        self._url = url
        self._config = config
        self._tls = url.lower().startswith("https:")
        self._authorities: bytes | None = None
        self._client: httpx.AsyncClient | None = None
        #: Several collections share the client.
        self._preparing = asyncio.Lock()

    async def page(self, path: str, params: Mapping[str, str]) -> bytes:
        """Return the body of a list. Raises `ApiError`."""
        async with self._request(path, params, read_s=_PAGE_S) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    raise ApiError(f"a page of more than {MAX_PAGE_BYTES} bytes")
            return bytes(body)

    @asynccontextmanager
    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a watch; yield an iterator of its lines. Both raise `ApiError`."""
        async with self._request(path, params, read_s=_WATCH_READ_S) as response:
            yield _lines(response)

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def _request(self, path: str, params: Mapping[str, str], *, read_s: float) -> AsyncIterator[httpx.Response]:
        client, headers = await self._prepared()
        timeout = httpx.Timeout(_CONNECT_S, read=read_s)
        try:
            async with client.stream(
                "GET", self._url + path, params=dict(params), headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise ApiError(await _message(response), response.status_code)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _broken(error) from error

    async def _prepared(self) -> tuple[httpx.AsyncClient, dict[str, str]]:
        """Return a client that trusts the authorities as they are now, and the headers with the token."""
        # Unpacked, a page would need more memory than its bound.
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "gorgo"}
        authorities: bytes | None = None
        if self._tls:
            token, authorities = await asyncio.to_thread(_read_files, self._config)
            headers["authorization"] = f"Bearer {token}"
        async with self._preparing:
            if self._client is None or authorities != self._authorities:
                verify: ssl.SSLContext | bool = False
                if authorities is not None:
                    verify = await asyncio.to_thread(_trusting, authorities, self._config.ca_file)
                await self.aclose()
                limits = httpx.Limits(max_connections=8, max_keepalive_connections=2)
                transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, socket_options=_KEEP_ALIVE)
                self._client = httpx.AsyncClient(transport=transport, trust_env=False)
                self._authorities = authorities
            return self._client, headers


def _broken(error: Exception) -> ApiError:
    return ApiError(connect_cause(error) or f"{type(error).__name__}: {error}".rstrip(": "), broken=True)


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    except httpx.HTTPError as error:
        raise _broken(error) from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    buffer = bytearray()
    async for chunk in _chunks(response):
        buffer += chunk
        while 0 <= (end := buffer.find(b"\n")) <= MAX_LINE_BYTES:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.strip():
                yield line
        if len(buffer) > MAX_LINE_BYTES:
            raise ApiError(f"a line of more than {MAX_LINE_BYTES} bytes")
    if buffer.strip():
        raise ApiError("the watch broke in the middle of a line", broken=True)


async def _message(response: httpx.Response) -> str:
    """Return the message of an error, as far as it can be read."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_ERROR_BYTES:
            break
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        return text(mapping(msgspec.json.decode(bytes(body))), "message")[:500]
    return ""


def _read_files(config: KubernetesApiConfig) -> tuple[str, bytes]:
    """Return token and authorities. Raises `ApiError`."""
    try:
        token = _read(config.token_file).decode("ascii").strip()
        authorities = _read(config.ca_file)
    except (OSError, ValueError) as error:
        raise ApiError(f"token or authorities cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not token or not token.isprintable() or " " in token:
        raise ApiError(f"{config.token_file} holds no token")
    return token, authorities


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)


def _trusting(authorities: bytes, path: str) -> ssl.SSLContext:
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ApiError(f"{path} holds no PEM certificates") from error
    return context


# One collection of the API followed until cancelled: the steps of `ListWatch`, done over HTTP.


T = TypeVar("T")

#: Of a collection without a selector.
NO_SELECTOR: Mapping[str, str] = {}


class Collection(Generic[T]):
    """One collection.

    Parameters
    ----------
    read:
        Returns the parts of an object that matter.
    path, selector:
        Of the collection; `selector` has `labelSelector` or `fieldSelector`.
    on_progress:
        Called after each step and each line.
    """

    def __init__(
        self,
        client: ApiClient,
        read: Callable[[Document], T],
        path: str,
        on_progress: Callable[[], None],
        selector: Mapping[str, str] = NO_SELECTOR,
        *,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self.state = ListWatch(read)
        self._client = client
        self._path = path
        self._selector = selector
        self._on_progress = on_progress
        self._spread = spread

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            step = self.state.next_step(self._spread())
            try:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    continue
                await (self._list(step) if isinstance(step, ListPage) else self._watch(step))
            except ApiError as error:
                if error.status:
                    self.state.on_status(error.status, str(error))
                else:
                    self.state.on_failure(str(error))
            self._on_progress()

    async def _list(self, step: ListPage) -> None:
        params = {**self._selector, "limit": str(PAGE_OBJECTS)}
        if step.continue_token:
            params["continue"] = step.continue_token
        self.state.on_page(await self._client.page(self._path, params))

    async def _watch(self, step: OpenWatch) -> None:
        started_s = monotonic()
        params = {**self._selector, "watch": "true", "allowWatchBookmarks": "true"}
        params |= {"resourceVersion": step.version, "timeoutSeconds": str(WATCH_S)}
        async with self._client.lines(self._path, params) as lines:
            self.state.on_watch_open()
            self._on_progress()
            try:
                async for line in lines:
                    if not self.state.on_line(line):
                        return
                    self._on_progress()
            except ApiError as error:
                if not error.broken:
                    raise
        # One that broke is not a server that is down: the next request shows that.
        self.state.on_end(monotonic() - started_s)


_AnyCollection = Collection[Pod] | Collection[str] | Collection[EndpointSlice] | Collection[InferencePool]


class KubernetesSource:
    """One source.

    Parameters
    ----------
    reports:
        Get results and failures.
    environ:
        Has the address of the API server in a cluster. Without one, and without `api.url`, `ConfigError` is raised.
    """

    def __init__(self, config: FleetSourceConfig, reports: Reports, environ: Mapping[str, str]) -> None:
        self._config = config
        self._reports = reports
        self._client = ApiClient(api_url(config.api, environ), config.api)
        self._namespace = quote(config.namespace or own_namespace(environ), safe="")
        self._nodes: Collection[str] | None = None
        if config.node_regions:
            self._nodes = Collection(self._client, read_node, "/api/v1/nodes", self._progress)
        self._slices: Collection[EndpointSlice] | None = None
        self._pool: Collection[InferencePool] | None = None
        self._pods: Collection[Pod] | None = None
        self._pods_task: asyncio.Task[None] | None = None
        self._pods_selector: Sequence[tuple[str, str]] = ()
        #: How many collections of pods there were.
        self._selections = 0
        self._published: tuple[int, ...] = ()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Follow the source until cancelled."""
        config = self._config
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if self._nodes is not None:
                    self._tasks.create_task(self._nodes.run())
                if config.kind == "endpoint-slices":
                    path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
                    selector = {"labelSelector": f"{SERVICE_LABEL}={config.service}"}
                    self._slices = Collection(self._client, read_slice, path, self._progress, selector)
                    self._tasks.create_task(self._slices.run())
                elif config.kind == "pods":
                    self._follow_pods(tuple(sorted(config.selector.items())))
                else:
                    path = f"/apis/inference.networking.k8s.io/v1/namespaces/{self._namespace}/inferencepools"
                    selector = {"fieldSelector": f"metadata.name={config.pool}"}
                    self._pool = Collection(self._client, read_pool, path, self._progress, selector)
                    self._tasks.create_task(self._pool.run())
        finally:
            await self._client.aclose()

    def _follow_pods(self, selector: tuple[tuple[str, str], ...]) -> None:
        """Follow the pods of a selector instead of those of the one before."""
        assert self._tasks is not None, "called by its own tasks"
        if self._pods_task is not None:
            self._pods_task.cancel()
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        chosen = {"labelSelector": selector_text(selector)}
        self._pods = Collection(self._client, read_pod, path, self._progress, chosen)
        self._pods_selector = selector
        self._selections += 1
        self._pods_task = self._tasks.create_task(self._pods.run())

    def _progress(self) -> None:
        """Report the state after a step of any collection."""
        pool = self._current_pool()
        if pool is not None and pool.selector != self._pods_selector:
            self._follow_pods(pool.selector)
        used = self._used(pool)
        errors = [each.state.error for each in used if each.state.error is not None]
        if errors:
            self._reports.fail(errors[0])
        elif any(each.state.synced for each in used):
            self._reports.succeed()
        if not all(each.state.synced for each in used):
            return
        revisions = (self._selections, *(each.state.revision for each in used))
        if revisions != self._published:
            self._published = revisions
            self._reports.report_result(self._found(pool))

    def _current_pool(self) -> InferencePool | None:
        return None if self._pool is None else next(iter(self._pool.state.objects.values()), None)

    def _used(self, pool: InferencePool | None) -> list[_AnyCollection]:
        """Return the collections that a result needs now."""
        if self._pool is not None and pool is None:
            return [self._pool]
        return [each for each in (self._nodes, self._slices, self._pool, self._pods) if each is not None]

    def _found(self, pool: InferencePool | None) -> Found:
        config = self._config
        regions = None if self._nodes is None else self._nodes.state.objects
        if self._slices is not None:
            listed = found_slices(self._slices.state.objects.values(), config, regions)
            return Found(listed.replicas, {**listed.rejected, **self._slices.state.rejected})
        if self._pool is not None and pool is None:
            missing = {str(config.pool): f"inferencepool {self._namespace}/{config.pool} is missing"}
            return Found((), self._pool.state.rejected or missing)
        assert self._pods is not None, "followed since the selector is known"
        ports: tuple[int | str, ...] = (config.port or config.port_name or 0,) if pool is None else pool.ports
        listed = found_pods(self._pods.state.objects.values(), ports, config.replica, regions)
        return Found(listed.replicas, {**listed.rejected, **self._pods.state.rejected})
