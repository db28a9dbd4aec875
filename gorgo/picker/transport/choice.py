"""The servers that carry gRPC, by the name of their library."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gorgo.config.model import TlsConfig
from gorgo.config.sections.picker import Transport
from gorgo.picker.transport.limits import TransportLimits
from gorgo.picker.transport.services import Services


class TransportServer(Protocol):
    """One listening port."""

    def bind(self, bind: str, tls: TlsConfig) -> tuple[str, int]:
        """Listen; return host and actual port. Raises `ConfigError`."""
        ...

    async def serve_calls(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set; then end all calls with OK."""
        ...

    def start_drain(self) -> None:
        """Ask Envoy to open new calls on other connections, where the library can."""
        ...


def make_server(transport: Transport, services: Services, limits: TransportLimits) -> TransportServer:
    """Return the server of a library, imported now. Raises `MissingExtra`."""
    if transport == "h2":
        from gorgo.picker.transport.http2.server import Http2Server

        return Http2Server(services, limits)
    from gorgo.picker.transport.grpcio_server import GrpcioServer

    return GrpcioServer(services, limits)
