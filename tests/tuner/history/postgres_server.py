"""A PostgreSQL server of the distribution's package for one test run: own folder, own port on loopback, stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tests.ports import free_port

#: `initdb` and a start take about three seconds.
START_S = 60


def find_binaries() -> Path | None:
    """The folder with `initdb` and `postgres`, the newest version first."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: -float(path.parts[-3]))
    found = [*packaged, *(Path(path) for path in [shutil.which("initdb")] if path)]
    return found[0].parent if found else None


class PostgresServer:
    """A running server while the context lasts.

    Its folder is none of pytest's: other runs close or remove those, and the server, which refuses to run as root, has
    to reach it.
    """

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = "postgres" if os.geteuid() == 0 else None
        self._port = free_port()
        self._databases = 0

    def __enter__(self) -> PostgresServer:
        self._folder = tempfile.TemporaryDirectory(prefix="gorgo-postgres-")
        data = self._folder.name
        if self._user is not None:
            shutil.chown(data, self._user, self._user)
        made = subprocess.run(
            [self._binaries / "initdb", "-D", data, "-U", "gorgo", "-A", "trust", "--no-sync"],
            user=self._user,
            cwd="/",
            timeout=2 * START_S,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        options = [word for setting in settings for word in ("-c", setting)]
        command = [str(self._binaries / "postgres"), "-D", data, "-p", str(self._port), *options]
        self._process = subprocess.Popen(
            command, user=self._user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_it_answers()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(START_S)
        self._folder.cleanup()

    def new_database(self) -> str:
        """URL of a database that nobody has used."""
        import psycopg

        self._databases += 1
        name = f"history{self._databases}"
        with psycopg.connect(f"{self._base}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"{self._base}/{name}"

    @property
    def _base(self) -> str:
        return f"postgresql://gorgo@127.0.0.1:{self._port}"

    def _wait_until_it_answers(self) -> None:
        import psycopg

        deadline_s = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, "postgres has ended"
            try:
                psycopg.connect(f"{self._base}/postgres").close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline_s, "postgres does not answer"
                time.sleep(0.05)
            else:
                return
