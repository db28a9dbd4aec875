"""The short form of the fuzz: no item crashes a reader or leaves anything, some are taken and some refused."""

from __future__ import annotations

import os

from tests.attacks.fuzz import KINDS, fuzz
from tests.proxy.fuzz.mutate import EXAMPLES


def test_items_of_every_kind_are_read_or_refused() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    found, live = fuzz(EXAMPLES * 20, seed=1)
    assert (len(os.listdir("/proc/self/fd")), live.tasks_left) == (descriptors, 0)
    assert live.items == EXAMPLES
    assert {"200", "400", "502"} <= set(live.statuses)
    assert {kind: count.items for kind, count in found.items()} == dict.fromkeys(KINDS, EXAMPLES * 20 // len(KINDS))
    assert all(0 < count.refused < count.items for count in found.values())
