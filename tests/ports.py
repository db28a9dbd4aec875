"""Ports for programs that must be told one before they start.

The kernel gives every socket that asks for any port one of its ephemeral range, which begins at 32,768 on Linux: a port
of that range which was free a moment ago may be another test's by the time that its program binds it. These lie below
that range, each is given once in a process, and each worker of pytest-xdist has a part of its own.
"""

from __future__ import annotations

import os
import re
import socket
from functools import cache

_FIRST, _EACH, _WORKERS = 10_000, 2_600, 8


class _Ports:
    def __init__(self) -> None:
        worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % _WORKERS
        self._first = _FIRST + worker * _EACH
        # Two runs of the tests at once seldom begin at the same place.
        self._place = os.getpid() * 37 % _EACH

    def next(self) -> int:
        for _ in range(_EACH):
            self._place = (self._place + 1) % _EACH
            port = self._first + self._place
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise OSError("every port that tests may use is taken")


@cache
def _ports() -> _Ports:
    return _Ports()


def free_port() -> int:
    """Return a port of loopback that nobody has and that no other caller of this process was given."""
    return _ports().next()


def free_ports(count: int) -> list[int]:
    """Return as many, all different."""
    return [free_port() for _ in range(count)]
