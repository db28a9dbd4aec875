"""Child processes: started, watched until they are ready, and always stopped.

Their output goes to files, never to pipes that could fill. They are stopped by SIGTERM, a bounded wait and SIGKILL,
also after Ctrl-C during the stop. `gorgo` processes end by themselves if this one is killed (`gorgo.apps.child`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gorgo.config.atomic import create_file
from gorgo.errors import FleetError

#: Four interpreters that start at once on two slow cores.
READY_TIMEOUT_S = 30.0
#: Nothing is in flight when a fleet is stopped, so a process that needs longer hangs.
STOP_TIMEOUT_S = 5.0
#: For one that has something to put in order first, and a disk to wait for.
FINISH_TIMEOUT_S = 20.0
POLL_S = 0.02
#: Of a process's output in an error.
LAST_LINES = 8


class Processes:
    """`python -m gorgo ...` processes of one fleet.

    Parameters
    ----------
    logs:
        Folder for one log file per process.
    environ:
        Their environment.
    stop_timeout_s:
        Between SIGTERM and SIGKILL.
    """

    def __init__(self, logs: Path, environ: Mapping[str, str], *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._logs = logs
        self._environ = dict(environ)
        self._stop_timeout_s = stop_timeout_s
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        #: Ends of the pipe by which children notice that this process has ended; not inherited but as their stdin.
        self._alive: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `gorgo` with `arguments`, without waiting."""
        self._alive = self._alive or os.pipe()
        self._start(name, [sys.executable, "-m", "gorgo.apps.child", *arguments], stdin=self._alive[0])

    def start_command(self, name: str, command: Sequence[str]) -> None:
        """Start any command under `name`."""
        self._start(name, command, stdin=subprocess.DEVNULL)

    def _start(self, name: str, command: Sequence[str], *, stdin: int) -> None:
        with create_file(self._log(name)) as log:
            self._running[name] = subprocess.Popen(
                list(command), stdin=stdin, stdout=log, stderr=subprocess.STDOUT, env=self._environ
            )

    def wait_for_line(self, name: str, pattern: str, *, timeout_s: float = READY_TIMEOUT_S) -> re.Match[str]:
        """Return the first match in the process's output; raises `FleetError` if it ends or prints no match."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self._running[name].poll() is not None
            if found := re.search(pattern, self._said(name), re.MULTILINE):
                return found
            if ended or time.monotonic() > deadline_s:
                raise FleetError(f"{name} {self._state(name)} before it was ready{self._last_words(name)}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise `FleetError` if a process has ended by itself."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise FleetError(f"{name} {self._state(name)}{self._last_words(name)}")

    def finish(self, name: str, *, timeout_s: float = FINISH_TIMEOUT_S) -> str:
        """Stop one process with SIGTERM and return its output.

        Raises `FleetError` if it does not end, or fails.
        """
        self._running[name].terminate()
        return self.wait(name, timeout_s=timeout_s)

    def wait(self, name: str, *, timeout_s: float = FINISH_TIMEOUT_S) -> str:
        """Wait for a process that ends by itself, and return its output."""
        process = self._running[name]
        _wait(process, time.monotonic() + timeout_s)
        if process.poll() != 0:
            raise FleetError(f"{name} {self._state(name)}{self._last_words(name)}")
        del self._running[name]
        return self._said(name)

    def stop(self) -> None:
        """Stop all running processes."""
        try:
            for process in self._running.values():
                process.terminate()
            deadline_s = time.monotonic() + self._stop_timeout_s
            for process in self._running.values():
                _wait(process, deadline_s)
        finally:
            for process in self._running.values():
                process.kill()  # does nothing to one that has ended
                process.wait()
            self._running.clear()
            for end in self._alive or ():
                os.close(end)
            self._alive = None

    def _state(self, name: str) -> str:
        code = self._running[name].poll()
        return "said nothing of the kind" if code is None else f"ended with exit code {code}"

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _said(self, name: str) -> str:
        return self._log(name).read_text(encoding="utf-8", errors="replace")

    def _last_words(self, name: str) -> str:
        lines = self._said(name).splitlines()[-LAST_LINES:]
        return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> None:
    try:
        process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return
