"""Python's garbage collector during a simulated run.

A run frees what it drops by reference counts. It leaves a few hundred objects in cycles, and three per decision of the
oracle. By default the collector visits all living objects again and again, for a sixth of the run's processor time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects before a collection. A run of 7,000 requests makes fewer; a longer one has at most 200 MB in cycles.
NEW_OBJECTS = 1_000_000


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect after `NEW_OBJECTS` meanwhile; the setting is the process's, and is restored."""
    before = gc.get_threshold()
    if not 0 < before[0] < NEW_OBJECTS:  # switched off, or another thread's run has set it
        yield
        return
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
