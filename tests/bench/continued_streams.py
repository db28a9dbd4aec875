"""What it costs that answers could go on elsewhere: CPU per event and memory per open stream, with and without.

Streams through `gorgo-ms` without sockets, as in `relay_alone`: so many of 2,000 tokens, none of which ends. Each round
is a process of its own, whose resident memory is read before the streams begin and behind their last event. Rounds are
in the order ABBA, so that a busy machine costs both alike. `ROUNDS=20` is another number of rounds than 12.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import uvloop

from gorgo.cli.launch import freeze_startup_objects
from gorgo.proxy.exchange.relay import Passage
from gorgo.proxy.server import data_app
from tests.bench.relay import engine
from tests.bench.relay.measure import resident_bytes
from tests.bench.relay.scenarios import SMALL
from tests.bench.relay_alone import Clients, Replica, connect_replicas, make_proxy

ROUNDS, STREAMS, TOKENS = 12, 250, 2000
#: Most until all streams have their first token, s.
BEGIN_S = 60.0
#: `limits.continuations`: as by default, and off.
ON, OFF = 2, 0


def run() -> None:
    """Print the CPU per event and the memory per stream of both, and the median of their ratios and differences."""
    rounds = int(os.environ.get("ROUNDS", ROUNDS))
    found: dict[int, list[tuple[float, float]]] = {ON: [], OFF: []}
    spawning = multiprocessing.get_context("spawn")
    for number in range(rounds):
        for continuations in (ON, OFF) if number % 2 else (OFF, ON):
            with ProcessPoolExecutor(1, mp_context=spawning) as fresh:
                found[continuations].append(fresh.submit(_round, continuations).result())
    print(f"{STREAMS} streams of {TOKENS} events of {len(engine.TOKEN)} bytes, {rounds} rounds each")
    for continuations, name in ((OFF, "continuations: 0"), (ON, "continuations: 2")):
        cpu, memory = zip(*found[continuations], strict=True)
        spent = f"CPU per event least {min(cpu):.2f}, median {median(cpu):.2f} us"
        print(f"{name}   {spent}   memory per stream {median(memory) / 1024:.0f} KiB")
    pairs = list(zip(found[ON], found[OFF], strict=True))
    ratios = sorted(on[0] / off[0] for on, off in pairs)
    more = median(on[1] - off[1] for on, off in pairs) / 1024
    print(f"ratio of CPU {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), {more:.0f} KiB more per stream")


def _round(continuations: int) -> tuple[float, float]:
    """Return the CPU per event, us, and the resident bytes of a stream behind its last event."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(_measure(Path(folder), continuations))


async def _measure(folder: Path, continuations: int) -> tuple[float, float]:
    state = make_proxy(folder, f"limits: {{continuations: {continuations}}}\n")
    replicas = list(connect_replicas(state, STREAMS))
    clients = Clients(data_app(state), STREAMS)
    clients.use(SMALL, stream=True)
    freeze_startup_objects()
    before = resident_bytes([os.getpid()])
    clients.begin_streams()
    async with asyncio.timeout(BEGIN_S):
        while clients.written < STREAMS:
            await asyncio.sleep(0.01)
    spent_s = _feed(clients, [replica for replica in replicas if replica.streams])
    running = [stream for target in state.replicas.targets.values() for stream in target.streams]
    retained = sum(isinstance(stream, Passage) and stream.sent_stream is not None for stream in running)
    assert retained == (STREAMS if continuations else 0), "each answer could go on, or none"
    used = resident_bytes([os.getpid()]) - before
    await state.aclose()
    return spent_s / (STREAMS * TOKENS) * 1e6, used / STREAMS


def _feed(clients: Clients, replicas: list[Replica]) -> float:
    """Send each stream its events; return the processor time, s."""
    assert len(replicas) == STREAMS, "all streams have begun"
    before, begun_s = clients.written, time.process_time()
    for _ in range(TOKENS):
        for replica in replicas:
            replica.connection.data_received(engine.TOKEN)
        clients.writes.flush()  # as the loop does in its next turn
    assert clients.written - before == TOKENS * STREAMS, "each event was written"
    return time.process_time() - begun_s
