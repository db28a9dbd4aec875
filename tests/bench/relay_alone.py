"""A request through `gorgo-ms` without sockets: what the relay's own code costs, repeatable to a few percent.

Clients and replicas are transports in memory, so there is no system call, no other process and no wait: of a request
under load (`relay_overhead`) it is two thirds. Routing, client keys, request log and metrics are on. The last row is
what a task with the coroutines of a request costs by itself: all that a request without a task could save.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TextIO, cast

import uvloop
from hypercorn.config import Config as ServerConfig

from gorgo.cli.launch import freeze_startup_objects
from gorgo.config.load import parse_config
from gorgo.live.build import build_live
from gorgo.live.event_loop import writes_of
from gorgo.live.listener.connection.client_connection import ClientConnection, ServerSettings
from gorgo.live.listener.heads import HeadLimits, PartialHeads
from gorgo.live.logs import LOGGER, set_up_logs
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.process import open_request_log
from gorgo.live.state import LiveState
from gorgo.live.upstream.connection import ReplicaConnection
from gorgo.policies.registry import make_policy
from gorgo.proxy.server import data_app
from tests.bench.relay import engine
from tests.bench.relay.scenarios import LARGE, SMALL
from tests.bench.relay.wire import KEY, MODEL, NUMBER_BYTES, request

_REPLICAS, _CLIENTS, _VARIANTS = 3, 16, 16
_BLOCK, _BLOCKS, _EVENTS = 200, 20, 2000
_ENDLESS_S = 1e6
#: `tcp_info` of 32 kB segments, 200 us, a window of ten of them and 2 GB/s (see `live.upstream.connection_state`).
_INFO = struct.pack("=16xI48xI8xI20xQ44xI68xI", 32_741, 200, 10, 2_000_000_000, 1000, 65_536)
#: Of a request whose answer comes whole: coroutines that wait inside one another, and those that end at once.
_NESTED, _BESIDE = 15, 16


class _Transport(asyncio.Transport):
    """One end of a connection; what is written to it goes to `on_write`."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_write = on_write

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._on_write(cast(bytes, data))

    def close(self) -> None:
        pass

    abort = close


class Replica:
    """A connection to a replica, which answers in the loop's next turn, or begins a stream."""

    def __init__(self, connection: ReplicaConnection, cache: engine.PrefixCache) -> None:
        self.connection = connection
        self.streams = False
        self._cache = cache
        connection.connection_made(_Transport(self._on_request))

    def _on_request(self, data: bytes) -> None:
        body = data.partition(b"\r\n\r\n")[2]
        self.streams = b'"stream":true' in body
        answer = engine.STREAM_HEAD + engine.ROLE + engine.TOKEN
        if not self.streams:
            answer = engine.answer(*self._cache.tokens(body))
        self.connection.loop.call_soon(self.connection.data_received, answer)


class _BbrSocket:
    """The kernel's answers about a connection whose sender paces, as on the machine of the benchmark."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        return b"bbr\0" if option == socket.TCP_CONGESTION else _INFO


class Clients:
    """Connections of clients; each sends its next request when it has its answer."""

    def __init__(self, app: object, connections: int = _CLIENTS) -> None:
        self._loop = asyncio.get_running_loop()
        config = ServerConfig()
        config.include_server_header = config.include_date_header = False
        config.keep_alive_max_requests = sys.maxsize
        settings = ServerSettings(app, config, PartialHeads())
        self.writes = writes_of(self._loop)
        self._connections = [self._connect(settings) for _ in range(connections)]
        self._numbers = count()
        self._requests: list[tuple[bytes, bytes]] = []
        self._left = 0
        self._done: asyncio.Future[None] = self._loop.create_future()
        self.written = 0

    def use(self, size: int, *, stream: bool) -> None:
        """Send requests of `size` from now on."""
        made = (request(size, variant=each, tokens=128, gap_ms=0, stream=stream) for each in range(_VARIANTS))
        self._requests = list(made)

    async def send(self, number: int) -> None:
        """Send so many requests, and wait for their answers."""
        self._left, self._done = number, self._loop.create_future()
        for connection in self._connections:
            self._send(connection)
        await self._done
        await asyncio.sleep(0)

    def begin_streams(self) -> None:
        self._left = sys.maxsize
        for connection in self._connections:
            self._send(connection)

    def _connect(self, settings: ServerSettings) -> ClientConnection:
        limits = HeadLimits(64 * 1024, _ENDLESS_S)
        connection = ClientConnection(settings, limits, on_idle=lambda *_: None, on_end=lambda _: None)
        connection.connection_made(_Transport(lambda data: self._on_answer(connection, data)))
        return connection

    def _send(self, connection: ClientConnection) -> None:
        number = next(self._numbers)
        head, tail = self._requests[number % _VARIANTS]
        connection.data_received(b"%s%0*d%s" % (head, NUMBER_BYTES, number, tail))

    def _on_answer(self, connection: ClientConnection, data: bytes) -> None:
        self.written += 1
        if self._left == sys.maxsize:
            return
        assert data.startswith(b"HTTP/1.1 200 "), data[:200]
        self._left -= 1
        if self._left >= len(self._connections):
            self._loop.call_soon(self._send, connection)
        elif not self._left:
            self._done.set_result(None)


def run() -> None:
    """Print the CPU per request and per event, least and median of blocks, us."""
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(_measure(Path(folder)))


async def _measure(folder: Path) -> None:
    state = make_proxy(folder)
    replicas = list(connect_replicas(state))
    clients = Clients(data_app(state))
    set_up_logs()
    with (folder / "log").open("w") as log:
        cast("logging.StreamHandler[TextIO]", LOGGER.handlers[0]).setStream(log)
        assert state.telemetry.request_log is not None, "it is on"
        writing = asyncio.create_task(state.telemetry.request_log.run())
        freeze_startup_objects()
        for name, size in (("request, 500 B", SMALL), ("request, 90 kB", LARGE)):
            clients.use(size, stream=False)
            await clients.send(_BLOCK)
            costs = [await _cost(clients) for _ in range(_BLOCKS)]
            _print(name, costs, f"{await _calls(clients):,.0f} calls of functions")
        clients.use(SMALL, stream=True)
        clients.begin_streams()
        await asyncio.sleep(0.5)
        _print("event", [_event_cost(clients, replicas) for _ in range(_BLOCKS)])
        _print("task and coroutines", [await _task_cost() for _ in range(_BLOCKS)])
        state.telemetry.request_log.stop()
        await writing
        await state.aclose()


def make_proxy(folder: Path, more: str = "") -> LiveState:
    """Return a proxy with its keys and its request log in `folder`; `more` is appended to its configuration."""
    keys = folder / "clients.keys"
    keys.write_text(f"bench:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    keys.chmod(0o600)
    capacity = "{kv_tokens: 100000000, max_running_requests: 4096, prefill_tokens_per_s: 100000000}"
    rows = "".join(
        f"  - {{name: replica-{number}, region: here, url: 'http://127.0.0.1:{9000 + number}', models: [{MODEL}], "
        f"engine: sglang, capacity: {capacity}}}\n"
        for number in range(_REPLICAS)
    )
    text = (
        f"proxy: {{region: here}}\nclients: {{keys_file: '{keys}'}}\nregions: [{{name: here}}]\nreplicas:\n{rows}{more}"
    )
    config = parse_config(text.encode())
    state = build_live(config, policy=make_policy("gorgo-ms"), weights=None, environ={}, key=1, seed=1)
    state.telemetry.request_log = open_request_log(folder / "requests.jsonl", state)
    for name in state.replicas.targets:
        state.routing.router.replicas.on_probe(name, 0.001, now=state.routing.clock())
    return state


def connect_replicas(state: LiveState, connections: int = _CLIENTS) -> Iterator[Replica]:
    """Put idle connections into the pools."""
    for target in state.replicas.targets.values():
        pool, cache = target.upstream._pool, engine.PrefixCache()
        pool._keep_alive_s = _ENDLESS_S
        monitor = ReplicaMonitor(state, target)
        assert monitor.target is target, "it reports the pool's connections to the Router from now on"
        for _ in range(connections):
            replica = Replica(ReplicaConnection(pool._on_idle, pool._on_lost), cache)
            pool._open.add(replica.connection)
            replica.connection.socket = _BbrSocket()
            pool.tracker.on_acquire(replica.connection, 0)
            pool._on_idle(replica.connection)
            yield replica


async def _cost(clients: Clients) -> float:
    begun_s = time.process_time()
    await clients.send(_BLOCK)
    return (time.process_time() - begun_s) / _BLOCK * 1e6


async def _calls(clients: Clients) -> float:
    """Return how many functions, in Python and in C, a request calls."""
    found: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, argument: object) -> None:
        found[event] += 1

    sys.setprofile(seen)
    try:
        await clients.send(_BLOCK)
    finally:
        sys.setprofile(None)
    return (found["call"] + found["c_call"]) / _BLOCK


def _event_cost(clients: Clients, replicas: list[Replica]) -> float:
    streams = [replica.connection for replica in replicas if replica.streams]
    assert len(streams) == _CLIENTS, "all streams have begun"
    before, begun_s = clients.written, time.process_time()
    for _ in range(_EVENTS):
        for connection in streams:
            connection.data_received(engine.TOKEN)
        clients.writes.flush()  # as the loop does in its next turn
    assert clients.written - before == _EVENTS * _CLIENTS, "each event was written"
    return (time.process_time() - begun_s) / (_EVENTS * _CLIENTS) * 1e6


async def _task_cost() -> float:
    loop = asyncio.get_running_loop()

    async def beside() -> None:
        pass

    async def nested(depth: int, waiter: asyncio.Future[None]) -> None:
        await (nested(depth - 1, waiter) if depth > 1 else waiter)

    async def whole(waiter: asyncio.Future[None]) -> None:
        for _ in range(_BESIDE):
            await beside()
        await nested(_NESTED, waiter)

    begun_s = time.process_time()
    for _ in range(_BLOCK):
        waiters = [loop.create_future() for _ in range(_CLIENTS)]
        tasks = [loop.create_task(whole(waiter)) for waiter in waiters]
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.set_result(None)
        await tasks[-1]
    return (time.process_time() - begun_s) / (_BLOCK * _CLIENTS) * 1e6


def _print(name: str, costs: list[float], more: str = "") -> None:
    ordered = sorted(costs)
    print(f"{name:<22} least {ordered[0]:8.2f}   median {ordered[len(ordered) // 2]:8.2f} us   {more}".rstrip())
