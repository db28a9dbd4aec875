"""The package of the extra `events`, which the proxy runs without until a replica has `kv_events`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from types import ModuleType

from gorgo.config.model import ReplicaConfig
from gorgo.errors import InvalidValueError, MissingExtra

MISSING = "KV events need the extra: pip install 'gorgo-router[events]'"
EXPECTED = "the extra events to be installed"


def available() -> bool:
    """Return whether pyzmq is installed."""
    return find_spec("zmq") is not None


def import_zmq() -> ModuleType:
    """Return the package with its asyncio part. Raises `MissingExtra`."""
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError as error:
        raise MissingExtra(MISSING) from error
    module: ModuleType = zmq
    return module


def check_extra(replicas: Iterable[ReplicaConfig]) -> None:
    """Raise `InvalidValueError` if a replica has `kv_events` and pyzmq is not installed."""
    for replica in replicas:
        if replica.kv_events is not None and not available():
            raise InvalidValueError(f"replica {replica.name!r}, kv_events", MISSING, EXPECTED)
