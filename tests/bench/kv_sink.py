"""A subscriber that is not the proxy: takes what the publishers send to the other topic, and drops it, all in C."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gorgo.live.kv_events.sockets import import_zmq
from tests.bench.kv_publishers import UNHEARD


@contextmanager
def sink(ports: list[int]) -> Iterator[None]:
    """Receive until the end of the block."""
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.kv_sink", *map(str, ports)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _receive(ports: list[str]) -> None:
    zmq = import_zmq()
    context = zmq.Context()
    source, nobody = context.socket(zmq.SUB), context.socket(zmq.PUB)
    source.setsockopt(zmq.SUBSCRIBE, UNHEARD.encode())
    for port in ports:
        source.connect(f"tcp://127.0.0.1:{port}")
    nobody.bind("inproc://nobody")
    zmq.proxy(source, nobody)


if __name__ == "__main__":
    _receive(sys.argv[1:])
