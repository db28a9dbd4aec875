"""The parent of the workers of one router: it has the sockets, starts workers again, and passes frames between them.

Owns the life of the workers (`Parent`), which of them leads, and what a router hands to its successor: its listeners,
over a connection that says when the successor serves (`offered`, `inherit`). Serves no request, and reads no frame but
its head.

Theory of operation. The parent binds the listeners before the first worker starts and closes them after the last one
has ended, so a client that connects waits while there is no worker, and is not refused. Every worker is a fresh
interpreter with the parent's own command line; what it starts with comes over its connection. A worker that ends by
itself is started again: at once where it served for a while, after a pause that grows where it did not. One that ends
before any has served ends the start, with its exit code. One interpreter more has loaded the program and waits for
what it starts with, because loading is nine tenths of a start. The end of the parent, however it comes, is the end of
the connections, by which workers stop.

To be taken over, a parent listens at an abstract Unix socket, named by the address of its admin listener: the name is
as unique as that address, and ends with its last owner. Both ends accept none but their own user and root. The
listeners pass as descriptors, and this socket with them, so the name outlives each parent. The connection then stays
open until the successor says that it serves, or ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gorgo.config.values import split_bind
from gorgo.core.backoff import backoff_s
from gorgo.errors import InvalidValueError
from gorgo.live.logs import log
from gorgo.live.workers.counts import SharedCounts
from gorgo.live.workers.link import ALL, PARENT, Channel, Frame, FrameKind, WorkerRow, WorkerStart, packed, unpacked

#: Variables with the descriptor of a worker's connection, and of a successor's to its predecessor.
WORKER_VARIABLE, TAKEOVER_VARIABLE = "GORGO_WORKER", "GORGO_TAKEOVER"
#: A worker that served for so long is started again at once, s; the pauses of others, s.
SERVED_S = 10.0
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 30.0
#: Workers have the grace period to end their requests, and this to end themselves, s. Then they are killed.
END_S = 10.0
#: To read what a worker that has ended had sent, s.
LAST_FRAMES_S = 1.0


@dataclass(frozen=True, slots=True)
class _Interpreter:
    """A process that becomes a worker with the first frame on its connection."""

    process: asyncio.subprocess.Process
    connection: socket.socket

    def kill(self) -> None:
        """End it before it has become one."""
        self.connection.close()
        with suppress(ProcessLookupError):
            self.process.kill()


@dataclass(slots=True)
class _Worker:
    """One worker, while it runs and between two runs."""

    number: int
    process: asyncio.subprocess.Process | None = None
    channel: Channel | None = None
    state: str = "starting"
    started_s: float = 0.0
    #: Whether its requests have ended, and it will not lead.
    leaves: bool = False
    #: Set with the end of its connection: all that it has sent has been read.
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Ends that nobody asked for: all of them, and those soon after a start, in a row.
    restarts: int = 0
    failures: int = 0
    retry_s: float | None = None

    def as_row(self) -> WorkerRow:
        pid = None if self.process is None else self.process.pid
        return WorkerRow(self.number, pid, self.state, self.restarts, self.retry_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentOptions:
    """What a parent is started with.

    Parameters
    ----------
    command:
        Starts a worker: the parent's own command line.
    environ:
        Of the workers.
    start:
        What each worker starts with, but for its number.
    grace_s:
        The grace period of a stop.
    ready:
        Called once, when all workers serve.
    reloads:
        Whether the workers follow a file, which a SIGHUP has read again.
    predecessor:
        Connection to the parent whose listeners this one takes over.
    offer:
        Where successors are waited for that an operator starts; `None`: nowhere.
    """

    command: Sequence[str]
    environ: Mapping[str, str]
    start: WorkerStart
    grace_s: float
    ready: Callable[[], None]
    reloads: bool = True
    predecessor: socket.socket | None = None
    offer: socket.socket | None = None


@dataclass(slots=True)
class Parent:
    """The workers of one router."""

    options: ParentOptions
    counts: SharedCounts
    workers: list[_Worker] = field(default_factory=list)
    leader: int = 0
    #: Exit code of a worker that ended before all served.
    failed: int = 0
    _stopping: bool = False
    _is_ready: bool = False
    #: What the next worker becomes that is started again.
    _spare: asyncio.Task[_Interpreter] | None = None
    #: Set while a successor starts, and when it serves.
    _successor: asyncio.Task[None] | None = None
    _retired: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Run workers until a signal."""
        self.workers = [_Worker(number) for number in range(self.options.start.processes)]
        for worker in self.workers:
            self.counts.reset(worker.number)
        with self._signals(), self._offering():
            async with asyncio.TaskGroup() as tasks:
                for worker in self.workers:
                    tasks.create_task(self._keep(worker))

    # -- the life of a worker

    async def _keep(self, worker: _Worker) -> None:
        """Run one worker after another until the parent stops."""
        while not self._stopping:
            try:
                await self._start(worker)
            except OSError as error:  # no memory, or no descriptor
                log("worker_not_started", level=logging.ERROR, worker=worker.number, error=error.strerror)
                code = 1
            else:
                code = await self._end_of(worker)
            self._on_end(worker, code)
            if not self._stopping:
                await self._pause(worker)
        worker.state = "ended"

    async def _end_of(self, worker: _Worker) -> int:
        """Wait for the end of a worker; kill one that does not end after a stop."""
        assert worker.process is not None
        ended = asyncio.create_task(worker.process.wait())
        while not ended.done():
            self._changed.clear()
            changed = asyncio.create_task(self._changed.wait())
            # A worker that retires has the period twice: to end its requests, and to stop.
            limit_s = self.options.grace_s * (1 + self._retired) + END_S if self._stopping else None
            await asyncio.wait((ended, changed), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done():
                changed.cancel()
                if not ended.done():
                    log("worker_killed", level=logging.WARNING, worker=worker.number, after_s=limit_s)
                    worker.process.kill()
                    await ended
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_FRAMES_S):
                await worker.closed.wait()
        return ended.result()

    async def _start(self, worker: _Worker) -> None:
        """Start a worker. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        worker.state, worker.started_s, worker.retry_s = "starting", loop.time(), None
        worker.leaves, worker.closed = False, asyncio.Event()
        interpreter = await self._take_interpreter()
        worker.process, connection = interpreter.process, interpreter.connection
        if self.workers[self.leader].state == "waiting":
            self.leader = worker.number
        start = replace(self.options.start, number=worker.number, leader=self.leader)
        connection.setblocking(False)
        _, worker.channel = await loop.create_unix_connection(
            lambda: Channel(lambda frame: self._on_frame(worker, frame), worker.closed.set), sock=connection
        )
        worker.channel.write_frame(Frame(FrameKind.START, PARENT, worker.number, 0, packed(start)))
        if self._stopping:
            self._signal(worker, signal.SIGTERM)
        self._publish_table()

    async def _take_interpreter(self) -> _Interpreter:
        """Return the spare interpreter, or a new one. Raises `OSError`."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with suppress(OSError):
                interpreter = await spare
                if interpreter.process.returncode is None:
                    return interpreter
                interpreter.kill()
        return await self._new_interpreter()

    async def _new_interpreter(self) -> _Interpreter:
        ours, theirs = socket.socketpair()
        start = self.options.start
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *self.options.command,
                stdin=subprocess.DEVNULL,
                # The parent alone says that requests can be routed, and its end ends what is read there.
                stdout=subprocess.DEVNULL,
                env={**self.options.environ, WORKER_VARIABLE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(), start.data, start.admin, start.counts),
                # A terminal's Ctrl-C is the parent's: workers would take what it passes on for a second one.
                start_new_session=True,
            )
        return _Interpreter(process, ours)

    def _prepare_spare(self) -> None:
        if self._is_ready and not self._stopping and self._spare is None:
            self._spare = asyncio.get_running_loop().create_task(self._new_interpreter())

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.add_done_callback(lambda task: None if task.exception() else task.result().kill())

    def _on_end(self, worker: _Worker, code: int) -> None:
        """Take note of the end of a worker, and let another one lead."""
        if worker.channel is not None:
            worker.channel.close()
        self.counts.reset(worker.number)
        lived_s = asyncio.get_running_loop().time() - worker.started_s
        worker.process, worker.channel = None, None
        if self._stopping:
            worker.state = "ended"
        elif not self._is_ready:
            self.failed = max(code, 1)  # a signal is a negative one
            self._stop()
        else:
            worker.restarts += 1
            worker.failures = 0 if lived_s >= SERVED_S else worker.failures + 1
            worker.state, worker.retry_s = "waiting", self._retry_s(worker)
            log(
                "worker_ended",
                level=logging.ERROR,
                worker=worker.number,
                exit_code=code,
                served_s=round(lived_s, 1),
                retry_s=worker.retry_s,
            )
        self._send_all(FrameKind.ENDED, worker.number)
        if worker.number == self.leader:
            self._choose_leader()
        self._publish_table()

    def _retry_s(self, worker: _Worker) -> float:
        if worker.failures <= 1:
            return 0.0
        return backoff_s(worker.failures - 1, first_s=FIRST_RETRY_S, longest_s=LAST_RETRY_S)

    async def _pause(self, worker: _Worker) -> None:
        """Wait for the next start, or for a stop."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + (worker.retry_s or 0.0)
        while not self._stopping and (left_s := ends_s - loop.time()) > 0.0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def _choose_leader(self) -> None:
        """Let the first worker that serves lead; without one the first that starts will. One that leaves does not."""
        running = [worker.number for worker in self.workers if worker.process is not None and not worker.leaves]
        serving = [number for number in running if self.workers[number].state == "ready"]
        self.leader = next(iter(serving or running), self.leader)
        self._send_all(FrameKind.LEADER, self.leader)

    # -- frames

    def _on_frame(self, sender: _Worker, frame: Frame) -> None:
        if frame.kind is FrameKind.READY:
            self._on_ready(sender)
        elif frame.kind is FrameKind.LEAVE:
            self._on_leave(sender)
        elif frame.kind is FrameKind.RESTART:
            self._restart(self.workers[unpacked(frame.content)])
        elif frame.receiver == ALL:
            for worker in self.workers:
                if worker is not sender and worker.channel is not None:
                    worker.channel.write_frame(frame)
        elif 0 <= frame.receiver < len(self.workers):
            channel = self.workers[frame.receiver].channel
            if channel is not None:
                channel.write_frame(frame)
            elif sender.channel is not None:  # no answer will come
                sender.channel.write_frame(Frame(FrameKind.ENDED, PARENT, sender.number, 0, packed(frame.receiver)))

    def _on_ready(self, worker: _Worker) -> None:
        worker.state = "ready"
        log("worker_ready", worker=worker.number, pid=None if worker.process is None else worker.process.pid)
        self._publish_table()
        if not self._is_ready and all(each.state == "ready" for each in self.workers):
            predecessor = self.options.predecessor
            if predecessor is not None and not announce(predecessor):
                log("takeover_late", level=logging.ERROR)
                self.failed = 1
                self._stop()
                return
            self._is_ready = True
            self.options.ready()
        self._prepare_spare()

    def _on_leave(self, worker: _Worker) -> None:
        """Let another one lead, and answer the worker in any case.

        In a stop all workers have had the signal, read or not: the leader stays, and writes the last lines of the rest.
        """
        worker.leaves = True
        if worker.number == self.leader and (self._retired or not self._stopping):
            self._choose_leader()
        elif worker.channel is not None:
            worker.channel.write_frame(Frame(FrameKind.LEADER, PARENT, worker.number, 0, packed(self.leader)))

    def _restart(self, worker: _Worker) -> None:
        """End a worker in order; it is started again."""
        if worker.state == "ready":
            worker.state = "stopping"
            self._signal(worker, signal.SIGTERM)
            self._publish_table()

    def _publish_table(self) -> None:
        self._send_all(FrameKind.TABLE, tuple(worker.as_row() for worker in self.workers))

    def _send_all(self, kind: FrameKind, content: object) -> None:
        data = packed(content)
        for worker in self.workers:
            if worker.channel is not None:
                worker.channel.write_frame(Frame(kind, PARENT, worker.number, 0, data))

    # -- signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: self._stop,
            signal.SIGINT: self._stop,
            signal.SIGHUP: self._reload,
            signal.SIGUSR2: self._begin_takeover,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """Pass the signal on: the first one stops workers in order, a second one at once."""
        self._stopping = True
        self._drop_spare()
        self._changed.set()
        for worker in self.workers:
            self._signal(worker, signal.SIGTERM)

    def _reload(self) -> None:
        """Let the leader read the file again; it passes on what it reads."""
        leader = self.workers[self.leader]
        if self.options.reloads and leader.state == "ready":
            self._signal(leader, signal.SIGHUP)

    # -- hot restart

    def _begin_takeover(self) -> None:
        """Start a successor on the same listeners; once it serves, retire."""
        if self._accepts_successor:
            self._successor = asyncio.get_running_loop().create_task(self._start_successor())

    @property
    def _accepts_successor(self) -> bool:
        return self._is_ready and not self._stopping and self._successor is None

    @contextmanager
    def _offering(self) -> Iterator[None]:
        """Wait for a successor that an operator starts."""
        offer = self.options.offer
        if offer is None:
            yield
            return
        offer.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(offer.fileno(), self._on_successor, offer)
        try:
            yield
        finally:
            self._end_offer()

    def _end_offer(self) -> None:
        """Leave the name to a successor: the socket is open there."""
        if self.options.offer is not None and self.options.offer.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.options.offer.fileno())
            self.options.offer.close()

    def _on_successor(self, offer: socket.socket) -> None:
        try:
            connection, _ = offer.accept()
        except OSError:  # it has gone
            return
        pid = peer_of(connection)
        if pid is None or not self._accepts_successor:
            connection.close()
            return
        self._successor = asyncio.get_running_loop().create_task(self._accept_successor(connection, pid))

    async def _accept_successor(self, connection: socket.socket, pid: int) -> None:
        with connection:
            serves = await self._wait_for_successor(connection, pid)
        if not serves:
            self._keep_on(pid, None)

    async def _start_successor(self) -> None:
        options = self.options
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                successor = await asyncio.create_subprocess_exec(
                    *options.command,
                    env={**options.environ, TAKEOVER_VARIABLE: str(theirs.fileno())},
                    pass_fds=(theirs.fileno(),),
                )
            serves = await self._wait_for_successor(ours, successor.pid)
        if not serves:
            self._keep_on(successor.pid, await successor.wait())

    async def _wait_for_successor(self, connection: socket.socket, pid: int) -> bool:
        """Give a successor the listeners, and retire once it serves; return whether it does.

        Until then no change is made here: it would not have it.
        """
        log("takeover_begun", pid=pid)
        self._send_all(FrameKind.PAUSE, True)
        connection.setblocking(False)
        loop, start, said = asyncio.get_running_loop(), self.options.start, b""
        try:
            pass_listeners(connection, start.data, start.admin, self.options.offer)
            async with asyncio.timeout(LIMIT_S):
                said = await loop.sock_recv(connection, len(SERVES))
        except TimeoutError:
            with suppress(OSError):
                connection.send(LATE)
        except OSError:  # it has ended
            pass
        if said == SERVES:
            log("takeover_done", pid=pid)
            self._retire()
        return said == SERVES

    def _keep_on(self, pid: int, code: int | None) -> None:
        """Go on without the successor."""
        log("takeover_failed", level=logging.ERROR, pid=pid, exit_code=code)
        self._send_all(FrameKind.PAUSE, False)
        self._successor = None

    def _retire(self) -> None:
        """Let the workers end their requests, and accept no more."""
        self._stopping = self._retired = True
        self._drop_spare()
        self._end_offer()
        self._send_all(FrameKind.RETIRE, None)
        self._changed.set()

    def _signal(self, worker: _Worker, number: signal.Signals) -> None:
        if worker.process is not None and worker.state != "waiting":
            with suppress(ProcessLookupError):
                worker.process.send_signal(number)


def own_command() -> list[str]:
    """Return the command line of this process for `python -m gorgo`, by the same interpreter.

    A program that wraps the command is the parent's alone. The folder in which the command was called is no place to
    import from, unless it was for this process.
    """
    from_folder = "-m" in sys.orig_argv and not sys.flags.safe_path
    return [sys.executable, *(() if from_folder else ("-P",)), "-m", "gorgo", *sys.argv[1:]]


def inheritable(listener: socket.socket) -> int:
    """Return a listener's descriptor, for children."""
    os.set_inheritable(listener.fileno(), True)
    return listener.fileno()


#: What a successor says once it serves, and what it hears if that took too long.
SERVES, LATE = b"serves", b"late"
#: A successor that does not serve by then is given up, s: hundreds of replicas and a model are read in a tenth of it.
#: No change is made until then.
LIMIT_S = 300.0
#: For the listeners of a parent, whose event loop serves nothing else, s.
_ANSWER_S = 5.0
_LISTENERS = b"listeners"
#: Users at the other end beside the own one: root can do all of this anyway.
_TRUSTED = (0,)
#: Process, user and group at the other end.
_PEER = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a parent is started with, of a predecessor or of systemd; `None` is its own to make."""

    data: socket.socket | None
    admin: socket.socket | None
    #: At which the next successor is waited for.
    offer: socket.socket | None = None
    #: The connection to the predecessor.
    predecessor: socket.socket | None = None


def offered(admin: socket.socket) -> socket.socket | None:
    """Return the socket at which a successor is waited for; `None` if another process has its name."""
    offer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        offer.bind(_name(admin.getsockname()))
    except OSError:
        offer.close()
        return None
    offer.listen(1)
    return offer


def peer_of(connection: socket.socket) -> int | None:
    """Return the process at the other end; `None` if it is another user's."""
    pid, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid if user in (*_TRUSTED, os.geteuid()) else None


def pass_listeners(connection: socket.socket, data: int, admin: int, offer: socket.socket | None) -> None:
    """Send the listeners to a successor. Raises `OSError`."""
    descriptors = [data, admin, *(() if offer is None else (offer.fileno(),))]
    socket.send_fds(connection, [_LISTENERS], descriptors)


def inherit(admin_bind: str) -> Inherited:
    """Return what the router has that runs with this address for `admin`. Raises `ConfigError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(_name(_resolved(admin_bind)))
    except OSError as error:
        connection.close()
        raise InvalidValueError(
            "--takeover",
            f"no router can be taken over at the admin address {admin_bind}",
            "one that runs on this machine with --processes, or --admin-bind with its address",
        ) from error
    if peer_of(connection) is None:
        connection.close()
        raise InvalidValueError("--takeover", f"the router at {admin_bind} is another user's", "one of this user")
    return received(connection)


def received(connection: socket.socket) -> Inherited:
    """Return what a predecessor sends. Raises `ConfigError`."""
    connection.settimeout(_ANSWER_S)
    word, descriptors = b"", list[int]()
    with suppress(OSError):
        word, descriptors, _, _ = socket.recv_fds(connection, len(_LISTENERS), 3)
    sockets = [socket.socket(fileno=each) for each in descriptors]
    if word != _LISTENERS or len(sockets) < 2:
        connection.close()
        raise InvalidValueError(
            "--takeover",
            "the running router hands nothing over: it starts, stops, or another successor starts",
            "one that serves",
        )
    data, admin, *offers = sockets
    return Inherited(data, admin, next(iter(offers), None), connection)


def announce(predecessor: socket.socket) -> bool:
    """Say to the predecessor that this router serves; return whether it may: not if the predecessor has given it up.

    One that has ended in the meantime serves nothing any longer.
    """
    predecessor.setblocking(False)
    with predecessor:
        with suppress(OSError):
            if predecessor.recv(len(LATE)) == LATE:
                return False
        with suppress(OSError):
            predecessor.send(SERVES)
    return True


def _resolved(bind: str) -> tuple[Any, ...]:
    """Return the address that a listener at `bind` has."""
    host, port = split_bind(bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]


def _name(address: tuple[Any, ...]) -> bytes:
    host, port = address[:2]
    return f"\0gorgo/{host}/{port}".encode()
