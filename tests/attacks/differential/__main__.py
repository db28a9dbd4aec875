"""`python -m tests.attacks.differential {requests,responses} [--count N] [--seed N] [--first N]`: the long form.

Prints JSON: items, how many both accept or refuse, and why the proxy alone refused. A disagreement ends it with status
1, its smallest pieces and its number; `--first` goes on at a number.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tests.attacks.differential.fuzz import KINDS, DisagreementError, Found, fuzz

_REPORT_EVERY = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.differential", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first item")
    wanted = parser.parse_args(arguments)

    def report(found: Found) -> None:
        if found.items % _REPORT_EVERY == 0:
            print(f"{wanted.first + found.items} items read", file=sys.stderr, flush=True)

    try:
        found = fuzz(wanted.kind, wanted.count, seed=wanted.seed, first=wanted.first, on_item=report)
    except DisagreementError as error:
        print(error, file=sys.stderr)
        return 1
    about = {"kind": wanted.kind, "seed": wanted.seed, "first": wanted.first, "items": found.items}
    both = {"accepted": found.accepted, "refused_by_both": found.refused_by_both}
    print(json.dumps(about | both | {"stricter": dict(found.stricter.most_common())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
