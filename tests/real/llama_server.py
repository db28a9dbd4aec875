"""Starts and stops llama.cpp servers; says why when this machine cannot."""

from __future__ import annotations

import importlib.util
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_PROGRAM = Path(__file__).with_name("llama_process.py")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


def missing_reason() -> str | None:
    """Why no llama.cpp server can run here; None when it can."""
    if importlib.util.find_spec("xllamacpp") is None:
        return "REAL ENGINE TESTS SKIPPED: the wheel xllamacpp (llama.cpp's server) is not installed on this platform"
    return None


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A running server."""

    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def processing(self) -> int:
        """Requests that the engine itself says it works on."""
        slots = httpx.get(f"{self.url}/slots", timeout=10).json()
        return sum(bool(slot["is_processing"]) for slot in slots)


@contextmanager
def llama_server(
    model: Path, *, slots: int = 4, context: int = 16_384, cache_mib: int = 64, metrics: bool = True, port: int = 0
) -> Iterator[LlamaServer]:
    """A server with `slots` places of `context / slots` tokens each; stopped by its pid at the end, if it runs yet.

    Sequences that leave their slots stay in a cache of `cache_mib`, of the tiny model 1,024 tokens per MiB.
    """
    command = [sys.executable, str(_PROGRAM), "--model", str(model), "--slots", str(slots), "--context", str(context)]
    command += ["--port", str(port), "--cache-mib", str(cache_mib)]
    log = model.with_suffix(f".{'metrics' if metrics else 'plain'}.log")
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command + ([] if metrics else ["--no-metrics"]), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield LlamaServer(url=_announced(process, log), pid=process.pid)
    finally:
        _stop(process)


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], _START_TIMEOUT_S)
    words = process.stdout.readline().split() if readable else []
    if words[:1] != ["listening"]:
        raise RuntimeError(f"llama.cpp did not start within {_START_TIMEOUT_S:.0f} s: {log.read_text()[-2000:]}")
    return words[1]


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
