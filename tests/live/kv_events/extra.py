"""Skips loudly what needs the extra `events`."""

from __future__ import annotations

import pytest

from gorgo.live.extras import EVENTS, is_installed

needs_zmq = pytest.mark.skipif(
    not is_installed(EVENTS), reason="KV EVENTS SKIPPED: pyzmq is not installed (extra `events`)"
)
