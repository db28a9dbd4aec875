"""`python -m tests.figures`: what is stored and what is not; `... record NAME ...` makes the results of those anew.

A recorded command needs the machine for itself if its figures are of time.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.figures.stored import read_stored, record, stored_names
from tests.figures.table import FIGURES, NOT_STORED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.figures", description=__doc__)
    verbs = parser.add_subparsers(dest="verb")
    names = verbs.add_parser("record", help="run the commands of these figures and store what they print")
    names.add_argument("names", nargs="+", choices=sorted(FIGURES), metavar="NAME")
    asked = parser.parse_args(arguments)
    for name in asked.names if asked.verb == "record" else ():
        record(name, FIGURES[name].commands)
    if asked.verb is None:
        show()
    return 0


def show() -> None:
    """Print a line per figure: commit, date and machine of its result, or why there is none."""
    for name in stored_names():
        stored = read_stored(name)
        print(f"{name:<14} {stored.commit}  {stored.runs[0].date}  {stored.runs[0].machine}")
    for name in sorted(set(FIGURES) - set(stored_names())):
        print(f"{name:<14} no result yet: python -m tests.figures record {name}")
    for name, one in NOT_STORED.items():
        print(f"{name:<14} not stored: {one.why}; measured at {one.commits}")


if __name__ == "__main__":
    sys.exit(main())
