"""Sockets of ZeroMQ with their bounds, and the reading of their messages in turns of the event loop.

Owns the sockets of one proxy (`KvSockets`), the share of the event loop that they may use (`Turn`, `Arrivals`), and the
messages of one socket (`Receiver`). Leaves the meaning of a message to `subscription`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from types import ModuleType
from typing import Any, Protocol

from gorgo.engines.kv_events import MAX_MESSAGE_BYTES
from gorgo.engines.kv_sources import KvEventSource
from gorgo.errors import MissingExtra
from gorgo.live.extras import EVENTS

# When subscriptions have the event loop: in turns without other work, and for a bounded part of each.
#
# Messages of many engines come one by one, and a wake of an idle process costs half as much as the events of one. So
# the loop watches sockets that are quiet, up to a rate of wakes. It does not watch those in use: all of them are
# looked at together after an interval.


#: Time after which the next step waits for another turn of the event loop; most steps take as much, so that a turn has
#: one. A request takes several turns, so more time in each of them delays its first byte by as much.
TURN_S = 0.00005
#: A turn of the event loop that took longer had other work: requests go first.
OTHER_WORK_S = 0.00005
#: Longest wait for a turn without other work. A loop that is busy all the time has a tenth for events.
MAX_WAIT_S = 0.001
#: Between two looks at the sockets in use: about a step of an engine, and more of many engines, whose looks cost more
#: than the time is worth.
MIN_GATHER_S, GATHER_S_PER_SOCKET, MAX_GATHER_S = 0.02, 0.006, 0.05
#: Wakes of the loop a second, by all sockets that it watches, and at once. Between two engines of vLLM events are few,
#: and each request asks for what the one before it evicted.
WAKES_PER_S, MAX_WAKES = 100.0, 20.0


class Turn:
    """The share of the event loop that all subscriptions may use together."""

    def __init__(self) -> None:
        #: Steps in order; one of a coroutine is a future.
        self._waiting: deque[Callable[[], bool] | asyncio.Future[None]] = deque()
        self._is_due = False
        #: End of the last step or look at the loop, and since when a step waits.
        self._left_s = self._since_s = 0.0

    def add(self, step: Callable[[], bool]) -> None:
        """Call `step` in turns of the loop, until it returns false."""
        self._waiting.append(step)
        self._run_soon()

    async def pause(self) -> None:
        """Wait for a turn in which a step may begin; call it before each step."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._run_soon()
        await waiter

    def _run_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._left_s = self._since_s = perf_counter()
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        """Run steps, unless there was other work since the last call."""
        now = perf_counter()
        if now - self._left_s <= OTHER_WORK_S or now - self._since_s >= MAX_WAIT_S:
            self._run_steps(now + TURN_S)
            self._since_s = now = perf_counter()
        self._left_s = now
        self._is_due = bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._run)

    def _run_steps(self, end_s: float) -> None:
        while self._waiting:
            step = self._waiting.popleft()
            if isinstance(step, asyncio.Future):
                if not step.done():
                    step.set_result(None)
                    return  # its step is behind this one
            elif step():
                self._waiting.append(step)
            if perf_counter() >= end_s:
                return


class Arrivals:
    """Looks at the sockets in use, all together; bounds the wakes by all others."""

    def __init__(self) -> None:
        self._polls: list[Callable[[], bool]] = []
        self._is_due = False
        self._wakes, self._counted_s = MAX_WAKES, perf_counter()

    def may_wake(self) -> bool:
        """Count a wake of the loop; return whether the rate allows it, and nothing else is looked at anyway."""
        if self._polls:
            return False
        now = perf_counter()
        self._wakes = min(self._wakes + (now - self._counted_s) * WAKES_PER_S, MAX_WAKES)
        self._counted_s = now
        if self._wakes < 1.0:
            return False
        self._wakes -= 1.0
        return True

    def add(self, poll: Callable[[], bool]) -> None:
        """Call `poll` at an interval, until it returns false."""
        self._polls.append(poll)
        if not self._is_due:
            self._is_due = True
            self._poll_later(asyncio.get_running_loop())

    def _poll_later(self, loop: asyncio.AbstractEventLoop) -> None:
        gather_s = min(max(MIN_GATHER_S, GATHER_S_PER_SOCKET * len(self._polls)), MAX_GATHER_S)
        loop.call_later(gather_s, self._poll_all, loop)

    def _poll_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._polls = [poll for poll in self._polls if poll()]
        self._is_due = bool(self._polls)
        if self._is_due:
            self._poll_later(loop)


# The messages of one socket of ZeroMQ, for half the processor time of the package's own futures.


#: Frames of one message: a topic, a number and a payload, behind an empty frame in a replay.
MAX_FRAMES = 4


class MessageRefusedError(Exception):
    """A message or a backlog that no engine sends; the socket has to be closed, which drops it."""


def with_rest(first: bytes, socket: Any, flags: int, more: int) -> list[bytes]:
    """Return the frames of a message whose first was received, and all of which have come.

    Raises `MessageRefusedError` for too many: a list of millions takes seconds.
    """
    frames = [first]
    while socket.getsockopt(more):
        if len(frames) == MAX_FRAMES:
            raise MessageRefusedError(f"a message of more than {MAX_FRAMES} frames")
        frames.append(socket.recv(flags))
    return frames


#: Looks at a socket without a message until the loop watches it again.
IDLE_POLLS = 5


class MessageTaker(Protocol):
    """Handles short messages at once, each in two steps of the event loop."""

    def take_message(self, frames: list[bytes]) -> bool:
        """Begin to handle a message; return false, without a change, for one that is not taken."""

    def finish_message(self) -> bool:
        """Handle the rest of the last message that was taken; return whether there was any."""


class Receiver:
    """The messages of one socket, read in turns of the event loop.

    A socket that is quiet is watched by the loop; while many messages come, `Arrivals` looks at it instead.

    Parameters
    ----------
    zmq:
        The package.
    socket:
        Stays with the caller, who receives nothing from it.
    arrivals:
        Looks at all sockets in use.
    turn:
        In its steps messages are read.
    taker:
        Handles the messages that it takes; `next_message` returns the others.
    delivered:
        Called with each message.
    """

    def __init__(
        self,
        zmq: ModuleType,
        socket: Any,
        arrivals: Arrivals,
        turn: Turn,
        *,
        taker: MessageTaker,
        delivered: Callable[[list[bytes]], None] = lambda _: None,
    ) -> None:
        self._delivered = delivered
        self._socket = zmq.Socket.shadow(socket.underlying)
        self._events, self._readable, self._more = zmq.EVENTS, zmq.POLLIN, zmq.RCVMORE
        self._nowait, self._none_yet, self._error = zmq.NOBLOCK, zmq.Again, zmq.ZMQError
        self._descriptor: int = self._socket.FD
        self._arrivals = arrivals
        self._turn = turn
        self._taker = taker
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[list[bytes]] | None = None
        self._is_watched = self._is_polled = self._is_queued = self._is_closed = False
        self._idle_polls = 0

    async def next_message(self) -> list[bytes]:
        """Return the frames of the next message that was not taken. Raises `zmq.ZMQError` and `MessageRefusedError`."""
        self._waiter = self._loop.create_future()
        self._read_soon()
        return await self._waiter

    def close(self) -> None:
        """Stop watching the socket."""
        self._is_closed = True
        self._unwatch()

    def _read_soon(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._turn.add(self._read)

    def _read(self) -> bool:
        """Read a message, or handle the rest of the last one; return whether there may be another one."""
        self._is_queued = False
        if self._is_closed or self._waiter is None or self._waiter.done():
            return False
        try:
            if self._taker.finish_message():
                self._is_queued = True
                return True
            frames = with_rest(self._socket.recv(self._nowait), self._socket, self._nowait, self._more)
        except self._none_yet:
            if not self._is_polled:
                self._watch()
            return False
        except (self._error, MessageRefusedError) as error:
            self._waiter.set_exception(error)
            return False
        except Exception as error:  # noqa: BLE001 - the taker's
            self._waiter.set_exception(error)
            return False
        self._delivered(frames)
        try:
            self._is_queued = self._taker.take_message(frames)
        except Exception as error:  # noqa: BLE001 - likewise
            self._waiter.set_exception(error)
            return False
        if not self._is_queued:
            self._waiter.set_result(frames)
        return self._is_queued

    def _watch(self) -> None:
        """Watch the descriptor. It reports the next change after an answer that there is no message."""
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._descriptor, self._on_change)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)

    def _on_change(self) -> None:
        # The question alone ends that the descriptor is readable, which would occupy the loop.
        if not self._has_message():
            return
        if self._arrivals.may_wake():
            self._read_soon()
            return
        self._unwatch()
        self._is_polled, self._idle_polls = True, 0
        self._arrivals.add(self._poll)

    def _poll(self) -> bool:
        """Read what has come; return whether to look again."""
        if self._is_closed:
            return False
        if self._is_queued or self._waiter is None or self._waiter.done():
            return True  # the last message is being handled
        if self._has_message():
            self._idle_polls = 0
            self._read_soon()
            return True
        self._idle_polls += 1
        if self._idle_polls < IDLE_POLLS:
            return True
        self._is_polled = False
        self._read_soon()  # which watches it
        return False

    def _has_message(self) -> bool:
        return bool(self._socket.getsockopt(self._events) & self._readable)


# Bytes that ZeroMQ has received and not delivered: frames of a message that does not end, and messages that wait.
#
# libzmq bounds frames and counts messages; a message of endless frames, or a thousand long ones, is gigabytes. The
# kernel counts what a connection has received, so what is left to deliver is known. Other systems than Linux, and
# connections that are not TCP, are not counted.


#: Of one subscription: the longest message, and some short ones. Of one replay: the thousand messages of its queue.
#: Of all together; beyond it the one with most is refused.
MAX_LIVE_BYTES, MAX_REPLAY_BYTES, MAX_ALL_BYTES = 20 * 1024 * 1024, 64 * 1024 * 1024, 128 * 1024 * 1024
#: Memory by which the process may grow while bytes wait, beside twice these: ZeroMQ takes 64 bytes for a frame of one
#: byte, which is two on the network.
MAX_GROWTH_BYTES = 64 * 1024 * 1024
#: Bytes that wait in all subscriptions below which memory is none of theirs.
FEW_BYTES = 256 * 1024
#: Between two looks, s: a fast network brings some dozens of megabytes.
BACKLOG_S = 0.05
#: Allowed for heartbeats, per s: an engine sends a few bytes of them.
HEARTBEAT_BYTES_PER_S = 64.0
#: Place of the received bytes in what Linux says of a TCP connection, and the size up to their end.
_RECEIVED_AT, _TCP_INFO_BYTES = 128, 136
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Backlogs(set["Backlog"]):
    """What waits in all sockets of a process.

    Parameters
    ----------
    resident:
        Returns the memory of the process in bytes, 0 where the system does not say.
    """

    def __init__(self, resident: Callable[[], int] = lambda: _resident_bytes()) -> None:
        super().__init__()
        self._resident = resident
        self._before: int | None = None

    def growth_bytes(self, waiting: int) -> int:
        """Return by how much the process has grown since `FEW_BYTES` wait; `waiting` do now."""
        if waiting < FEW_BYTES:
            self._before = None
            return 0
        now = self._resident()
        self._before = now if self._before is None else self._before
        return now - self._before


class Backlog:
    """What waits in one socket of ZeroMQ; `others` has that of all.

    Parameters
    ----------
    most_bytes:
        That may wait.
    """

    def __init__(self, most_bytes: int, others: Backlogs) -> None:
        self._most_bytes = most_bytes
        self._others = others
        self._connections: dict[int, socket.socket] = {}
        #: Received and not delivered, of the connections that are open, as of the last look.
        self.bytes = 0
        #: Bytes of the frames that were delivered, framing included, and allowed ones.
        self._delivered = 0.0
        others.add(self)

    def connection_opened(self, descriptor: int) -> None:
        """Count a connection. Its socket is shared with ZeroMQ, which may close its own number at any time."""
        self.connection_closed(descriptor)
        with suppress(OSError):  # it has ended already
            self._connections[descriptor] = socket.socket(fileno=os.dup(descriptor))

    def connection_closed(self, descriptor: int) -> None:
        """Drop a connection: ZeroMQ drops what it has of it."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            connection.close()
            self._delivered = float(self._received())

    def count_delivered(self, frames: Iterable[bytes]) -> None:
        """Count the frames of a message that has been taken out."""
        for frame in frames:
            self._delivered += len(frame) + (2 if len(frame) < 256 else 9)

    def check(self) -> None:
        """Look at it again. Raises `MessageRefusedError` if too much waits."""
        self._delivered = min(self._delivered + BACKLOG_S * HEARTBEAT_BYTES_PER_S, float(received := self._received()))
        self.bytes = received - int(self._delivered)
        every = sum(other.bytes for other in self._others)
        if self.bytes > self._most_bytes:
            raise MessageRefusedError(f"{self.bytes} bytes wait or have no end; expected at most {self._most_bytes}")
        has_most = self.bytes == max(other.bytes for other in self._others)
        if every > MAX_ALL_BYTES and has_most:
            raise MessageRefusedError(f"{every} bytes wait in all subscriptions; expected at most {MAX_ALL_BYTES}")
        growth, most = self._others.growth_bytes(every), MAX_GROWTH_BYTES + 2 * every
        if growth > most and has_most:
            raise MessageRefusedError(f"{every} bytes that wait or have no end took {growth}; expected at most {most}")

    async def watch(self) -> None:
        """Look at an interval until too much waits. Raises `MessageRefusedError`."""
        while True:
            await asyncio.sleep(BACKLOG_S)
            self.check()

    def close(self) -> None:
        for descriptor in tuple(self._connections):
            self.connection_closed(descriptor)
        self._others.discard(self)

    def _received(self) -> int:
        return sum(map(_received_bytes, self._connections.values()))


def _resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _received_bytes(connection: socket.socket) -> int:
    """Return what a connection has received; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    try:
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(tcp_info[_RECEIVED_AT:], sys.byteorder) if len(tcp_info) == _TCP_INFO_BYTES else 0


#: Pause before a broken connection is tried again; it doubles up to the second one.
RETRY_S = 1.0
MAX_RETRY_S = 5.0
#: A peer that is silent for so long is not there: a firewall may drop a connection without an end.
HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 10.0
#: Messages that wait in a socket; the publisher drops further ones, which a replay repairs. Each has a few kilobytes.
RECEIVE_QUEUE = 1000


async def next_change(zmq: ModuleType, monitor: Any, backlog: Backlog) -> int:
    """Return the next event of a connection, of which `backlog` hears too."""
    event = await zmq.utils.monitor.recv_monitor_message(monitor)
    kind: int = event["event"]
    if kind in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
        backlog.connection_opened(event["value"])
    elif kind in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
        backlog.connection_closed(event["value"])
    return kind


def import_zmq() -> ModuleType:
    """Return the package with its asyncio part. Raises `MissingExtra`."""
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError as error:
        raise MissingExtra(EVENTS.missing) from error
    module: ModuleType = zmq
    return module


class KvSockets:
    """The sockets of one proxy, made when the first one is needed.

    Parameters
    ----------
    zmq:
        The package.
    turn:
        As in `Receiver`.
    """

    def __init__(self, zmq: ModuleType, turn: Turn) -> None:
        self.zmq = zmq
        self._turn = turn
        self._context: Any = zmq.asyncio.Context()
        self._arrivals = Arrivals()
        self.backlogs = Backlogs()

    @contextmanager
    def subscribed(self, source: KvEventSource, *, taker: MessageTaker) -> Iterator[tuple[Receiver, Any, Backlog]]:
        """Return a receiver of the events of `source`, a socket that reports its connections, and what waits in it.

        Raises `zmq.ZMQError`.
        """
        zmq = self.zmq
        subscriber = self._socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        # Before the connection, which would else not be reported.
        monitor = self._monitor(subscriber)
        backlog = Backlog(MAX_LIVE_BYTES, self.backlogs)
        receiver = Receiver(zmq, subscriber, self._arrivals, self._turn, taker=taker, delivered=backlog.count_delivered)
        try:
            (subscriber.bind if source.mode == "bind" else subscriber.connect)(source.endpoint)
            yield receiver, monitor, backlog
        finally:
            receiver.close()
            backlog.close()
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    @contextmanager
    def requesting(self, endpoint: str) -> Iterator[tuple[Any, Any, Backlog]]:
        """Return a socket for the request of one replay, and the others as `subscribed`. Raises `zmq.ZMQError`."""
        requester = self._socket(self.zmq.DEALER)
        monitor = self._monitor(requester)
        backlog = Backlog(MAX_REPLAY_BYTES, self.backlogs)
        try:
            requester.connect(endpoint)
            yield requester, monitor, backlog
        finally:
            backlog.close()
            requester.disable_monitor()
            monitor.close(linger=0)
            requester.close(linger=0)

    def _monitor(self, monitored: Any) -> Any:
        zmq = self.zmq
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        return monitored.get_monitor_socket(ends | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Any:
        zmq = self.zmq
        created = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.RCVHWM: RECEIVE_QUEUE,
            zmq.RECONNECT_IVL: int(RETRY_S * 1e3),
            zmq.RECONNECT_IVL_MAX: int(MAX_RETRY_S * 1e3),
            zmq.HEARTBEAT_IVL: int(HEARTBEAT_S * 1e3),
            zmq.HEARTBEAT_TIMEOUT: int(HEARTBEAT_TIMEOUT_S * 1e3),
        }
        for option, value in options.items():
            created.setsockopt(option, value)
        return created
