"""Starts and stops the delay of `rtt_nfqueue.py`."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = Path(__file__).with_name("rtt_nfqueue.py")
_START_TIMEOUT_S = 10.0


@contextmanager
def long_path(*ports: int, rtt_ms: float) -> Iterator[None]:
    """Every TCP packet from or to `ports` of loopback takes half of `rtt_ms` while this is open."""
    options = [word for port in ports for word in ("--port", str(port))]
    command = [sys.executable, str(_PROGRAM), "--rtt-ms", str(rtt_ms), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        if not readable or process.stdout.readline() != "delaying\n":
            raise RuntimeError("packets cannot be delayed here: " + process.stdout.read())
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()
