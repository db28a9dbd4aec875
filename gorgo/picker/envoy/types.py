"""Shapes that recur in Envoy's configuration."""

from __future__ import annotations

from typing import Any

from gorgo.config.addresses import split_bind
from gorgo.config.model import TlsConfig

Json = dict[str, Any]

_EXTENSIONS = "type.googleapis.com/envoy.extensions."


def typed(kind: str, **fields: Any) -> Json:
    """Return a message of Envoy's extensions, by the rest of its type's name."""
    return {"@type": _EXTENSIONS + kind, **fields}


def seconds(value: float) -> str:
    """Return a duration."""
    return f"{value:g}s"


def address(host: str, port: int) -> Json:
    """Return a socket's address."""
    return {"socket_address": {"address": host, "port_value": port}}


def listener_address(bind: str) -> Json:
    """Return the address to listen on."""
    return address(*split_bind(bind))


def server_tls(files: TlsConfig, *alpn: str) -> Json:
    """Return TLS of a listener."""
    certificate = {"certificate_chain": {"filename": files.cert}, "private_key": {"filename": files.key}}
    common = {"alpn_protocols": list(alpn), "tls_certificates": [certificate]}
    context = typed("transport_sockets.tls.v3.DownstreamTlsContext", common_tls_context=common)
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def client_tls(*, sni: str | None, ca_file: str, alpn: tuple[str, ...] = ()) -> Json:
    """Return TLS to a server that an authority of `ca_file` has certified."""
    common: Json = {"validation_context": {"trusted_ca": {"filename": ca_file}}}
    if alpn:
        common["alpn_protocols"] = list(alpn)
    if sni is not None:
        match = {"san_type": "DNS", "matcher": {"exact": sni}}
        common["validation_context"]["match_typed_subject_alt_names"] = [match]
    fields: Json = {"common_tls_context": common} | ({} if sni is None else {"sni": sni})
    context = typed("transport_sockets.tls.v3.UpstreamTlsContext", **fields)
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}
