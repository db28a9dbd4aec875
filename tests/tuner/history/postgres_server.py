"""A PostgreSQL server of the distribution's package for one test run: own folder, own port on loopback, stopped."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from types import TracebackType

#: `initdb` and a start take about three seconds.
START_S = 60


def find_binaries() -> Path | None:
    """The folder with `initdb` and `pg_ctl`, the newest version first."""
    packaged = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: -float(path.parts[-3]))
    found = [*packaged, *(Path(path) for path in [shutil.which("initdb")] if path)]
    return found[0].parent if found else None


class PostgresServer:
    """A running server while the context lasts."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._folder = folder
        self._port = _free_port()
        self._databases = 0

    def __enter__(self) -> PostgresServer:
        data = self._folder / "data"
        data.mkdir()
        if os.geteuid() == 0:  # the server refuses to run as root
            for path in (data, *data.parents):
                if path == Path("/tmp"):
                    break
                path.chmod(path.stat().st_mode | 0o055)
            shutil.chown(data, "postgres", "postgres")
        self._run("initdb", "-D", str(data), "-U", "gorgo", "-A", "trust", "--no-sync")
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._run("pg_ctl", "-D", str(data), "-w", "-t", str(START_S), "-l", str(data / "log"), "-o", options, "start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-w", "-m", "immediate", "stop")

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

    def _run(self, program: str, *arguments: str) -> None:
        user = "postgres" if os.geteuid() == 0 else None
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(
            command,
            user=user,
            cwd="/",
            timeout=2 * START_S,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
