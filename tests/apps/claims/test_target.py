from __future__ import annotations

from typing import Any

import pytest

from gorgo.apps.claims import RatioTarget, Workload, judge
from gorgo.apps.claims.workload import PolicyTask
from gorgo.apps.results import ResultRow
from tests.apps.claims.rows import row

HERE, THERE = Workload(name="here", traces=("t",)), Workload(name="there", traces=("t",))


def target(**changes: Any) -> RatioTarget:
    given: dict[str, Any] = {"workloads": (HERE,), "others": ("b",), "figure": "p95 TTFT", "at_most": 0.9}
    return RatioTarget(group="g", policy="a", **(given | changes))


def rows(policy: str, *ttft_ms: float | None) -> dict[int, ResultRow]:
    return {seed: row(policy, seed=seed, ttft_ms=value) for seed, value in enumerate(ttft_ms)}


def test_a_ratio_is_the_geometric_mean_over_seeds() -> None:
    verdict = judge(target(), {(HERE, "a"): rows("a", 80.0, 90.0), (HERE, "b"): rows("b", 100.0, 100.0)})
    assert verdict.value == pytest.approx((0.8 * 0.9) ** 0.5)
    assert verdict.low is not None
    assert (verdict.met, verdict.labels) == (True, ("here, load 1", "a", "b", "p95 TTFT"))


def test_a_limit_is_met_by_the_mean_and_sure_by_the_interval() -> None:
    ours, others = {(HERE, "a"): rows("a", 80.0, 82.0, 84.0)}, {(HERE, "b"): rows("b", 100.0, 100.0, 100.0)}
    near, far, beyond = (judge(target(at_most=limit), ours | others) for limit in (0.83, 0.95, 0.7))
    assert (near.met, near.sure) == (True, False)
    assert (far.met, far.sure) == (True, True)
    assert (beyond.met, beyond.sure) == (False, True)


def test_one_seed_is_never_sure() -> None:
    verdict = judge(target(), {(HERE, "a"): rows("a", 80.0), (HERE, "b"): rows("b", 100.0)})
    assert (verdict.met, verdict.sure) == (True, False)


def test_the_best_other_is_chosen_for_each_setting_by_its_mean() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (HERE, "c"): rows("c", 60.0, 160.0),
        (THERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "c"): rows("c", 70.0, 90.0),
    }
    value = judge(target(others=("b", "c"), workloads=(HERE, THERE)), found).value
    assert value == pytest.approx((50 / 100 * 50 / 100 * 50 / 70 * 50 / 90) ** 0.25)


def test_several_settings_are_one_figure_per_seed() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "a"): rows("a", 200.0, 200.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
    }
    verdict = judge(target(workloads=(HERE, THERE)), found)
    assert (verdict.value, verdict.low, verdict.high) == pytest.approx((1.0, 1.0, 1.0))


def test_a_seed_that_lacks_a_setting_is_left_out() -> None:
    found = {
        (HERE, "a"): rows("a", 50.0, 50.0),
        (THERE, "a"): rows("a", 50.0),
        (HERE, "b"): rows("b", 100.0, 100.0),
        (THERE, "b"): rows("b", 100.0, 100.0),
    }
    verdict = judge(target(workloads=(HERE, THERE)), found)
    assert verdict.value == pytest.approx(0.5)
    assert verdict.low is None


def test_the_others_may_run_elsewhere() -> None:
    asked = target(others=("a",), others_on=(THERE,), at_most=1.05)
    verdict = judge(asked, {(HERE, "a"): rows("a", 103.0), (THERE, "a"): rows("a", 100.0)})
    assert verdict.met
    assert list(asked.tasks([0])) == [PolicyTask(HERE, "a", 0), PolicyTask(THERE, "a", 0)]


def test_what_nobody_measured_is_not_met() -> None:
    assert not judge(target(), {}).met
    verdict = judge(target(), {(HERE, "a"): rows("a", None), (HERE, "b"): rows("b", 100.0)})
    assert (verdict.value, verdict.met, verdict.sure) == (None, False, False)
