"""`python -m tests.bench.relay [--quick | --profile] [--against COMMIT]`: the relay's part of `make bench` alone."""

from __future__ import annotations

import argparse

from tests.bench.relay import bench, profile, scenarios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.relay", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, well under a minute")
    parser.add_argument("--profile", action="store_true", help="top functions of the relay under load, by py-spy")
    parser.add_argument("--against", metavar="COMMIT", help="measure gorgo as it was there as well, in the same rounds")
    options = parser.parse_args()
    if options.profile:
        profile.run()
    else:
        bench.run(scenarios.QUICK if options.quick else scenarios.FULL, against=options.against)


if __name__ == "__main__":
    main()
