"""Skips loudly what needs the extra `events`."""

from __future__ import annotations

import pytest

from gorgo.live.kv_events import extra

needs_zmq = pytest.mark.skipif(
    not extra.available(), reason="KV EVENTS SKIPPED: pyzmq is not installed (extra `events`)"
)
