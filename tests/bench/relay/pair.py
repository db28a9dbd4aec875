"""Two versions of gorgo, request by request: what a change costs, told more finely than rounds can.

One client with one connection to each sends a few requests to the one, then as many to the other, then the other way
round, hundreds of times. What else the machine does lasts longer than such a pair, so a pair's ratio leaves it out, and
the median over all pairs the rest. It is not the load of the other scenarios: one request at a time, caches cold from
the other version.

The seed of string hashes makes one process up to 4 % slower than another of the same code. So there are several
processes of each version, one after the other, and those of one round have the same seed.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.bench.relay import bench, measure, scenarios, targets
from tests.bench.relay.wire import NUMBER_BYTES, ResponseReader, request
from tests.bench.training_beside import median_ratio

#: In the place of another version: the HTTP of stock libraries.
PLAIN = "plain"
_BLOCK = 8
#: Processes of each version, with seeds of their own.
_PROCESSES = 4
_VARIANTS = 16
_WARM_UP = 12
_RECEIVED_MAX = 1 << 18
_ANSWER_S_MAX = 30.0
#: Of open streams: processes of each version, windows of each process, and their length, s.
_ROUNDS, _WINDOWS, _WINDOW_S = 6, 3, 2.0
_GAP_MS = 10


@dataclass(frozen=True, slots=True)
class Kind:
    """What is asked for: a body's size and how its answer comes."""

    name: str
    size: int
    tokens: int
    gap_ms: int = 0
    stream: bool = True


KINDS = (
    Kind("whole answers, 500 B", scenarios.SMALL, 128, stream=False),
    Kind("whole answers, 90 kB", scenarios.LARGE, 128, stream=False),
    Kind("first tokens, 500 B", scenarios.SMALL, 1),
    Kind("first tokens, 90 kB", scenarios.LARGE, 1),
    Kind("streams of 8, 500 B", scenarios.SMALL, 8, gap_ms=3),
)


#: Cost and time of a block in each version.
_Pair = tuple[tuple[float, float], tuple[float, float]]


class _Client:
    """One connection to one version, and what that one has cost."""

    def __init__(self, relay: bench.Relay) -> None:
        assert relay.process is not None, "it is measured"
        self._processes = measure.process_tree(relay.process)
        self._socket = socket.create_connection(("127.0.0.1", relay.port), timeout=_ANSWER_S_MAX)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = ResponseReader()

    def block(self, kind: Kind, numbers: itertools.count[int], length: int = _BLOCK) -> tuple[float, float]:
        """Microseconds of CPU per request, and the median time to the first token (or to the end), ms."""
        before_s = measure.cpu_times(self._processes)[0]
        times_s = [self._ask(kind, next(numbers) % 10**NUMBER_BYTES) for _ in range(length)]
        return (measure.cpu_times(self._processes)[0] - before_s) / length * 1e6, median(times_s) * 1e3

    def close(self) -> None:
        self._socket.close()

    def _ask(self, kind: Kind, number: int) -> float:
        head, tail = request(
            kind.size, variant=number % _VARIANTS, tokens=kind.tokens, gap_ms=kind.gap_ms, stream=kind.stream
        )
        data, first_s = b"%s%0*d%s" % (head, NUMBER_BYTES, number, tail), None
        self._reader.start()
        sent_s = time.perf_counter()
        self._socket.sendall(data)
        complete = False
        while not complete:
            complete = self._reader.feed(self._socket.recv(_RECEIVED_MAX))
            if first_s is None and (complete or self._reader.tokens):
                first_s = time.perf_counter() - sent_s
        if self._reader.status != 200 or first_s is None:
            raise RuntimeError(f"status {self._reader.status} from the relay")
        return first_s


def run(against: str, seconds: float) -> None:
    """Print ratios of gorgo here to gorgo at `against`, or of `gorgo serve --plain` to gorgo, both here.

    `seconds` are those for each kind of request.
    """
    print(f"Relay, pairs of blocks of {_BLOCK} requests\n{measure.describe_machine()}", flush=True)
    launches = {"gorgo": targets.gorgo, f"gorgo {Path(against).name}": targets.other_gorgo(against)}
    if against == PLAIN:
        launches = {PLAIN: targets.gorgo_plain, "gorgo": targets.gorgo}
    # Numbers go on from run to run, so that no prompt comes twice.
    numbers = itertools.count(time.time_ns() // 1_000_000)
    pairs: dict[Kind, list[_Pair]] = {kind: [] for kind in KINDS}
    for number in range(_PROCESSES):
        seeded = {name: _seeded(launch, number + 1) for name, launch in launches.items()}
        order = dict(reversed(list(seeded.items()))) if number % 2 else seeded
        with bench.running(order) as (relays, _), measure.on_load_core():
            now, earlier = (next(relay for relay in relays if relay.name == name) for name in launches)
            for kind in KINDS:
                pairs[kind] += _pairs(kind, now, earlier, numbers, seconds / _PROCESSES)
    for kind, found in pairs.items():
        print(_compared(kind, found), flush=True)
    print(f"{'events of open streams':<22}{event_ratio(launches)}", flush=True)


def _seeded(launch: Callable[[targets.Place], targets.Launch], seed: int) -> Callable[[targets.Place], targets.Launch]:
    """Return the same launch with a seed of string hashes."""

    def seeded(place: targets.Place) -> targets.Launch:
        found = launch(place)
        return replace(found, environment={**found.environment, "PYTHONHASHSEED": str(seed)})

    return seeded


def event_ratio(launches: Mapping[str, Any], rounds: int = _ROUNDS) -> str:
    """Return the CPU per event of the first of two versions to that of the second, with its interval.

    Both have so many open streams in the same windows of time, on one core: what else the machine does meets both. Each
    round has new processes, and starts them in the other order.
    """
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        order = dict(reversed(list(launches.items()))) if number % 2 else launches
        with ExitStack() as stack, bench.running(order) as (relays, _):
            by_name = {relay.name: relay for relay in relays}
            found = [(by_name[name], bench.Load(stack)) for name in launches]
            with ThreadPoolExecutor(len(found)) as both:
                for _ in range(_WINDOWS):
                    now, earlier = both.map(_per_event, found)
                    pairs.append((now, earlier))
    value, low, high = median_ratio(np.log([now / earlier for now, earlier in pairs]))
    spent = f"{median(now for now, _ in pairs):.2f} and {median(earlier for _, earlier in pairs):.2f} us"
    return f"{len(pairs):5} pairs   CPU {value:.3f}x [{low:.3f}, {high:.3f}]   {spent}"


def _per_event(version: tuple[bench.Relay, bench.Load]) -> float:
    relay, load = version
    job = {"kind": "hold", "size": scenarios.SMALL, "tokens": scenarios.ENDLESS, "gap_ms": _GAP_MS}
    figures = load(
        relay, scenarios.Scenario(name="events", job={**job, "connections": scenarios.STREAMS, "seconds": _WINDOW_S})
    )
    if figures["bad"] or not figures["tokens"]:
        raise RuntimeError(f"no streams: {figures['problem']}")
    spent_s, tokens = float(figures["cpu_s"]), int(figures["tokens"])
    return spent_s / tokens * 1e6


def _pairs(
    kind: Kind, now: bench.Relay, earlier: bench.Relay, numbers: itertools.count[int], seconds: float
) -> list[_Pair]:
    clients = [_Client(now), _Client(earlier)]
    pairs: list[_Pair] = []
    try:
        for client in clients:
            client.block(kind, numbers, _WARM_UP)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            order = clients if len(pairs) % 2 == 0 else clients[::-1]
            found = {client: client.block(kind, numbers) for client in order}
            pairs.append((found[clients[0]], found[clients[1]]))
    finally:
        for client in clients:
            client.close()
    return pairs


def _compared(kind: Kind, pairs: list[_Pair]) -> str:
    (cpu, low, high), (first, _, _) = (
        median_ratio(np.log([own[place] / other[place] for own, other in pairs])) for place in (0, 1)
    )
    spent = f"{median(own for (own, _), _ in pairs):.0f} and {median(other for _, (other, _) in pairs):.0f} us"
    ratio = f"{len(pairs):5} pairs   CPU {cpu:.3f}x [{low:.3f}, {high:.3f}]   {spent}"
    return f"{kind.name:<22}{ratio}   first byte of content or end {first:.3f}x"
