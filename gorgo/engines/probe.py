"""The paths of a probe and its answer. One rule for the probes of the proxy and for `gorgo check --live`."""

from __future__ import annotations

from gorgo.engines.base import EngineDialect

_MODELS = "/v1/models"


def probe_paths(engine: EngineDialect) -> tuple[str, str]:
    """Return the engine's own path, then one for servers and gateways that answer it with 404 or 405.

    >>> from gorgo.engines.registry import dialect
    >>> probe_paths(dialect("sglang")), probe_paths(dialect("openai"))
    (('/ping', '/v1/models'), ('/v1/models', '/health'))
    """
    return engine.probe_path, "/health" if engine.probe_path == _MODELS else _MODELS


def is_well(status: int) -> bool:
    """Return whether a probe's answer means that the replica is well.

    Only 2xx: a server that refuses a probe, redirects it or has no such route is no engine that can serve.
    """
    return 200 <= status < 300
