"""Runs of variants on workloads, comparisons of them, what learns within a run, and verdicts of targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments import variants
from experiments.comparison import MEASURES
from experiments.fleets import paper_fleet
from experiments.published import Published
from experiments.reports import Grid, claims_of, routers
from experiments.simulated import SimTask, TaskRun
from experiments.systems import llm_d, lodestar
from experiments.systems.lodestar import sharing
from experiments.tables import ClaimVerdict
from experiments.variants import VARIANTS, Variant, find_variant
from experiments.windows import LEARNED, PolicyTask, RatioTarget, Workload
from gorgo.errors import UnknownPolicy
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import FLEETS, QWEN_L40S, find_fleet
from gorgo.lab.traces import TraceFilters
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.policies.registry import BASELINES
from tests.experiments.rows import row

# --- Runs of variants, comparisons of them, and what learns within a run.


SMALL = routers(
    "x",
    "8xA30",
    sharing(0.5, requests=120, rate_per_s=8.0),
    "least-request",
    ("gorgo-ms", "load-prefix 3:2:2"),
    ("mean TTFT",),
    {("gorgo-ms", "mean TTFT"): Published.of("lodestar", "summary", "overall", "mean TTFT", "1.41")},
    scrape_s=1.0,
)


@pytest.fixture(scope="module")
def run() -> TaskRun:
    return SMALL.task("gorgo-ms", 0).run()


def test_a_run_measures_what_comes_after_the_warm_up(run: TaskRun) -> None:
    assert (run.row.n, run.row.errors, run.row.policy) == (60, 0, "gorgo-ms")
    assert run.row.prediction_error_ratio is not None
    assert sum(run.fallbacks.values()) == 60


def test_slices_cover_the_whole_run(run: TaskRun) -> None:
    full = [one for one in run.slices if one["n"]]
    assert sum(one["n"] or 0.0 for one in full) == 120
    assert all((one["hit"] or 0.0) <= (one["best_hit"] or 0.0) for one in full)
    begins_s = [one["begins_s"] or 0.0 for one in run.slices]
    assert begins_s == sorted(begins_s)


def test_the_same_task_is_the_same_run_whatever_ran_before(run: TaskRun) -> None:
    assert replace(SMALL.task("gorgo-ms", 0).run(), cpu_s=0.0) == replace(run, cpu_s=0.0)


def test_a_ratio_is_baseline_over_variant_so_that_more_is_better(run: TaskRun) -> None:
    slower = replace(run.row.ttft_ms, mean=3 * (run.row.ttft_ms.mean or 0.0))
    base = replace(run, row=replace(run.row, ttft_ms=slower))
    runs = {SMALL.task("gorgo-ms", 0): run, SMALL.task("least-request", 0): base}
    ours, other = SMALL.verdicts(runs, range(5))
    assert ours.value == pytest.approx(3.0)
    assert ours.labels == ("8xA30: 50% shared, 8/s, scrapes each 1 s", "gorgo-ms", "least-request", "mean TTFT", "1.41")
    assert other.value is None, "without a run there is no ratio"


def test_with_kv_events_a_run_is_another_one_and_a_prediction_counts_blocks_that_are_gone_no_more() -> None:
    traffic = sharing(0.7, requests=400, rate_per_s=12.0)
    kinds = [
        routers("x", "8xA30", traffic, "gorgo-ms", (), scrape_s=1.0),
        routers("x", "8xA30", traffic, "gorgo-ms", (), scrape_s=1.0, cache_reports="events"),
    ]
    assert kinds[1].title == "8xA30: 70% shared, 12/s, scrapes each 1 s, KV events"
    tasks = [one.task("gorgo-ms", 0) for one in kinds]
    assert tasks[0].key() != tasks[1].key()
    usage, events = (task.run().row for task in tasks)

    def off(row: ResultRow) -> float:
        assert row.cache_hit is not None
        assert row.cache_hit_estimated is not None
        return abs(row.cache_hit_estimated - row.cache_hit)

    assert off(events) < off(usage)


def test_a_claim_is_made_for_this_project_s_learned_policy_alone() -> None:
    (first, *_) = lodestar.comparisons()
    bounds = {(row.labels[1], row.labels[3]): row.at_least for row in first.verdicts({}, ())}
    assert {name for name, bound in bounds.items() if bound} == {
        ("gorgo-residual", "mean TTFT"),
        ("gorgo-residual", "p99 TTFT"),
    }
    assert bounds["gorgo-residual", "mean TTFT"] == 1.41


def test_a_comparison_asks_for_each_run_once() -> None:
    found = routers("x", "8xA30", sharing(0.5, requests=120, rate_per_s=8.0), "least-request",
                    ("gorgo-ms", "load-prefix 3:2:2"), also=("gorgo-ms", "random"))  # fmt: skip
    tasks = list(found.tasks(range(2)))
    assert len(tasks) == len(set(tasks)) == 2 * 4
    assert {task.seed for task in tasks} == {0, 1}


def test_every_comparison_names_a_fleet_and_variants_that_there_are() -> None:
    for one in (*lodestar.comparisons("trace.jsonl"), *llm_d.comparisons()):
        assert one.base.fleet.name in FLEETS
        assert {label for target in one.targets for label in (target.of, target.against)} <= set(one.variants)
        for label in one.variants:
            assert find_variant(label).make(), label


def test_published_systems_neither_queue_nor_hedge_and_a_label_says_where_both_are_on() -> None:
    published, ours = (SMALL.task(label, 0).limits() for label in ("gorgo-ms", "gorgo-ms with queueing"))
    assert (published.overload.queue_enabled, published.hedging.budget_ratio) == (False, 0.0)
    assert (ours.overload.queue_enabled, ours.hedging.budget_ratio) == (True, 0.03)


def test_weights_of_a_variant_are_set() -> None:
    variant = VARIANTS["load-prefix 3:2:2"]
    assert dict(variant.weights_of(variant.make())) == {"prefix": 3.0, "queue": 2.0, "kv": 2.0}


def test_an_unknown_variant_is_an_error_that_lists_them() -> None:
    with pytest.raises(UnknownPolicy, match="no variant 'fastest'; there are load-prefix 1:1:1"):
        find_variant("fastest")


def test_the_key_of_a_run_changes_with_what_it_depends_on() -> None:
    task = SMALL.task("gorgo-ms", 0)
    others = [replace(task, seed=1), SMALL.task("gorgo-ms with queueing", 0), replace(task, scrape_s=2.0)]
    assert len({task.key(), *(other.key() for other in others)}) == 4
    assert task.key() == SMALL.task("gorgo-ms", 0).key()


# -- what learns
LEARNING = routers("x", "8xA30", sharing(0.5, requests=400, rate_per_s=8.0), "lodestar, small", ("lodestar, stops",))
#: Every round is adopted, however little its few samples teach.
SETTINGS = (("first_samples", 80), ("round_samples", 100), ("epochs", 1), ("kind", "linear"), ("judged", False))


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "lodestar, small": Variant(policy="lodestar", training=SETTINGS),
        "lodestar, stops": Variant(policy="lodestar", training=SETTINGS, trains_until=0.5),
    }
    monkeypatch.setattr(variants, "VARIANTS", {**VARIANTS, **made})


@pytest.mark.usefixtures("small_rounds")
def test_a_policy_that_learns_adopts_models_within_the_run_and_a_frozen_one_no_more_after_its_time() -> None:
    online, frozen = (LEARNING.task(label, 0).run() for label in ("lodestar, small", "lodestar, stops"))
    assert len(online.lists["adopted_s"]) > len(frozen.lists["adopted_s"]) > 0
    assert max(frozen.lists["adopted_s"]) < 30.0 < max(online.lists["adopted_s"])
    assert "cold_start" not in online.fallbacks, "a model is there before the requests that are measured"


def test_a_model_from_another_fleet_decides_from_the_first_request_and_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run on the other fleet has settings of the policy's own: a model of a thousand samples."""
    small = Lodestar(replace(Lodestar().training, **dict(SETTINGS)))  # type: ignore[arg-type]
    monkeypatch.setattr(variants, "policy_of", lambda _: Lodestar(small.training))
    run = LEARNING.task("lodestar, offline", 0).run()
    assert run.lists["adopted_s"] == []
    assert sum(run.fallbacks.values()) == 200
    assert "cold_start" not in run.fallbacks


def test_a_shadow_s_order_is_compared_with_the_measured_one_and_the_shadow_learns() -> None:
    by_priors, learned = (
        LEARNING.task(f"random, shadow {name}", 0).run() for name in ("gorgo-residual", "predicted-latency")
    )
    assert learned.values["rho"] is not None
    assert (by_priors.values["rho"] or 0.0) > 0.3
    assert learned.lists["adopted_s"]


def test_a_run_without_a_shadow_has_no_order(run: TaskRun) -> None:
    assert run.values["rho"] is None


@pytest.mark.usefixtures("small_rounds")
def test_a_run_has_the_errors_of_its_models_and_what_they_predict_over_time() -> None:
    found = LEARNING.task("lodestar, small", 0).run()
    assert 0.0 < (found.values["ttft_mean"] or 0.0) < 10.0
    predicted = [one for one in found.slices if one["predicted_ttft_ms"] is not None]
    assert 10 <= len(predicted) < len(found.slices), "there is no model at first"
    assert all(one["modelled_ttft_ms"] is not None for one in predicted)


def test_a_published_figure_becomes_a_claim_with_this_project_s_policy_beside_it(run: TaskRun) -> None:
    (claim,) = claims_of("system", [SMALL], Grid(seeds=range(1)), ["x"])
    assert (claim.figure, claim.ours_name) == ("mean TTFT, least-request / gorgo-ms", "gorgo-ms")
    assert claim.reproduced is not None
    assert {task.variant.policy for task in claim.tasks if isinstance(task, SimTask)} == {"gorgo-ms", "least-request"}
    slower = replace(run, row=replace(run.row, ttft_ms=replace(run.row.ttft_ms, mean=2 * (run.row.ttft_ms.mean or 0))))
    found = claim.reproduced({SMALL.task("gorgo-ms", 0): run, SMALL.task("least-request", 0): slower})
    assert found is not None
    assert found.value == pytest.approx(2.0)


# --- Workloads, their jobs, and the verdicts of targets on rows made by hand.


HERE, THERE = Workload(name="here", traces=("t",)), Workload(name="there", traces=("t",))


def target(**changes: Any) -> RatioTarget:
    given: dict[str, Any] = {"workloads": (HERE,), "others": ("b",), "figure": "p95 TTFT", "at_most": 0.9}
    return RatioTarget(**{"group": "g", "policy": "a"} | given | changes)


def rows(policy: str, *ttft_ms: float | None) -> dict[int, ResultRow]:
    return {seed: row(policy, seed=seed, ttft_ms=value) for seed, value in enumerate(ttft_ms)}


def judge(target: RatioTarget, found: dict[tuple[Workload, str], dict[int, ResultRow]]) -> ClaimVerdict:
    runs = {
        PolicyTask(workload, policy, seed): TaskRun(row=each, cpu_s=0.0)
        for (workload, policy), by_seed in found.items()
        for seed, each in by_seed.items()
    }
    return target.verdict(runs, range(10))


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


@pytest.mark.parametrize(
    ("changes", "ours_ms", "said"),
    [
        ({}, [80.0], ("here, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800")),
        ({}, [80.0, 80.0], ("here, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "0.800 [0.800, 0.800]")),
        ({"figure": "p50 TTFT"}, [90.0], ("here, load 1", "gorgo-ms", "gorgo", "p50 TTFT", "<= 0.90", "0.900")),
        ({"workloads": (THERE,)}, [80.0], ("there, load 1", "gorgo-ms", "gorgo", "p95 TTFT", "<= 0.90", "-")),
        ({"others": BASELINES}, [80.0], ("here, load 1", "gorgo-ms", "prefix-cache", "p95 TTFT", "<= 0.90", "1.600")),
        (
            {"others": ("gorgo-ms",), "others_on": (HERE,), "at_most": 1.05},
            [80.0],
            ("here, load 1", "gorgo-ms", "itself", "p95 TTFT", "<= 1.05", "1.000"),
        ),
        (
            {"workloads": (HERE, HERE), "others": BASELINES},
            [80.0],
            ("geometric mean of 2", "gorgo-ms", "the best", "p95 TTFT", "<= 0.90", "1.600"),
        ),
    ],
)
def test_a_verdict_s_cells(changes: dict[str, Any], ours_ms: list[float], said: tuple[str, ...]) -> None:
    found = {
        (HERE, "gorgo-ms"): rows("gorgo-ms", *ours_ms),
        (HERE, "gorgo"): rows("gorgo", 100.0, 100.0),
        (HERE, "prefix-cache"): rows("prefix-cache", 50.0),
        (HERE, "least-load"): rows("least-load", 70.0),
    }
    asked = target(**{"policy": "gorgo-ms", "others": ("gorgo",)} | changes)
    assert judge(asked, found).cells()[:6] == said


def test_hits_are_a_measure_of_a_row_and_unknown_is_none() -> None:
    assert MEASURES["hit"](row()) == 0.5
    assert MEASURES["mean TPOT"](row()) is None


# -- jobs
WINDOW = Workload(name="windows", traces=("one", "two"), filters=TraceFilters(max_input=9, limit=50), time_scale=1.25)


def test_a_job_has_the_fleet_of_regions_yaml_and_a_named_one_where_the_workload_says_so() -> None:
    job = PolicyTask(WINDOW.under("bursts"), "random", 5).job()
    assert (job.trace, job.policy, job.seed, job.scenario, job.time_scale) == ("two", "random", 5, "bursts", 1.25)
    assert [replica.region for replica in job.fleet.replicas] == ["us-ashburn", "eu-frankfurt", "ap-seoul"]
    assert job.limits is not None
    assert PolicyTask(WINDOW.on("h100"), "random", 0).job().fleet == find_fleet("h100")


def test_a_workload_with_a_fleet_of_its_own_has_the_router_s_own_limits() -> None:
    profile = find_profile(QWEN_L40S)
    job = PolicyTask(replace(WINDOW, world=paper_fleet(profile), client_concurrency=64), "random", 0).job()
    assert {replica.profile for replica in job.fleet.replicas} == {profile}
    assert (job.limits, job.client_concurrency) == (None, 64)


def test_learned_weights_are_those_of_the_published_policy() -> None:
    job = PolicyTask(WINDOW, LEARNED, 0).job()
    assert (job.policy, job.weights) == ("gorgo", {"w_rtt": 0.276, "w_queue": 0.5})
    assert PolicyTask(WINDOW, "gorgo", 0).job().weights is None


@pytest.mark.parametrize(
    ("own", "first", "limit"), [(50, None, 50), (50, 20, 20), (50, 80, 50), (None, 20, 20), (None, None, None)]
)
def test_the_smaller_bound_of_requests_counts(own: int | None, first: int | None, limit: int | None) -> None:
    workload = Workload(name="w", traces=("t",), filters=TraceFilters(limit=own, spread_s=3.0)).first(first)
    assert PolicyTask(workload, "random", 0).job().filters == TraceFilters(limit=limit, spread_s=3.0)


@pytest.mark.parametrize(
    ("workload", "label"),
    [
        (WINDOW, "windows, load 0.8"),
        (WINDOW.at(2.0), "windows, load 0.5"),
        (WINDOW.under("killed"), "windows, load 0.8, killed"),
        (WINDOW.on("h100").under("killed"), "windows, load 0.8, h100, killed"),
    ],
)
def test_a_label_has_the_load_and_what_happens(workload: Workload, label: str) -> None:
    assert workload.label == label


def test_a_workload_with_few_seeds_takes_the_first_of_the_check() -> None:
    few = target(workloads=(replace(WINDOW, seeds=2),), policy="gorgo-ms", others=("gorgo",))
    assert [(task.policy, task.seed) for task in few.tasks(range(3, 9))] == [
        ("gorgo-ms", 3),
        ("gorgo-ms", 4),
        ("gorgo", 3),
        ("gorgo", 4),
    ]
