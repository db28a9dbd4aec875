"""Fuzzing in two lengths: a short one with each run of the tests, and a long one by an environment variable.

`GORGO_FUZZ_CASES=100000 pytest tests/... -k cases_of_chance` is the long form.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import thread_time

#: Cases of each fuzzer.
CASES = int(os.environ.get("GORGO_FUZZ_CASES", "1000"))
#: Of one case, in processor time: other processes of the machine do not count.
MOST_S = 0.1


def timed(case: Callable[[], object]) -> float:
    """Run a case; return its processor time, s. Raises `AssertionError` for one that would delay others."""
    started = thread_time()
    try:
        case()
    finally:
        took = thread_time() - started
        assert took < MOST_S, f"a case took {took:.3f} s"
    return took
