"""`python -m tests.bench.behind_envoy [--short | --brief] [--json]`: the pickers' part of `make bench`."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tests.bench.behind_envoy import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.behind_envoy", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one short round, two and a half minutes")
    parser.add_argument("--brief", action="store_true", help="everything once, a minute")
    parser.add_argument("--rounds", type=int, help="of the price")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    asked = parser.parse_args()
    plan = bench.BRIEF if asked.brief else bench.SHORT if asked.short else bench.FULL
    if asked.rounds:
        plan = replace(plan, rounds=asked.rounds)
    bench.run(plan, as_json=asked.json)


if __name__ == "__main__":
    main()
