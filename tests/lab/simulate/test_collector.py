"""Python's garbage collector during a simulated run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.simulate.rows import NEW_OBJECTS, rare_collections
from gorgo.policies.registry import make_policy
from tests.lab.sim.feeds import conversations
from tests.lab.sim.fleets import three_regions


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_setting_is_restored_after_an_error() -> None:
    gc.set_threshold(900, 7, 3)
    with pytest.raises(KeyError, match="True"), rare_collections():
        raise KeyError(gc.get_threshold()[0] == NEW_OBJECTS)
    assert gc.get_threshold() == (900, 7, 3)


def test_a_run_beside_another_leaves_the_setting_to_it() -> None:
    gc.set_threshold(900, 7, 3)
    with rare_collections():
        with rare_collections():
            pass
        assert gc.get_threshold() == (NEW_OBJECTS, 7, 3)
    assert gc.get_threshold() == (900, 7, 3)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0


def test_attempts_that_have_ended_are_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        Simulation(three_regions(), make_policy("gorgo-ms"), seed=0).run(conversations(30, every_s=0.2))
        left = sum(isinstance(found, Attempt) for found in gc.get_objects())
    finally:
        gc.enable()
    assert left == 0
