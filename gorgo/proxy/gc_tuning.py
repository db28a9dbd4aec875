"""The garbage collector, set for a server: what is there at the start is not looked at again, and looks are rarer.

Owns the setting of the whole process, so only the command line calls `freeze_startup_objects`. A full collection takes
10 to 20 ms, in which every stream stands still.

Why it is safe: nothing large depends on the collector. Bodies and chunks are freed by their last reference, however a
request ends (tests/proxy/test_gc_tuning.py). What does come in cycles are connections that have ended: about 30 objects
each. What is frozen and dropped later, a replica that a reload removes for instance, is kept if it is in a cycle; there
is only so much of it as there was at the start.
"""

from __future__ import annotations

import gc

#: New objects before a look at the youngest; 700 by default.
YOUNG_OBJECTS = 5_000
#: Looks at one generation before a look at the next, as by default. All of it is looked at after half a million new
#: objects: at worst 15,000 ended connections wait for that, well below 200 MB. Rarer looks measured no faster.
GC_RUNS = 10


def freeze_startup_objects() -> None:
    """Call once, when everything is imported and set up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, GC_RUNS, GC_RUNS)
