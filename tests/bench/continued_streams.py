"""What it costs that answers could go on elsewhere: CPU per event and memory per open stream, with and without.

Streams through `gorgo-ms` without sockets, as in `relay_alone`: so many of 2,000 events, none of which ends, before a
proxy that retains their answers and one that does not. Each round is a process of its own, in which both get their
events in turns of 20, in the order ABBA: a busy machine costs both alike. The memory is that of a process with one of
the two, read before its streams begin and behind their last event. `ROUNDS=20` is another number of rounds than 8.

Last comes the CPU per event of both as processes, over sockets; and of the one that retains answers to a version from
before it, if `BEFORE=COMMIT` names one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import TypeVar

import uvloop

from gorgo.cli.launch import freeze_startup_objects
from gorgo.live.state import LiveState
from gorgo.proxy.exchange.response import ClientStream
from gorgo.proxy.server import data_app
from tests.bench.relay import engine, pair, targets
from tests.bench.relay.measure import resident_bytes
from tests.bench.relay.scenarios import SMALL
from tests.bench.relay_alone import Clients, connect_replicas, make_proxy

ROUNDS, STREAMS, TOKENS, TURN = 8, 150, 2000, 20
#: Most until all streams have their first token, s.
BEGIN_S = 60.0
#: `limits.continuations`: off, and as by default.
OFF, ON = 0, 2

_Result = TypeVar("_Result")


class _Streams:
    """A proxy and its streams."""

    def __init__(self, folder: Path, continuations: int) -> None:
        folder.mkdir()
        self.state: LiveState = make_proxy(folder, f"limits: {{continuations: {continuations}}}\n")
        self._retained = STREAMS if continuations else 0
        self._replicas = list(connect_replicas(self.state, STREAMS))
        self._clients = Clients(data_app(self.state), STREAMS)
        self._clients.use(SMALL, stream=True)

    async def begin(self) -> None:
        """Return when each stream has its first token."""
        self._clients.begin_streams()
        async with asyncio.timeout(BEGIN_S):
            while self._clients.written < STREAMS:
                await asyncio.sleep(0.01)
        self._replicas = [replica for replica in self._replicas if replica.streams]
        assert len(self._replicas) == STREAMS, "all streams have begun"

    def feed(self, events: int) -> float:
        """Send each stream so many events; return the processor time, s."""
        clients, connections = self._clients, [replica.connection for replica in self._replicas]
        before, begun_s = clients.written, time.process_time()
        for _ in range(events):
            for connection in connections:
                connection.data_received(engine.TOKEN)
            clients.writes.flush()  # as the loop does in its next turn
        spent_s = time.process_time() - begun_s
        assert clients.written - before == events * STREAMS, "each event was written"
        return spent_s

    async def end(self) -> None:
        running = [stream for target in self.state.replicas.targets.values() for stream in target.streams]
        retained = sum(isinstance(stream, ClientStream) and stream.owner is not None for stream in running)
        assert retained == self._retained, "each answer could go on, or none"
        await self.state.aclose()


def run() -> None:
    """Print the CPU per event and the memory per stream of both, and their ratio and difference."""
    rounds = int(os.environ.get("ROUNDS", ROUNDS))
    found = [_in_process(_round, OFF) for _ in range(rounds)]
    memory = {continuations: _in_process(_memory, continuations) / 1024 for continuations in (OFF, ON)}
    print(f"{STREAMS} streams of {TOKENS} events of {len(engine.TOKEN)} bytes, {rounds} rounds")
    for place, continuations in enumerate((OFF, ON)):
        cpu = [each[place] for each in found]
        spent = f"CPU per event least {min(cpu):.2f}, median {median(cpu):.2f} us"
        print(f"continuations: {continuations}   {spent}   memory per stream {memory[continuations]:.0f} KiB")
    ratios = sorted(on / off for off, on in found)
    more = median(on - off for off, on in found)
    print(f"CPU: {more:.2f} us more, ratio {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    print(f"memory: {memory[ON] - memory[OFF]:.0f} KiB more per stream", flush=True)
    both = {"on": targets.gorgo_retaining(ON), "off": targets.gorgo_retaining(OFF)}
    print(f"over sockets, to continuations: 0 {pair.event_ratio(both, rounds)}", flush=True)
    if before := os.environ.get("BEFORE"):
        versions = {"now": targets.gorgo, "before": targets.other_gorgo(before)}
        print(f"over sockets, to {before} {pair.event_ratio(versions, rounds)}", flush=True)


def _in_process(call: Callable[[int], _Result], continuations: int) -> _Result:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(call, continuations).result()


def _round(_: int) -> Sequence[float]:
    """Return the CPU per event, us, without and with continuations."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_cpu(Path(folder)))


async def _cpu(folder: Path) -> Sequence[float]:
    both = [_Streams(folder / str(continuations), continuations) for continuations in (OFF, ON)]
    freeze_startup_objects()
    for streams in both:
        await streams.begin()
    spent_s = [0.0, 0.0]
    for turn in range(TOKENS // TURN):
        for place in (0, 1) if turn % 2 else (1, 0):
            spent_s[place] += both[place].feed(TURN)
    for streams in both:
        await streams.end()
    return [each / (STREAMS * TOKENS) * 1e6 for each in spent_s]


def _memory(continuations: int) -> float:
    """Return the resident bytes of a stream behind its last event."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_resident(Path(folder), continuations))


async def _resident(folder: Path, continuations: int) -> float:
    streams = _Streams(folder / "proxy", continuations)
    freeze_startup_objects()
    before = resident_bytes([os.getpid()])
    await streams.begin()
    streams.feed(TOKENS)
    used = resident_bytes([os.getpid()]) - before
    await streams.end()
    return used / STREAMS
