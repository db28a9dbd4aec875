"""`python -m tests.attacks [--at COMMIT]`: the worst delay of `/health` under each attack, as JSON.

A proxy as a process, a hostile engine, hostile clients. While each attack runs, `/health` is requested on another
connection, one request after the other. A row has the longest time of one, and how far the memory of the proxy's
processes rose. The row of `nothing` says what the machine adds. With --at the proxy is that of another commit.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.attacks.attacks import Attack, attacks
from tests.attacks.bodies import MIB
from tests.attacks.engine import HostileEngine
from tests.attacks.seams import PickerProbe, attacked_picker, picker_attacks, seams
from tests.attacks.target import Probe, Target, target
from tests.chaos.fast_failures import _checkout
from tests.documents import ROOT


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: the worst delay of a probe, the median, peak of memory above that before, what was answered.

    `cpu_ms` is the most processor time of the proxy's process within one probe.
    """

    kind: str
    attack: str
    mib: int
    delay_ms: float
    cpu_ms: float
    median_ms: float
    memory_mib: float
    answer: str


def measure(attack: Attack, running: Target, engine: HostileEngine, prober: type[Probe] = Probe) -> Row:
    """Run one attack beside a probe."""
    run = attack.prepare()
    before = running.reset_peak()
    with prober(running) as probe:
        answer = run(running, engine)
    delays = sorted(probe.delays_s)
    return Row(
        kind=attack.kind,
        attack=attack.name,
        mib=attack.size // MIB,
        delay_ms=round(delays[-1] * 1000, 1),
        cpu_ms=round(max(probe.cpu_s) * 1000, 1),
        median_ms=round(delays[len(delays) // 2] * 1000, 1),
        memory_mib=round((running.memory("VmHWM") - before) / MIB, 1),
        answer=answer,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--at", metavar="COMMIT", help="attack the proxy of this commit; default: this checkout")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 32], help="sizes of what is sent")
    parser.add_argument("--only", default="", metavar="REGEX", help="attacks whose kind and name match")
    parser.add_argument("--every", action="store_true", help="every kind of value in every field")
    parser.add_argument("--seams", action="store_true", help="attacks on the picker, by KV events, store and sources")
    wanted = parser.parse_args(arguments)
    rows: list[Row] = []
    engine = HostileEngine()
    with tempfile.TemporaryDirectory(prefix="gorgo-attacks-") as scratch:
        code = ROOT if wanted.at is None else _checkout(wanted.at, Path(scratch) / "tree")

        def attack_all(found: Iterable[Attack], running: Target, prober: type[Probe] = Probe) -> None:
            for attack in found:
                if re.search(wanted.only, f"{attack.kind}: {attack.name}"):
                    rows.append(measure(attack, running, engine, prober))
                    print(rows[-1], file=sys.stderr, flush=True)

        if wanted.seams:
            with attacked_picker(Path(scratch), engine, code) as running:
                attack_all(picker_attacks(), running, PickerProbe)
            with seams(Path(scratch), engine, code) as among:
                attack_all(among.attacks, among.target)
        for size in () if wanted.seams else wanted.mib:
            with target(Path(scratch) / f"proxy-{size}", engine.port, code) as running:
                attack_all(attacks(size * MIB, every=wanted.every), running)
    engine.close()
    print(json.dumps({"of": wanted.at, "rows": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
