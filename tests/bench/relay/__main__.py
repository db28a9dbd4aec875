"""`python -m tests.bench.relay [--short | --profile] [--json] [--against TREE]`: the relay's part of `make bench`.

TREE is a commit, or a folder such as `build/compiled`. A change is tried with `--pair HEAD`, two or three minutes: what
that says of a tree without a change is the smallest difference that it can tell. `--pair plain` compares
`gorgo serve --plain` with gorgo.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tests.bench.relay import bench, capacity, pair, profile, scenarios


def main() -> None:
    names = [*(scenario.name for scenario in scenarios.each_round(scenarios.FULL)), capacity.NAME]
    parser = argparse.ArgumentParser(prog="python -m tests.bench.relay", description=__doc__)
    parser.add_argument("--short", action="store_true", help="one short round, under two minutes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--profile", action="store_true", help="top functions of the relay under load, by py-spy")
    parser.add_argument("--against", metavar="TREE", help="measure gorgo as it is there as well, in the same rounds")
    parser.add_argument("--pair", metavar="TREE", help="gorgo here and there alone, a few requests each in turn")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each kind of request of --pair")
    parser.add_argument("--no-others", action="store_true", help="gorgo without TLS alone")
    parser.add_argument("--rounds", type=int, help="an even number gives every relay each place in the order as often")
    parser.add_argument("--scale", type=float, help="factor on the length of each job")
    parser.add_argument("--only", nargs="+", choices=names, default=(), metavar="JOB", help=", ".join(names))
    options = parser.parse_args()
    if options.profile:
        profile.run(as_json=options.json)
        return
    if options.pair:
        pair.run(options.pair, options.seconds)
        return
    plan = scenarios.SHORT if options.short else scenarios.plan_from_environment()
    plan = replace(
        plan, rounds=options.rounds or plan.rounds, scale=options.scale or plan.scale, only=tuple(options.only)
    )
    bench.run(plan, against=options.against, others=not options.no_others, as_json=options.json)


if __name__ == "__main__":
    main()
