"""The worker process with the authors' package, as the tests call it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.system.environments import Environment

_WORKER = Path(__file__).with_name("worker.py")
_STOP_TIMEOUT_S = 20


class Released:
    """Calls of the worker; each is a line and its answer another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, name: str, cases: Sequence[Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, list(cases)]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the worker has ended: {self._process.poll()}"
        return json.loads(line)


@contextmanager
def released(environment: Environment) -> Iterator[Released]:
    """The worker, which ends with its input. `-I`: this project is not on its path."""
    command = [str(environment.python), "-I", str(_WORKER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Released(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(_STOP_TIMEOUT_S)
