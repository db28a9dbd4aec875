"""`python -m tests.overload`: capacity by simulation, then the same loads over HTTP, and the two side by side.

Six runs of `--seconds` each, sent at once and held, and one of clients that obey `Retry-After`. Engines start cold, the
proxy knows nothing, and capacity is that of so many seconds on cold engines; the longest prompts, which take two
seconds alone there, are left out. Exit code 1 if a target is missed or the queue outgrew its bound.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gorgo.config.load import load_config
from gorgo.config.model import Config
from gorgo.lab.datasets import load_requests
from gorgo.lab.traces import TraceFilters, TraceRequest
from tests.bench.relay.measure import describe_machine
from tests.overload.fleet import configuration, running, write_configuration
from tests.overload.live import LiveRun, live
from tests.overload.obeying import Obedience, obedient
from tests.overload.show import HEAD, Pair, missed, show_obedience, show_pair
from tests.overload.simulated import capacity_of, simulated
from tests.overload.window import covers, cut

LOADS = (0.7, 1.3, 3.0)
SLO_TTFT_MS, SLO_E2E_MS = 2000.0, 10_000.0
#: The load of obeying clients: so many are turned away that coming back matters, and there is room to come back to.
OBEYED_LOAD = 1.3


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    filters = TraceFilters(max_input=given.max_input, max_output=given.max_output, spread_s=given.spread)
    requests = load_requests(given.trace, filters, seed=0)
    overload: dict[str, float] = {"slo_e2e_ms": SLO_E2E_MS}
    if given.max_concurrency_per_replica is not None:
        overload["max_concurrency_per_replica"] = given.max_concurrency_per_replica
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="gorgo-overload-") as folder:
        config = load_config(
            write_configuration(
                Path(folder) / "regions.yaml", configuration(held=True, slo_ttft_ms=SLO_TTFT_MS, urls={}, **overload)
            )
        )
        capacity = capacity_of(requests, config, lasts_s=given.seconds)
        print(f"capacity of {given.trace} for {given.seconds:g} s: time scale {capacity:.3f} (simulated)", flush=True)
        pairs = [] if given.obeying_alone else _pairs(requests, config, capacity, given, Path(folder), overload)
        obeyed = None if given.no_obeying else _obeyed(requests, capacity, given, Path(folder), overload)
    if obeyed is not None:
        show_obedience(OBEYED_LOAD, obeyed)
    wrong = missed(pairs, obeyed, queue_max_requests=config.overload.queue_max_requests)
    print("\n".join(["", "missed:", *wrong]) if wrong else "\nevery target met")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.overload", description=__doc__)
    parser.add_argument("--trace", default="art-chat-apr5")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--max-input", type=int, default=12_000)
    parser.add_argument("--max-output", type=int, default=256)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--max-concurrency-per-replica", type=int)
    parser.add_argument("--load", type=float, action="append", help=f"default: {', '.join(map(str, LOADS))}")
    parser.add_argument("--held-alone", type=float, action="append", default=[], help="a load not to be sent at once")
    parser.add_argument("--obeying-alone", action="store_true", help="nothing but the clients that obey Retry-After")
    parser.add_argument("--no-obeying", action="store_true", help="leave out the clients that obey Retry-After")
    return parser.parse_args()


def _pairs(
    requests: Sequence[TraceRequest],
    config: Config,
    capacity: float,
    given: argparse.Namespace,
    folder: Path,
    overload: dict[str, float],
) -> list[Pair]:
    pairs: list[Pair] = []
    print(HEAD, flush=True)
    for load in given.load or LOADS:
        offer = cut(requests, load=load, capacity=capacity, lasts_s=given.seconds)
        if not covers(requests, offer):
            print(f"{given.trace} is too short for {load:g} times its capacity: its last requests are missing")
        for held in (True,) if load in given.held_alone else (False, True):
            place = folder / f"{load:g}-{'held' if held else 'once'}"
            with running(place, held=held, slo_ttft_ms=SLO_TTFT_MS, **overload) as fleet:
                seen: LiveRun = live(offer, fleet)
            virtual = simulated(offer, config, held=held, slo_ttft_ms=SLO_TTFT_MS)
            pairs.append(Pair(load=load, held=held, live=seen, simulated=virtual))
            show_pair(pairs[-1])
    return pairs


def _obeyed(
    requests: Sequence[TraceRequest],
    capacity: float,
    given: argparse.Namespace,
    folder: Path,
    overload: dict[str, float],
) -> Obedience:
    offer = cut(requests, load=OBEYED_LOAD, capacity=capacity, lasts_s=given.seconds)
    with running(folder / "obeying", held=True, slo_ttft_ms=SLO_TTFT_MS, **overload) as fleet:
        return obedient(offer, fleet)


if __name__ == "__main__":
    sys.exit(main())
