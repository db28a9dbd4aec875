"""Freezes start-up objects and runs the garbage collector less often.

The setting is the process's, so only the command line calls `freeze_startup_objects`. A full collection takes 10 to
20 ms, in which no stream proceeds.

Why it is safe: nothing large depends on the collector. Bodies and chunks are freed by their last reference, however a
request ends (tests/live/test_gc_tuning.py). Closed connections are cycles of about 30 objects each. A frozen object in
a cycle is never freed, as of a replica that a reload removes; there are only as many as at the start.
"""

from __future__ import annotations

import gc

#: New objects before a collection of the youngest generation; 700 by default.
YOUNG_OBJECTS = 5_000
#: Collections of the youngest generation before one of the middle one, as by default.
MIDDLE_RUNS = 10
#: Collections of the middle generation before a full one, which then has at most 150,000 new objects: 10 to 17 ms.
#: By default half a million would take 41 to 53 ms. At worst 5,000 closed connections wait for it, well below 70 MB.
FULL_RUNS = 3


def freeze_startup_objects() -> None:
    """Freeze all objects and set the thresholds; call once, after set-up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE_RUNS, FULL_RUNS)
