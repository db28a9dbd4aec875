"""A child process ends when the pipe from its parent does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORES_SIGTERM = """
import signal, threading
from gorgo.lab import child
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child.GRACE_S = 0.05
threading.Thread(target=child._end_with_parent, daemon=True).start()
print("ready", flush=True)
threading.Event().wait(60)
"""


def ended(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code after the pipe's end; kill the process in any case."""
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline()
        assert process.poll() is None
        process.stdin.close()
        return process.wait(30)
    finally:
        process.kill()
        process.wait()


def test_an_engine_whose_parent_ends_stops_as_by_sigterm() -> None:
    words = ["engine", "--replica", "us-ashburn-0", "--config", str(ROOT / "regions.yaml"), "--port", "0"]
    command = [sys.executable, "-m", "gorgo.lab.child", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert ended(process) == 0


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    command = [sys.executable, "-c", IGNORES_SIGTERM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert ended(process) == -signal.SIGKILL
