"""GET requests to the API server of Kubernetes: pages of a list and lines of a watch, both bounded.

Token and authorities are read before each request, because Kubernetes replaces both while the process runs.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec

from gorgo.config.fleet import SERVICE_ACCOUNT, KubernetesApiConfig
from gorgo.errors import ConfigError, GorgoError
from gorgo.fleet_sources.documents import mapping, text
from gorgo.fleet_sources.list_watch import WATCH_S
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
