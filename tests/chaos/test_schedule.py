"""The schedule: the same for the same seed, every kind in it, and somebody always well."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.chaos.fleet import REPLICAS
from tests.chaos.run import BRIEF, FULL, SHORT, Plan, plan_schedule
from tests.chaos.schedule import CONFIGURATION, RECOVERY_S, Kind, Planned
from tests.chaos.test_short import BRIEF_SEED


def drawn(seed: int, plan: Plan = SHORT) -> list[Planned]:
    return plan_schedule(plan, seed)


def test_a_seed_is_a_schedule() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


@pytest.mark.parametrize("plan", [FULL, BRIEF], ids=["full", "brief"])
def test_one_replica_is_well_at_every_moment_but_in_a_blackout(plan: Plan) -> None:
    for seed in range(20):
        planned = drawn(seed, plan)
        assert planned
        for fault in planned:
            if not fault.ill or fault.kind is Kind.BLACKOUT:
                continue
            beside = [each for each in planned if each.ill and each.start_s <= fault.start_s < each.end_s + RECOVERY_S]
            assert Kind.BLACKOUT not in {each.kind for each in beside}, seed
            assert len({each.target for each in beside}) < len(REPLICAS), seed


def test_one_thing_at_a_time_happens_to_each() -> None:
    for seed in range(20):
        planned = drawn(seed, FULL)
        for target in (*REPLICAS, CONFIGURATION):
            mine = [each for each in planned if target in (each.target, CONFIGURATION if _edits(each) else None)]
            assert all(before.end_s < after.start_s for before, after in pairwise(mine)), (seed, target)


def test_every_kind_comes_and_is_got_over_in_time() -> None:
    for seed in range(20):
        planned = drawn(seed, FULL)
        counts = [sum(each.kind is kind for each in planned) for kind in Kind]
        assert min(counts) >= 3, seed
        assert all(each.end_s + RECOVERY_S <= FULL.load_s for each in planned), seed


def test_the_short_form_has_nearly_all_of_them() -> None:
    assert min(len({each.kind for each in drawn(seed)}) for seed in range(20)) >= len(Kind) - 2


def test_the_brief_form_has_all_but_the_blackout_and_a_kill_of_a_sidecar_that_has_written() -> None:
    planned = {each.kind: each for each in drawn(BRIEF_SEED, BRIEF)}
    assert set(Kind) - set(planned) == {Kind.BLACKOUT}
    # Thirty requests have been asked by then, two windows and more.
    assert planned[Kind.TUNER].start_s > 3.0
    # One replica has nothing wrong with it from beginning to end, so that each error before content is judged.
    assert len({each.target for each in planned.values() if each.ill}) < len(REPLICAS)


def _edits(fault: Planned) -> bool:
    return fault.kind is Kind.RELOAD
