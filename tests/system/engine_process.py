"""`gorgo engine` as its users start it: a process that imitates one replica."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_LISTENING = re.compile(r"gorgo engine \S+ listening on (?P<url>\S+)")

_REGIONS = """
proxy: {region: here}
regions: [{name: here}]
replicas: [{name: engine, region: here, url: "http://127.0.0.1:1"}]
simulation: {rtt_ms: {here: 1}}
"""


@contextmanager
def engine_process(folder: Path) -> Iterator[str]:
    """Its URL; stopped by SIGTERM at the end, its log is in `folder`."""
    config = folder / "engine.yaml"
    config.write_text(_REGIONS)
    command = [sys.executable, "-m", "gorgo", "engine", "--replica", "engine", "--config", str(config), "--port", "0"]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
        found = _LISTENING.search(process.stdout.readline()) if readable else None
        if found is None:
            raise RuntimeError("gorgo engine did not start: " + (folder / "engine.log").read_text()[-2000:])
        yield found["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        process.stdout.close()
