"""`python -m tests.soak`: the whole soak, its figures, and exit code 1 if anything is wrong."""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.relay.measure import describe_machine
from tests.soak.ledgers import Ledgers
from tests.soak.run import Plan, soak
from tests.soak.verdict import Soak, violations

_MIB = 2**20


def main() -> int:
    asked = Plan()
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=asked.shorts)
    parser.add_argument("--streams", type=int, default=asked.streams)
    parser.add_argument("--warm-up", type=int, default=asked.warm_up)
    parser.add_argument("--processes", type=int, default=asked.processes)
    parser.add_argument("--folder", type=Path, help="for logs and configuration, and kept; default: one that is not")
    given = parser.parse_args()
    plan = Plan(
        shorts=given.requests,
        streams=given.streams,
        warm_up=given.warm_up,
        leave=min(asked.leave, given.streams),
        processes=given.processes,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
    print(describe_machine(), flush=True)
    begun_s = time.monotonic()

    def tell(step: str) -> None:
        print(f"{time.monotonic() - begun_s:6.0f} s  {step}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gorgo-soak-") as passing:
        folder = given.folder or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        found = soak(plan, folder, tell=tell)
    show(found, time.monotonic() - begun_s)
    wrong = violations(found)
    print("\n".join(["", "wrong:", *wrong]) if wrong else "\nnothing is wrong")
    return 1 if wrong else 0


def show(found: Soak, wall_s: float) -> None:
    """The table."""
    print(f"\n{'':24}{'fresh':>10}{'warm':>10}{'end':>10}{'after':>10}")
    looks = (found.fresh, found.warm, found.end, found.after)
    print(f"{'memory MiB':24}" + "".join(f"{look.resident / _MIB:>10.1f}" for look in looks))
    for name in _SHOWN:
        print(f"{name:24}" + "".join(f"{_value(look, name):>10}" for look in looks))
    sent = found.shorts - found.unsent
    served, requests_s = sent / max(found.wall_s, 1e-9), found.cpu_s / max(sent, 1) * 1e6
    print(f"memory after warm-up {found.growth:+.1%}; on the way, MiB: {_way(found.resident)}")
    print(f"{sent} short requests beside {found.streaming} slow streams in {found.wall_s:.0f} s: {served:.0f}/s")
    print(f"processor time of the proxy {requests_s:.0f} us per short request, streams included")
    print(
        f"{sum(found.problems.values())} errors, {found.streamed_tokens} tokens of slow streams, {wall_s:.0f} s in all"
    )


_SHOWN = (
    *("in_flight", "replica_tokens", "held", "clients open", "exchanges", "retries_spent", "hedges_spent"),
    *("hedge_watch", "tasks", "fds", "index_blocks", "samples"),
)


def _way(resident: Sequence[int], steps: int = 12) -> str:
    """A few of many."""
    return " ".join(f"{value / _MIB:.0f}" for value in resident[:: max(1, len(resident) // steps)])


def _value(look: Ledgers, name: str) -> int:
    return sum(look.clients.values()) if name == "clients open" else int(getattr(look, name))


if __name__ == "__main__":
    sys.exit(main())
