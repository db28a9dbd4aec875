"""A worker's end of the connection to its parent: which worker leads, and what it says to the others.

Owns what a worker starts with (`WorkerStart`), its sockets, questions to other workers with their answers
(`WorkerLink`), and the frames that pass with their bounds (`Channel`). Leaves what is said to those who say it: each
topic has one handler; and who gets a frame to `parent`.

Theory of operation. One worker leads: it probes, scrapes, trains, writes the state file and answers the admin listener.
The parent names it, and another one when it has ended. The end of the parent is the end of the connection, and the
worker then stops as at a signal. Each worker has one connection, to the parent, which passes frames on to the others by
their head alone. All ends are this program's own and of one machine, so what a frame carries is pickled, and its age is
a difference of the machine's monotonic clock. Nobody waits for a slow reader. One that misses a frame would differ from
the rest for good, so its connection is cut, and the worker is started anew. What the next one replaces, a report of
load, is no frame (`reports`).
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any, cast

from gorgo.live.event_loop import first_of
from gorgo.live.logs import log, log_failure
from gorgo.live.workers.counts import SharedCounts

#: Length of the content, kind, sender, receiver, number.
_HEAD = struct.Struct("!IBhhI")
HEAD_BYTES = _HEAD.size
#: As a receiver: every other worker. And as sender or receiver: the parent.
ALL, PARENT = -1, -2
#: Bytes that wait for a reader: above them the connection is cut. A whole push of a large cache waits below it.
MAX_WAITING_BYTES = 64 << 20


class FrameKind(IntEnum):
    """What a frame is."""

    #: From the parent: what the worker starts with, which worker leads, one that has ended, all workers, the end.
    START = 1
    LEADER = 2
    ENDED = 3
    TABLE = 4
    RETIRE = 5
    #: Whether changes wait for a successor.
    PAUSE = 12
    #: From a worker, to the parent: it serves; one that is to be started again; it ends and leads no longer, which the
    #: parent answers with the leader.
    READY = 6
    RESTART = 11
    LEAVE = 13
    #: Between workers: an event, a question and its answer.
    EVENT = 8
    QUESTION = 9
    ANSWER = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `content` is pickled."""

    kind: FrameKind
    sender: int
    receiver: int
    number: int
    content: bytes

    def as_bytes(self) -> bytes:
        """Return the form on the socket.

        >>> frame = Frame(FrameKind.EVENT, 0, ALL, 7, b"content")
        >>> read_head(frame.as_bytes()[:HEAD_BYTES])
        (7, <FrameKind.EVENT: 8>, 0, -1, 7)
        """
        head = _HEAD.pack(len(self.content), self.kind, self.sender, self.receiver, self.number)
        return head + self.content


def read_head(head: bytes) -> tuple[int, FrameKind, int, int, int]:
    """Return the length of the content, and the fields before it. Raises `ValueError`."""
    size, kind, sender, receiver, number = _HEAD.unpack(head)
    return size, FrameKind(kind), sender, receiver, number


def packed(content: object) -> bytes:
    """Return what a frame carries."""
    return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)


def unpacked(content: bytes) -> Any:
    """Return what a frame of this program carries."""
    return pickle.loads(content)


class Channel(asyncio.Protocol):
    """One end of a connection.

    Parameters
    ----------
    on_frame:
        Called with each frame, in order.
    on_end:
        Called once when the other end has closed, or was cut.
    """

    def __init__(self, on_frame: Callable[[Frame], None], on_end: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def write_frame(self, frame: Frame) -> bool:
        """Write a frame; return whether it was taken. A reader that would miss one is cut."""
        if self._transport is None or self._transport.is_closing():
            return False
        waiting = self._transport.get_write_buffer_size()
        if waiting > MAX_WAITING_BYTES:
            self._transport.abort()
            return False
        self._transport.write(frame.as_bytes())
        return True

    def close(self) -> None:
        """Close this end, after what was written."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, size = 0, len(received)
        while size - start >= _HEAD.size:
            length, kind, sender, receiver, number = read_head(bytes(received[start : start + _HEAD.size]))
            end = start + _HEAD.size + length
            if size < end:
                break
            content = bytes(received[start + _HEAD.size : end])
            start = end
            self._on_frame(Frame(kind, sender, receiver, number, content))
        if start:
            del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._on_end()


#: For the answer of another worker: its event loop has a turn of some milliseconds at most.
ANSWER_S = 5.0

#: For the others to have sent what they had for a leader that ends, and for those that end too to have ended, s: their
#: requests have ended by then.
LEAVE_S = 5.0

#: For the state of a leader that starts itself: it probes its replicas for five seconds at most.
JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """What a worker gets from its parent.

    Parameters
    ----------
    number, processes:
        The worker, from 0, and how many there are.
    leader:
        The worker that leads.
    key:
        Of fingerprints, one per start of all workers.
    text:
        Of regions.yaml, as the parent has read it.
    admin_token:
        That of all workers.
    data, admin, counts:
        Inherited descriptors: the listeners, and the memory of shared counts.
    """

    number: int
    processes: int
    leader: int
    key: int
    text: bytes
    admin_token: str
    data: int
    admin: int
    counts: int


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as its parent knows it."""

    number: int
    pid: int | None
    #: `starting`, `ready`, `stopping`, or `waiting` for its next start.
    state: str
    #: Ends that nobody asked for.
    restarts: int = 0
    #: Until the next start, s.
    retry_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "worker": self.number,
            "pid": self.pid,
            "state": self.state,
            "restarts": self.restarts,
            "retry_s": self.retry_s,
        }


class WorkerUnreachable(Exception):  # noqa: N818 - what happened, as `TimeoutError`
    """Another worker has ended, or did not answer in time."""


Handler = Callable[..., Awaitable[Any]]


@dataclass(slots=True)
class WorkerLink:
    """The connection of one worker, and its sockets."""

    start: WorkerStart
    counts: SharedCounts
    leader: int
    #: Set while this worker leads.
    leads_now: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set when the parent has ended, and when it asks to leave the listeners to others.
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    retiring: asyncio.Event = field(default_factory=asyncio.Event)
    #: While a successor starts: it has the state of before.
    paused: bool = False
    #: Workers that have got the state in force here, and have not ended.
    joined: set[int] = field(default_factory=set)
    #: All workers, as the parent last said.
    rows: tuple[WorkerRow, ...] = ()
    #: Called with the number of a worker that has ended.
    on_ended: list[Callable[[int], None]] = field(default_factory=list)
    _on_parent_end: Callable[[], None] | None = None
    _channel: Channel | None = None
    _events: dict[str, Callable[..., None]] = field(default_factory=dict)
    _handlers: dict[str, Handler] = field(default_factory=dict)
    #: Set with the next table of workers.
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set with the next word of the parent on who leads.
    _decided: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set with the next handler.
    _registered: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: Any = field(default_factory=lambda: count(1))
    _open: dict[int, tuple[int, asyncio.Future[Any]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def number(self) -> int:
        return self.start.number

    @property
    def processes(self) -> int:
        return self.start.processes

    @property
    def leads(self) -> bool:
        """Whether this worker does what is done once for all."""
        return self.leader == self.start.number

    @property
    def serving(self) -> list[int]:
        """Return the other workers that serve."""
        return [worker.number for worker in self.rows if worker.state == "ready" and worker.number != self.number]

    @property
    def others(self) -> list[int]:
        """Return the other workers that have the state of the leader: those that serve, and those that will."""
        return sorted({*self.serving, *self.joined})

    def listener(self, which: int) -> socket.socket:
        """Return a socket of an inherited descriptor."""
        return socket.socket(fileno=which)

    # -- out

    def ready(self) -> None:
        """Say that this worker serves."""
        self._send(FrameKind.READY, PARENT, 0, None)

    def restart(self, worker: int) -> None:
        """Let the parent start a worker again."""
        self._send(FrameKind.RESTART, PARENT, 0, worker)

    def publish(self, topic: str, *arguments: object, to: int = ALL) -> None:
        """Let all others, or one, apply an event."""
        self._send(FrameKind.EVENT, to, 0, (topic, arguments))

    async def question(self, worker: int, topic: str, *arguments: object, limit_s: float = ANSWER_S) -> Any:
        """Return the answer of one worker. Raises `WorkerUnreachable`."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = worker, answer
        try:
            if not self._send(FrameKind.QUESTION, worker, number, (topic, arguments)):
                raise WorkerUnreachable("the parent has ended")
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            raise WorkerUnreachable(f"worker {worker} had no answer within {limit_s:g} s") from None
        finally:
            del self._open[number]

    async def question_all(
        self, topic: str, *arguments: object, limit_s: float = ANSWER_S, workers: Iterable[int] | None = None
    ) -> Mapping[int, Any]:
        """Return the answers of `workers`, by default of all that serve; without those that do not answer in time."""
        answers: dict[int, Any] = {}

        async def one(worker: int) -> None:
            with suppress(WorkerUnreachable):
                answers[worker] = await self.question(worker, topic, *arguments, limit_s=limit_s)

        await asyncio.gather(*(one(worker) for worker in (self.serving if workers is None else workers)))
        return dict(sorted(answers.items()))

    async def end_lead(self) -> None:
        """Let another worker lead that does not end, and wait for what the others have sent to this one.

        Where all of them end, the one that leads waits for the rest: their last lines are written here.
        """
        led = self.leads
        self._decided.clear()
        if not self._send(FrameKind.LEAVE, PARENT, 0, None):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await first_of(self._decided, self.ended)
                if led and not self.leads:
                    await self.question_all("reached", limit_s=LEAVE_S)
                while self.leads and not self.ended.is_set() and any(map(self._is_left, self.rows)):
                    self._changed.clear()
                    await first_of(self._changed, self.ended)

    def _is_left(self, worker: WorkerRow) -> bool:
        return worker.number != self.number and worker.state not in ("ended", "waiting")

    # -- in

    def on_event(self, topic: str, apply: Callable[..., None]) -> None:
        """Apply the events of a topic by `apply`."""
        self._events[topic] = apply

    def on_question(self, topic: str, handler: Handler) -> None:
        """Answer the questions of a topic by `handler`; those that have come before too."""
        self._handlers[topic] = handler
        self._registered.set()
        self._registered = asyncio.Event()

    def connect(self, channel: Channel) -> None:
        self._channel = channel

    def when_ended(self, stop: Callable[[], None]) -> None:
        """Call `stop` at the end of the parent."""
        self._on_parent_end = stop
        if self.ended.is_set():
            stop()

    def close(self) -> None:
        """Close the connection. Answers that are waited for do not come."""
        self._on_parent_end = None
        self.ended.set()
        for task in self._tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()

    def on_frame(self, frame: Frame) -> None:
        """Take a frame."""
        match frame.kind:
            case FrameKind.EVENT:
                topic, arguments = unpacked(frame.content)
                apply = self._events.get(topic)
                if apply is not None:
                    self._guarded(topic, apply, arguments)
            case FrameKind.QUESTION:
                task = asyncio.get_running_loop().create_task(self._answer(frame))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case FrameKind.ANSWER:
                worker, answer = self._open.get(frame.number, (None, None))
                if answer is not None and worker == frame.sender and not answer.done():
                    well, content = unpacked(frame.content)
                    if well:
                        answer.set_result(content)
                    else:
                        answer.set_exception(WorkerUnreachable(content))
            case FrameKind.LEADER:
                self._set_leader(unpacked(frame.content))
            case FrameKind.ENDED:
                self._forget(unpacked(frame.content))
            case FrameKind.TABLE:
                self.rows = unpacked(frame.content)
                self._changed.set()
            case FrameKind.RETIRE:
                self.retiring.set()
            case FrameKind.PAUSE:
                self.paused = unpacked(frame.content)
            case _:
                pass

    def on_parent_ended(self) -> None:
        """Stop: without a parent nothing restarts a worker, and nothing passes on what it says."""
        if not self.ended.is_set():
            log("worker_parent_ended", level=logging.WARNING, worker=self.number)
        self.ended.set()
        if self._on_parent_end is not None:
            self._on_parent_end()
        for worker, answer in self._open.values():
            if not answer.done():
                answer.set_exception(WorkerUnreachable(f"worker {worker} cannot be reached: the parent has ended"))

    def _set_leader(self, leader: int) -> None:
        self.leader = leader
        self._decided.set()
        if self.leads and not self.leads_now.is_set():
            log("worker_leads", worker=self.number)
            self.leads_now.set()

    def _forget(self, ended: int) -> None:
        for worker, answer in self._open.values():
            if worker == ended and not answer.done():
                answer.set_exception(WorkerUnreachable(f"worker {worker} has ended"))
        self.joined.discard(ended)
        for each in self.on_ended:
            each(ended)

    def _guarded(self, topic: str, apply: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            apply(*arguments)
        except Exception as failure:  # noqa: BLE001 - a fault in one event must not end the connection
            log_failure("worker_event_failed", failure, topic=topic)

    async def _answer(self, frame: Frame) -> None:
        topic, arguments = unpacked(frame.content)
        while topic not in self._handlers:  # a worker that starts answers when it can
            await self._registered.wait()
        well = True
        try:
            content = await self._handlers[topic](*arguments)
        except Exception as failure:  # noqa: BLE001 - the question is another worker's
            log_failure("worker_event_failed", failure, topic=topic)
            well, content = False, f"worker {self.number}: {type(failure).__name__}"
        self._send(FrameKind.ANSWER, frame.sender, frame.number, (well, content))

    def _send(self, kind: FrameKind, receiver: int, number: int, content: object) -> bool:
        channel = self._channel
        return channel is not None and channel.write_frame(Frame(kind, self.number, receiver, number, packed(content)))


def read_start(descriptor: int) -> tuple[WorkerStart, socket.socket]:
    """Return what the parent gives to a worker that starts, and the connection. Blocks; raises `EOFError`."""
    connection = socket.socket(fileno=descriptor)
    head = _read(connection, HEAD_BYTES)
    size, kind, *_ = read_head(head)
    assert kind is FrameKind.START, "the first frame of a parent"
    return unpacked(_read(connection, size)), connection


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError("the parent has ended")
        data += part
    return bytes(data)


async def connect(start: WorkerStart, connection: socket.socket) -> WorkerLink:
    """Return the link of a worker over its connection."""
    counts = SharedCounts(start.counts, start.processes, own=start.number)
    counts.reset(start.number)
    link = WorkerLink(start, counts, start.leader)
    if link.leads:
        link.leads_now.set()
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    _, channel = await loop.create_unix_connection(
        lambda: Channel(link.on_frame, link.on_parent_ended), sock=connection
    )
    link.connect(channel)
    link.on_question("reached", _reached)
    return link


async def join(link: WorkerLink) -> tuple[bytes, bytes] | None:
    """Return the configuration and the state in force at the leader; `None` if this worker leads, or none does."""
    while not (link.leads or link.ended.is_set()):
        leader = link.leader
        try:
            joined: tuple[bytes, bytes] = await link.question(leader, "join", link.number, limit_s=JOIN_S)
        except WorkerUnreachable as failure:
            log("worker_waits", level=logging.WARNING, worker=link.number, leader=leader, reason=str(failure))
        else:
            return joined
    return None


async def _reached() -> bool:
    return True
