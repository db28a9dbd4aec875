"""`python -m tests.chaos [--picker | --plain] [--short] [--seed N] [--seconds S] [--per-s R] [--keep FOLDER]`.

The exit code is 1 if anything did not hold, and 3 if so on a machine on which nothing else could be expected.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from tests.chaos.invariants import judge_run, starved_s, tally
from tests.chaos.report import print_report
from tests.chaos.run import FULL, SHORT, run_chaos

INCONCLUSIVE = 3


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    plan = SHORT if asked.short else FULL
    if asked.seconds is not None:
        plan = replace(plan, load_s=asked.seconds)
    if asked.per_s is not None:
        plan = replace(plan, per_s=asked.per_s)
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    console = Console(width=150)
    console.print(f"seed {seed}: {plan.load_s:g} s of load at {plan.per_s:g} requests/s", markup=False)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gorgo-chaos-") as scratch:
        run = asyncio.run(
            run_chaos(
                plan,
                seed,
                asked.keep or Path(scratch),
                behind_envoy=asked.picker,
                plain=asked.plain,
                workers=asked.workers,
            )
        )
    findings = judge_run(run)
    print_report(run, findings, console)
    broken = sum(bool(finding.violations) for finding in findings)
    kind = "--picker " if asked.picker else "--plain " if asked.plain else "--workers " if asked.workers else ""
    again = f"make chaos{'-short' if asked.short else ''} ARGS='{kind}--seed {seed}'"
    half_s = median(look.took_s for look in run.watch.during)
    console.print(f"half of the looks at the proxy took {half_s * 1e3:.0f} ms or less", markup=False)
    took_s = time.monotonic() - began_s
    console.print(f"{tally(findings)}; {took_s:.0f} s; the same schedule again: {again}", markup=False)
    starved = starved_s(run)
    if broken and starved is not None:
        console.print(f"nothing is proved by that: half of the proxy's answers to a look took {starved:.2f} s or more")
        return INCONCLUSIVE
    return 1 if broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--picker", action="store_true", help="Envoy and `gorgo picker` in the place of the proxy")
    kind.add_argument("--plain", action="store_true", help="`gorgo serve --plain` as the proxy")
    kind.add_argument("--workers", action="store_true", help="`gorgo serve --processes 2` as the proxy")
    parser.add_argument("--short", action="store_true", help="the form of one minute")
    parser.add_argument("--seed", type=int, help="of schedule and load; by chance without one")
    parser.add_argument("--seconds", type=float, help="of load")
    parser.add_argument("--per-s", type=float, help="requests per second")
    parser.add_argument("--keep", type=Path, help="an empty folder where configuration, logs and database stay")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
