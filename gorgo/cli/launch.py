"""Start of a process with a Router: what `gorgo serve` and `gorgo picker` share.

Owns the way from the text of regions.yaml and the options to a running front end, and the settings of the garbage
collector that such a process has. Leaves the process itself to `gorgo.live.process`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from gorgo.errors import InvalidValueError

if TYPE_CHECKING:
    from socket import socket

    from gorgo.cli.validation import Overrides, ValidConfig
    from gorgo.config.model import Config
    from gorgo.live.control.state_file import PersistedState
    from gorgo.live.listener.sockets import ServerAddresses
    from gorgo.live.process import ProcessOptions
    from gorgo.live.workers.link import WorkerLink, WorkerStart
    from gorgo.live.workers.parent import Inherited

#: As `proxy.processes` has it: more than the processors of any machine in use.
MAX_PROCESSES = 64

StateFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="File that keeps freeze, weights, policy, drain marks and registered replicas.",
    ),
]
RequestLog = Annotated[
    Path | None,
    typer.Option(metavar="FILE", show_default=False, help="Append a line per finished request, without its text."),
]
OutcomeLog = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="Append a line per attempt with all candidates, for `gorgo learn`."
    ),
]
PolicyName = Annotated[str | None, typer.Option(metavar="NAME", help="Routing policy; see `gorgo policies`.")]


class RunFrontEnd(Protocol):
    """The server of a front end."""

    def __call__(
        self, config: Config, options: ProcessOptions, *, ready: Callable[[ServerAddresses], None]
    ) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start: the text of regions.yaml with the options of the command line.

    `config` is the file, or `--replica` where no file is followed. `plain`: without httptools and uvloop.
    """

    config: Path
    text: bytes
    overrides: Overrides
    state: Path | None
    request_log: Path | None
    outcome_log: Path | None
    seed: int | None
    log_format: Literal["json", "text"]
    log_level: str
    plain: bool = False

    def validate(self) -> ValidConfig:
        """Return the configuration. Raises `ConfigError` with every error."""
        from gorgo.cli.validation import validate

        return validate(self.text, source=self.config, overrides=self.overrides)

    def run(self, started: ValidConfig, front_end: RunFrontEnd, shown: Callable[[ServerAddresses], str]) -> None:
        """Run the process until a signal; print the line `shown` once requests can be routed."""
        import secrets

        run = _loop_runner(plain=self.plain)

        def ready(addresses: ServerAddresses) -> None:
            freeze_startup_objects()
            typer.echo(shown(addresses))

        token = self._admin_token()
        self._set_up_logs(started.config)
        # With --seed the key of fingerprints repeats too, for comparisons; without, clients cannot guess it.
        drawn = secrets.randbits(63) if self.seed is None else self.seed
        options = self._options(started, admin_token=token, key=drawn, seed=drawn)
        # The process handles the signals itself: a second one ends its grace period.
        run(front_end(started.config, options, ready=ready))

    def run_parent(
        self,
        started: ValidConfig,
        shown: Callable[[ServerAddresses], str],
        *,
        processes: int,
        inherited: Inherited | None = None,
    ) -> None:
        """Run workers until a signal; print the line `shown` once all of them route requests.

        `inherited` are the listeners of a predecessor, or of systemd.
        """
        import secrets
        from contextlib import ExitStack
        from logging import WARNING

        from gorgo.live.listener.sockets import ServerAddresses, address_of, listening
        from gorgo.live.logs import log
        from gorgo.live.workers.counts import SharedCounts, make_memory
        from gorgo.live.workers.link import WorkerStart
        from gorgo.live.workers.parent import Inherited, Parent, ParentOptions, inheritable, offered, own_command
        from gorgo.live.workers.reports import reports_bytes

        proxy = started.config.proxy
        if not hasattr(os, "memfd_create"):
            raise InvalidValueError(
                "this system", "it has no memory that processes share by descriptor", "Linux, or one process"
            )
        token = self._admin_token()
        self._set_up_logs(started.config)
        with ExitStack() as sockets:
            inherited = inherited or Inherited(None, None)
            data = sockets.enter_context(inherited.data or listening(proxy.bind, "proxy.bind"))
            admin = sockets.enter_context(inherited.admin or listening(proxy.admin_bind, "proxy.admin_bind"))
            offer = inherited.offer or offered(admin)
            if offer is None:
                log("takeover_not_offered", level=WARNING, admin=address_of(admin)[1])
            addresses = ServerAddresses(address_of(data), address_of(admin), tls=proxy.tls.cert is not None)
            memory = make_memory(processes, more=reports_bytes(processes))

            def ready() -> None:
                freeze_startup_objects()
                typer.echo(shown(addresses))

            start = WorkerStart(
                number=0,
                processes=processes,
                leader=0,
                key=secrets.randbits(63) if self.seed is None else self.seed,
                text=self.text,
                admin_token=token,
                data=inheritable(data),
                admin=inheritable(admin),
                counts=memory,
            )
            options = ParentOptions(
                command=own_command(),
                environ=os.environ,
                start=start,
                grace_s=started.config.limits.shutdown_grace_s,
                ready=ready,
                reloads=self.config.is_file(),
                predecessor=inherited.predecessor,
                offer=offer,
            )
            parent = Parent(options, SharedCounts(memory, processes, own=0))
            _loop_runner(plain=self.plain)(parent.run())
        if parent.failed:
            raise SystemExit(parent.failed)

    def run_worker(self, start: WorkerStart, connection: socket, front_end: RunFrontEnd) -> None:
        """Run one of several workers until a signal or the end of its parent."""
        run = _loop_runner(plain=self.plain)
        set_up_logs_of(self)
        run(self._work(start, connection, front_end))

    async def _work(self, start: WorkerStart, connection: socket, front_end: RunFrontEnd) -> None:
        """Get the state in force from the leader, if there is one, and serve."""
        from gorgo.cli.validation import validate
        from gorgo.config.router_settings import share_of
        from gorgo.live.control.state_file import parse_state
        from gorgo.live.workers.link import connect, join

        link = await connect(start, connection)
        try:
            joined = await join(link)
            text, persisted = (
                (self.text, None) if joined is None else (joined[0], parse_state(joined[1], source="leader"))
            )
            started = validate(text, source=self.config, overrides=self.overrides)
            options = self._options(
                started,
                admin_token=start.admin_token,
                key=start.key,
                # Of equal replicas workers draw different ones.
                seed=start.key + start.number,
                link=link,
                persisted=persisted,
                text=text,
            )
            config = share_of(started.config, start.processes)
            await front_end(config, options, ready=lambda _: freeze_startup_objects())
        finally:
            link.close()

    def _admin_token(self) -> str:
        admin_token = self.overrides.admin_token
        if admin_token is None:
            admin_token, words = made_admin_token(self.state)
            typer.echo(f"gorgo: GORGO_ADMIN_TOKEN is not set: {words}", err=True)
        return admin_token

    def _set_up_logs(self, config: Config) -> None:
        from gorgo.live.logs import log_config_warnings, set_up_logs

        set_up_logs(self.log_format, self.log_level)
        log_config_warnings(config)

    def _options(
        self,
        started: ValidConfig,
        *,
        admin_token: str,
        key: int,
        seed: int,
        link: WorkerLink | None = None,
        persisted: PersistedState | None = None,
        text: bytes = b"",
    ) -> ProcessOptions:
        from gorgo.cli.validation import validate
        from gorgo.config.router_settings import share_of
        from gorgo.live.control.state_file import StateFile
        from gorgo.live.process import ProcessOptions
        from gorgo.live.reload.file_watch import ConfigFile

        overrides, processes = self.overrides, 1 if link is None else link.processes
        # A weights file is read once and takes precedence over regions.yaml at each reload too. Addresses need a
        # restart.
        pinned = None if overrides.weights_file is None else (started.policy, started.weights)
        at_reload = replace(overrides, weights_file=None, pinned=pinned, ports=False)

        def parse(text: bytes) -> Config:
            """Return the configuration with the options of the command line, at each reload."""
            return share_of(validate(text, source=self.config, overrides=at_reload).config, processes)

        return ProcessOptions(
            policy=started.policy,
            weights=started.weights,
            admin_token=admin_token,
            metrics_token=overrides.metrics_token,
            environ=os.environ,
            key=key,
            seed=seed,
            # A pipe can be read only once.
            file=ConfigFile(self.config, parse, text or self.text) if self.config.is_file() else None,
            state_file=None if self.state is None else StateFile(self.state),
            request_log=self.request_log,
            outcome_log=self.outcome_log,
            plain=self.plain,
            link=link,
            persisted=persisted,
            text=text,
        )


def set_up_logs_of(start: Launch) -> None:
    """Send the records of a worker to stderr, as its parent's; the parent has logged the warnings of the file."""
    from gorgo.live.logs import set_up_logs

    set_up_logs(start.log_format, start.log_level)


#: What a worker loads before it is one; and what of it only with the own listener.
_LOADED_BEFORE = ("gorgo.proxy.server", "gorgo.cli.validation", "gorgo.live.peer_store.local", "numpy.random")
_LOADED_UNLESS_PLAIN = ("uvloop", "gorgo.live.listener.listener")


def worker_start(*, plain: bool) -> tuple[WorkerStart, socket] | None:
    """Return what the parent of a worker gives it, and the connection; `None` for a process that is no worker.

    A spare one loads the program and waits. It ends where it is not needed.
    """
    descriptor = os.environ.pop("GORGO_WORKER", None)
    if descriptor is None:
        return None
    from importlib import import_module

    from gorgo.live.workers.link import read_start

    for name in (*_LOADED_BEFORE, *(() if plain else _LOADED_UNLESS_PLAIN)):
        import_module(name)
    try:
        return read_start(int(descriptor))
    except EOFError:
        raise SystemExit(0) from None


#: The first descriptor that systemd passes.
_FIRST_OF_SYSTEMD = 3


def inherited_listeners() -> Inherited | None:
    """Return the listeners that this process is started with: of a parent that it takes over from, or of systemd.

    systemd's names of descriptors say which is which, data or admin. One with another name is for data. Raises
    `ConfigError` for two of one name.
    """
    from socket import socket

    descriptor = os.environ.pop("GORGO_TAKEOVER", None)
    if descriptor is not None:
        from gorgo.live.workers.parent import received

        return received(socket(fileno=int(descriptor)))
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit() or int(count) == 0:
        return None
    by_name: dict[str, socket] = {}
    for index in range(int(count)):
        name = names[index] if index < len(names) and names[index] in ("data", "admin") else "data"
        if name in by_name:
            raise InvalidValueError("LISTEN_FDNAMES", ":".join(names), "one socket named data and one named admin")
        by_name[name] = socket(fileno=_FIRST_OF_SYSTEMD + index)
    from gorgo.live.workers.parent import Inherited

    return Inherited(by_name.get("data"), by_name.get("admin"))


def processes_of(given: str | None, config: Config) -> int:
    """Return the number of processes: that of the option, else that of the file."""
    wanted: str | int = config.proxy.processes if given is None else given
    if wanted == "auto":
        return min(MAX_PROCESSES, available_processors())
    try:
        number = int(wanted)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_PROCESSES:
        raise typer.BadParameter(f"--processes {given}: expected a number from 1 to {MAX_PROCESSES}, or auto")
    return number


def available_processors(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the processors that this process may use: of a container with a limit not those of its machine.

    A fraction of one counts as one. `groups` and `own`: where Linux has the limits, and the names of the own groups.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, ceil(min(allowed, _processors_of_limit(groups, own))))


def _processors_of_limit(groups: Path, own: Path) -> float:
    """Return the share of processors that control groups grant, of both versions; infinite without one."""
    paths = {Path(".")}
    with suppress(OSError):
        paths |= {Path(line.split(":", 2)[2].lstrip("/")) for line in own.read_text().splitlines()}
    granted = inf
    for path in paths:
        for folder in (groups / path, groups / "cpu" / path):
            for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
                with suppress(OSError, ValueError):  # no such file, or `max`
                    words = " ".join((folder / name).read_text() for name in names).split()
                    quota, period = map(int, words)
                    granted = min(granted, quota / period if quota > 0 and period > 0 else inf)
    return granted


def _loop_runner(*, plain: bool) -> Callable[[Coroutine[Any, Any, None]], object]:
    """Return what runs the process: uvloop, or with `plain` asyncio's loop. Raises `ConfigError` without its parts."""
    if plain:
        import asyncio

        return asyncio.run
    try:
        import httptools  # noqa: F401 - for the listener, which is loaded later
        import uvloop
    except ImportError as error:
        expected = "httptools and uvloop, or `gorgo serve --plain`, which is slower and needs neither"
        raise InvalidValueError("this Python", str(error), expected) from error
    return uvloop.run


# The admin token of a process that was given none.


#: Behind the name of the state file, whose folder the process may write to.
TOKEN_SUFFIX = ".token"
#: Random bytes of a token: 192 bits, in 32 characters.
TOKEN_BYTES = 24
#: The command line's own bound for a token that is given, in characters; a file of less was cut off.
_TOKEN_CHARS = 32


def made_admin_token(state: Path | None) -> tuple[str, str]:
    """Return an admin token, and words for the operator.

    Beside a state file it is kept in a file that only its owner can read, so that a restart has the same. Without one,
    or where that file cannot be written, it ends with the process.
    """
    import secrets

    from gorgo.config.atomic import PRIVATE, write_atomically

    token = secrets.token_urlsafe(TOKEN_BYTES)
    made = f"made the token {token}"
    if state is None:
        return token, f"{made} for this process; --state FILE keeps one"
    path = state.with_name(state.name + TOKEN_SUFFIX)
    advice = f"for other commands: export GORGO_ADMIN_TOKEN_FILE={path}"
    try:
        path.chmod(PRIVATE)
        stored = path.read_text(encoding="ascii").strip()
        if len(stored) == _TOKEN_CHARS and stored.isprintable() and " " not in stored:
            return stored, f"the token is that of {path}; {advice}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        return token, f"{made} for this process, because {path} cannot be read: {error}"
    try:
        write_atomically(path, f"{token}\n".encode("ascii"), mode=PRIVATE)
    except OSError as error:
        return token, f"{made} for this process, because {path} cannot be written: {error}"
    return token, f"{made}; {advice}"


# The garbage collector: objects of the start are frozen, and collections are rare.
#
# The setting is the process's, so only the command line calls `freeze_startup_objects`. A full collection takes 10 to
# 20 ms, in which no stream proceeds.
#
# Why it is safe: nothing large depends on the collector. Bodies and chunks are freed by their last reference, however a
# request ends (tests/live/test_event_loop.py). Closed connections are cycles of about 30 objects each. A frozen object
# in a cycle is never freed, as of a replica that a reload removes; there are only as many as at the start.


#: New objects before a collection of the youngest generation; 700 by default.
YOUNG_OBJECTS = 5_000
#: Collections of the youngest generation before one of the middle one, as by default.
MIDDLE_RUNS = 10
#: Collections of the middle generation before a full one, which then has at most 150,000 new objects: 10 to 17 ms.
#: By default half a million would take 41 to 53 ms. At worst 5,000 closed connections wait for it, well below 70 MB.
FULL_RUNS = 3


def freeze_startup_objects() -> None:
    """Freeze all objects, set the thresholds and enable the collector; call once, after set-up.

    What the start dropped in cycles stays too: 2 % of the objects, for which a full collection would take a tenth of
    the start.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_RUNS, FULL_RUNS)
