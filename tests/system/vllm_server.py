"""Starts and stops vLLM on the CPU, each in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gorgo.engines.exposition import read_gauges
from tests.ports import free_port
from tests.system.environments import Environment

#: Two at once need 45 s on two idle cores.
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 8192
CACHED_TOKENS_FLAG = "--enable-prompt-tokens-details"


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server."""

    url: str
    #: Of its process group.
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """As `kill -9` of the server and of its engine's core."""
        os.killpg(self.pid, signal.SIGKILL)

    def running(self) -> float:
        """Requests that the engine itself says it works on."""
        name = "vllm:num_requests_running"
        return read_gauges(httpx.get(f"{self.url}/metrics", timeout=10).text, {name})[name]


def keep_apart(server: VllmServer) -> None:
    """Give the engine's worker the first core, and its other processes and this one the others, if there are two.

    The worker computes while the core waits for it in a loop. Without it each moves to the other's core, and steps took
    a third longer, prompts in a replay up to twice as long.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        return
    os.sched_setaffinity(0, others)
    for pid in _with_children(server.pid):
        tasks = Path(f"/proc/{pid}/task")
        cores = [first] if "Worker" in (tasks.parent / "comm").read_text() else others
        for task in tasks.iterdir():
            os.sched_setaffinity(int(task.name), cores)


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _with_children(int(child))


@contextmanager
def vllm_server(
    environment: Environment, checkpoint: Path, *flags: str, port: int | None = None
) -> Iterator[VllmServer]:
    """A server, on a free port unless one is given; that it is ready is left to `wait_until_ready`, so that several
    start at once.
    """
    port = free_port() if port is None else port
    log = checkpoint.parent / f"vllm-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_command(environment, checkpoint, port), *flags],
            env={**os.environ, **ENGINE_ENVIRONMENT},
            cwd=checkpoint.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", process.pid)
    finally:
        _stop(process)


def wait_until_ready(*servers: VllmServer, timeout_s: float = _START_TIMEOUT_S) -> None:
    """Until each answers `/health`; raises after a time, by default five minutes."""
    deadline = time.monotonic() + timeout_s
    for server in servers:
        while not _answers(server):
            if time.monotonic() > deadline:
                raise TimeoutError(f"vLLM at {server.url} did not start within {timeout_s:.0f} s")
            time.sleep(0.25)


#: No look-ups, no usage reports, one thread each: two servers and a load tool share the machine.
ENGINE_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Brings the route that empties the prefix cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # `gorgo` may be on the path of the tests; the engine must not see it.
    "PYTHONPATH": "",
}


def _command(environment: Environment, checkpoint: Path, port: int) -> list[str]:
    options = {
        "--model": str(checkpoint),
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(MAX_MODEL_TOKENS),
        "--max-num-seqs": "8",
        "--block-size": str(_BLOCK_TOKENS),
        # 32,000 KV tokens: what the tests cache fits, and start-up does not measure the machine's memory.
        "--num-gpu-blocks-override": "1000",
    }
    # The `vllm` command looks for a distribution of that name, which the CPU build is not; the module does not.
    module = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *(word for pair in options.items() for word in pair), "--enforce-eager"]


def _answers(server: VllmServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole group, because the engine's core is a process of its own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
