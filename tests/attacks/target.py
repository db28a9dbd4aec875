"""The proxy under attack as a process, its probe, and its memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import clock_gettime, monotonic, sleep

from tests.system.processes import TOKEN, _announced

#: Between two probes, s.
PAUSE_S = 0.005
#: After an attack, s: what it left to do is done.
SETTLE_S = 0.1
#: Linux's kind of a process's clock, below its inverted id (clock_getcpuclockid).
_CPUCLOCK_SCHED = 2
CONFIG = """
proxy: {{region: here, bind: "127.0.0.1:0", admin_bind: "127.0.0.1:0", scrape_interval_s: 0.5, probe_interval_s: 5}}
regions: [{{name: here}}]
replicas:
  - {{name: a, region: here, url: "http://127.0.0.1:{port}", engine: vllm, request_usage: true}}
limits: {{first_token_timeout_s: 5, response_timeout_s: 5, max_body_bytes: 33554432}}
"""


@dataclass(slots=True)
class Target:
    """A running proxy."""

    address: tuple[str, int]
    folder: Path
    pid: int

    def post(self, route: str, body: bytes, *, limit_s: float) -> bytes:
        """Return the first line of the answer to a body; empty for none in time."""
        return self.send(request(route, body), limit_s=limit_s)

    def send(self, data: bytes, *, limit_s: float) -> bytes:
        """Return the first line of the answer to the bytes, once all of it came; empty for none in time."""
        first = b""
        try:
            with socket.create_connection(self.address, timeout=limit_s) as connection:
                sender = threading.Thread(target=_send, args=(connection, data), daemon=True)
                sender.start()
                end = monotonic() + limit_s
                while monotonic() < end and (said := connection.recv(1024 * 1024)):
                    first = first or said.split(b"\r\n")[0]
        except OSError:
            pass
        return first

    def processes(self) -> list[int]:
        """Return the ids of the proxy and of the processes that it started."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [self.pid, *map(int, children.read_text().split())]

    def processor_s(self) -> float:
        """Return the processor time of the proxy's process alone, all its threads."""
        return clock_gettime(~self.pid << 3 | _CPUCLOCK_SCHED)

    def memory(self, name: str) -> int:
        """Return a field of all its processes in bytes."""
        return sum(_status(pid, name) for pid in self.processes())

    def reset_peak(self) -> int:
        """Reset the high-water mark of each process; return the memory now."""
        for pid in self.processes():
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        return self.memory("VmRSS")


def request(route: str, body: bytes) -> bytes:
    """Return a request as bytes."""
    head = b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head % route.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return


def _status(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0) * 1024


def target(folder: Path, port: int, code: Path) -> AbstractContextManager[Target]:
    """Run `gorgo serve` of the code at `code` before an engine."""
    return serving(folder, CONFIG.format(port=port), code)


@contextmanager
def serving(
    folder: Path, config: str, code: Path, *, verb: str = "serve", environ: Mapping[str, str] = {}
) -> Iterator[Target]:
    """Run `gorgo serve`, or `gorgo picker`, of the code at `code`."""
    folder.mkdir(parents=True)
    (folder / "regions.yaml").write_text(config)
    environ = {**os.environ, **environ, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONPATH": str(code)}
    command = [sys.executable, "-m", "gorgo", verb, "--config", str(folder / "regions.yaml")]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        host, _, data_port = _announced(process, folder).url.removeprefix("http://").rpartition(":")
        yield Target((host, int(data_port)), folder, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        sleep(0.1)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass
class Probe:
    """`GET /health` on one connection over and over, and the times that it took.

    `cpu_s` are processor times of the proxy's process in the same spans: the rest of a delay is time of other
    processes, those of this harness included.
    """

    target: Target
    delays_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Probe:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while len(self.delays_s) < 3:
            sleep(0.001)
        del self.delays_s[:], self.cpu_s[:]
        return self

    def __exit__(self, *_: object) -> None:
        sleep(SETTLE_S)
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        with self._connect() as connection:
            while not self._stop.is_set():
                before, began = self.target.processor_s(), monotonic()
                self._ask(connection)
                self.delays_s.append(monotonic() - began)
                self.cpu_s.append(self.target.processor_s() - before)
                self._stop.wait(PAUSE_S)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.target.address, timeout=120)

    def _ask(self, connection: socket.socket) -> None:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        got = b""
        while b'"ok"}' not in got:
            data = connection.recv(4096)
            if not data:
                raise ConnectionError("the probe's connection was closed")
            got += data
