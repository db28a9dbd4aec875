"""Streams that stay open: their events counted and the gaps between them measured, with sockets and epoll alone.

Owns the jobs of the kind `hold`. An event loop would cost more per event than the relays under test: 120,000 events a
second have to fit beside the engine on one core. Reads of one poll share an instant, and one poll has 64 at most.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from tests.bench.relay.measure import process_tree, relay_times, resident_bytes
from tests.bench.relay.scenarios import Figures, Job
from tests.bench.relay.wire import TOKEN_MARK

_SETTLE_S = 0.3
_CONNECT_S_MAX = 5.0
#: Streams that start together, and the pause until the next: a relay meets a brisk ramp, not a storm of connects.
_RAMP, _RAMP_S = 25, 0.01
_POLL_EVENTS = 64
_RECEIVED_MAX = 1 << 18
_MARK_TAIL = len(TOKEN_MARK) - 1


def hold(job: Job, numbered: Callable[[], bytes], context: ssl.SSLContext | None) -> Figures:
    """Open the streams, count for `seconds` when all run, close them. Raises `OSError` if they do not all start."""
    held = _Held(job, numbered, context)
    # The engine, on the same core, ends its step before the load reads: fewer switches, and polls with many events.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        return held.run()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        held.close()


class _Stream:
    """A connection with a response that does not end, and the tokens of it."""

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self.connection = connection
        self.tokens = 0
        self.last_s = 0.0
        self._tail = b""
        self._answered = False
        connection.sendall(request)
        connection.setblocking(False)

    def read(self) -> int:
        """Return the tokens of what has come. Raises `OSError` at the end of the connection or for another status."""
        try:
            data = self.connection.recv(_RECEIVED_MAX)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not data:
            raise ConnectionResetError("the connection closed in the middle of a response")
        if isinstance(self.connection, ssl.SSLSocket):  # a record that was read ahead makes no event
            while pending := self.connection.pending():
                data += self.connection.recv(pending)
        if not self._answered:
            if not data.startswith(b"HTTP/1.1 200"):
                raise ConnectionResetError(f"no stream: {data[:60]!r}")
            self._answered = True
        data = self._tail + data
        tokens = data.count(TOKEN_MARK)
        # Less than a mark, so that none is counted twice; nearly every read ends with a line.
        self._tail = b"" if data.endswith(b"\n") else data[-_MARK_TAIL:]
        self.tokens += tokens
        return tokens


class _Held:
    def __init__(self, job: Job, numbered: Callable[[], bytes], context: ssl.SSLContext | None) -> None:
        self._job, self._numbered, self._context = job, numbered, context
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._waiting = 0
        self._figures = Figures()
        self._processes: Sequence[int] = [] if job.process is None else process_tree(job.process)

    def run(self) -> Figures:
        figures = self._figures
        figures.resident_before = resident_bytes(self._processes)
        until_s = time.perf_counter() + self._job.open_s
        for begun in range(0, self._job.connections, _RAMP):
            for _ in range(min(_RAMP, self._job.connections - begun)):
                self._open()
            if time.perf_counter() > until_s:
                raise TimeoutError(f"{len(self._streams)} streams were opened in {self._job.open_s:g} s")
            self._poll(time.perf_counter() + _RAMP_S)
            if self._job.most_waiting is not None:
                self._await_tokens(self._job.most_waiting, until_s)
        self._await_tokens(0, until_s)
        self._poll(time.perf_counter() + _SETTLE_S)
        for stream in self._streams.values():
            stream.last_s = 0.0
        before, started_s, times = self._tokens(), time.perf_counter(), relay_times(self._processes)
        gaps = self._poll(started_s + self._job.seconds)
        figures.tokens = self._tokens() - before
        figures.wall_s = time.perf_counter() - started_s
        figures.cpu_s, figures.first_cpu_s, figures.waited_s = (
            now - then for now, then in zip(relay_times(self._processes), times, strict=True)
        )
        figures.requests = len(self._streams)
        figures.resident_after = resident_bytes(self._processes)
        if gaps:
            figures.gap_s = [float(at) for at in np.quantile(np.frombuffer(gaps), (0.5, 0.99, 1.0))]
        return figures

    def _await_tokens(self, most_waiting: int, until_s: float) -> None:
        """Read until no more than so many streams wait for their first token."""
        while self._waiting > most_waiting:
            if time.perf_counter() > until_s:
                raise TimeoutError(f"{self._waiting} streams without a token")
            self._poll(time.perf_counter() + 0.01)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.connection.close()
        self._epoll.close()

    def _open(self) -> None:
        connection = socket.create_connection(("127.0.0.1", self._job.port), timeout=_CONNECT_S_MAX)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            connection = self._context.wrap_socket(connection)
        stream = _Stream(connection, self._numbered())
        self._streams[connection.fileno()] = stream
        self._waiting += 1
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _poll(self, until_s: float) -> array[float]:
        """Read until then, and return the gaps between two reads of a stream."""
        gaps, poll, streams = array("d"), self._epoll.poll, self._streams
        while (now_s := time.perf_counter()) < until_s:
            events = poll(until_s - now_s, _POLL_EVENTS)
            now_s = time.perf_counter()
            for fd, _ in events:
                stream = streams[fd]
                known = stream.tokens
                if not stream.read():
                    continue
                if not known:
                    self._waiting -= 1
                elif stream.last_s:
                    gaps.append(now_s - stream.last_s)
                stream.last_s = now_s
        return gaps

    def _tokens(self) -> int:
        return sum(stream.tokens for stream in self._streams.values())
