"""One store per module; each test has it empty."""

from __future__ import annotations

from tests.live.peer_store.conftest import module_server, redis_server

__all__ = ["module_server", "redis_server"]
