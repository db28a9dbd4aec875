"""Two versions of gorgo, request by request: what a change costs, told more finely than rounds can.

One client with one connection to each sends a few requests to the one, then as many to the other, then the other way
round, hundreds of times. What else the machine does lasts longer than such a pair, so a pair's ratio leaves it out, and
the median over all pairs the rest. It is not the load of the other scenarios: one request at a time, caches cold from
the other version.
"""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.relay import bench, measure, scenarios, targets
from tests.bench.relay.wire import NUMBER_BYTES, ResponseReader, request

#: In the place of another version: the HTTP of stock libraries.
PLAIN = "plain"
_BLOCK = 8
_VARIANTS = 16
_WARM_UP = 12
_RECEIVED_MAX = 1 << 18
_ANSWER_S_MAX = 30.0


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
    launches = {"gorgo": targets.RELAYS["gorgo"], f"gorgo {Path(against).name}": targets.other_gorgo(against)}
    if against == PLAIN:
        launches = {PLAIN: targets.gorgo_plain, "gorgo": targets.RELAYS["gorgo"]}
    with bench.running(launches) as (relays, _), measure.on_load_core():
        now, earlier = (relay for relay in relays if relay.process is not None)
        # Numbers go on from run to run, so that no prompt comes twice.
        numbers = itertools.count(time.time_ns() // 1_000_000)
        for kind in KINDS:
            print(_compared(kind, now, earlier, numbers, seconds), flush=True)


def _compared(kind: Kind, now: bench.Relay, earlier: bench.Relay, numbers: itertools.count[int], seconds: float) -> str:
    clients = [_Client(now), _Client(earlier)]
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
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
    cpu, first = (median(own[place] / other[place] for own, other in pairs) for place in (0, 1))
    return f"{kind.name:<22}{len(pairs):5} pairs   CPU {cpu:.3f}x   first byte of content or end {first:.3f}x"
