"""Freezes start-up objects and runs the garbage collector less often.

The setting is the process's, so only the command line calls `freeze_startup_objects`. A full collection takes 10 to
20 ms, in which no stream proceeds.

Why it is safe: nothing large depends on the collector. Bodies and chunks are freed by their last reference, however a
request ends (tests/proxy/test_gc_tuning.py). Closed connections are cycles of about 30 objects each. A frozen object in
a cycle is never freed, as of a replica that a reload removes; there are only as many as at the start.
"""

from __future__ import annotations

import gc

#: New objects before a collection of the youngest generation; 700 by default.
YOUNG_OBJECTS = 5_000
#: Collections of one generation before one of the next, as by default. A full collection comes after half a million
#: new objects: at worst 15,000 closed connections, well below 200 MB. Rarer collections measured no faster.
GC_RUNS = 10


def freeze_startup_objects() -> None:
    """Freeze all objects and set the thresholds; call once, after set-up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, GC_RUNS, GC_RUNS)
