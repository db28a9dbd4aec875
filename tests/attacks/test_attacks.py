"""Short forms of the attacks and of the fuzz: hostile bodies are refused or read within counts, and no item crashes
a reader.
"""

from __future__ import annotations

import os

import pytest

from gorgo.core.numeric import QUICK_BYTES, QUICK_OBJECTS, QUICK_VALUES, count_values, is_quick
from gorgo.core.prompt.fingerprint import MAX_BLOCKS, Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.parsing.workers import BodyWorkers
from tests.attacks.attacks import attacks
from tests.attacks.bodies import MIB, SHOWN, hostile_bodies
from tests.attacks.engine import metrics_texts
from tests.attacks.fuzz import KINDS, fuzz
from tests.proxy.test_fuzz import EXAMPLES

# --- Hostile bodies of 1 MiB in every field: refused, or read within counts; the generator is the harness's.


#: Small enough to be read in the test itself.
SMALL_BYTES = 64 * 1024
FINGERPRINTER = Fingerprinter(key=7)
BODIES = hostile_bodies()


@pytest.mark.parametrize("name", BODIES)
def test_body_is_read_at_once_only_if_its_counts_are_small(name: str) -> None:
    body = BODIES[name].of_size(MIB)
    assert len(body) <= MIB
    assert is_quick(body) is (count_values(body) <= QUICK_VALUES and body.count(b"{") <= QUICK_OBJECTS)
    small = BODIES[name].of_size(SMALL_BYTES)
    status = 200
    try:
        read_fields(BODIES[name].route, small, FINGERPRINTER)
    except HttpError as error:
        status = error.status
    assert status in (200, 400)


@pytest.mark.system
async def test_large_body_of_any_kind_is_read_elsewhere_or_refused() -> None:
    workers = BodyWorkers(FINGERPRINTER)
    try:
        for name in SHOWN:
            body = BODIES[name].of_size(QUICK_BYTES + MIB)
            assert not is_quick(body)
            status, blocks = 200, 0
            try:
                blocks = len((await workers.read(BODIES[name].route, body)).sketch.sums)
            except HttpError as error:
                status = error.status
            assert status in (200, 400), name
            assert blocks <= MAX_BLOCKS, name
    finally:
        await workers.aclose()


def test_every_attack_has_a_name_of_its_own_and_its_size() -> None:
    names = [(attack.kind, attack.name) for attack in attacks(SMALL_BYTES, every=True)]
    assert len(names) == len(set(names))
    assert set(SHOWN) <= set(BODIES)
    assert all(len(text) <= 2 * SMALL_BYTES for text in metrics_texts(SMALL_BYTES).values())


# --- The short form of the fuzz: no item crashes a reader or leaves anything, some are taken and some refused.


def test_items_of_every_kind_are_read_or_refused() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    found, live = fuzz(EXAMPLES * 20, seed=1)
    assert (len(os.listdir("/proc/self/fd")), live.tasks_left) == (descriptors, 0)
    assert live.items == EXAMPLES
    assert {"200", "400", "502"} <= set(live.statuses)
    assert {kind: count.items for kind, count in found.items()} == dict.fromkeys(KINDS, EXAMPLES * 20 // len(KINDS))
    assert all(0 < count.refused < count.items for count in found.values())
