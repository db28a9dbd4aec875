from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.apps.learned_routers import variants
from gorgo.apps.learned_routers.comparison import PublishedRatio, RouterComparison
from gorgo.apps.learned_routers.groups import comparisons
from gorgo.apps.learned_routers.measure import RouterRun, measure
from gorgo.apps.learned_routers.variants import VARIANTS, Variant, find_variant
from gorgo.apps.learned_routers.workloads import sharing
from gorgo.apps.results import ResultRow
from gorgo.errors import UnknownPolicy
from gorgo.policies.learned.lodestar import Lodestar
from gorgo.sim.named_fleets import FLEETS

SMALL = RouterComparison(
    group="x",
    fleet="8xA30",
    traffic=sharing(0.5, requests=120, rate_per_s=8.0),
    against="least-request",
    variants=("gorgo-ms", "load-prefix 3:2:2"),
    stats={"mean TTFT": PublishedRatio(text="1.41", of="gorgo-ms", claim=1.41)},
    scrape_interval_s=1.0,
)


@pytest.fixture(scope="module")
def run() -> RouterRun:
    return measure(SMALL.task("gorgo-ms", 0))


def test_a_run_measures_what_comes_after_the_warm_up(run: RouterRun) -> None:
    assert (run.row.n, run.row.errors, run.row.policy) == (60, 0, "gorgo-ms")
    assert run.row.prediction_error_ratio is not None
    assert sum(run.fallbacks.values()) == 60
    assert set(run.replica_ttft_ms) == set(run.row.share)


def test_slices_cover_the_whole_run(run: RouterRun) -> None:
    full = [one for one in run.slices if one.n]
    assert sum(one.n for one in full) == 120
    assert all(one.hit is not None and one.best_hit is not None and one.hit <= one.best_hit for one in full)
    assert [one.begins_s for one in run.slices] == sorted(one.begins_s for one in run.slices)


def test_the_same_task_is_the_same_run_whatever_ran_before(run: RouterRun) -> None:
    assert replace(measure(SMALL.task("gorgo-ms", 0)), cpu_s=0.0) == replace(run, cpu_s=0.0)


def test_a_ratio_is_baseline_over_variant_so_that_more_is_better(run: RouterRun) -> None:
    slower = replace(run.row.ttft_ms, mean=3 * (run.row.ttft_ms.mean or 0.0))
    base = replace(run, row=replace(run.row, ttft_ms=slower))
    runs = {SMALL.task("gorgo-ms", 0): run, SMALL.task("least-request", 0): base}
    ours, other = SMALL.verdicts(runs, range(5))
    assert ours.value == pytest.approx(3.0)
    assert ours.labels == ("8xA30: 50% shared, 8/s, scrapes each 1 s", "gorgo-ms", "least-request", "mean TTFT", "1.41")
    assert other.value is None, "without a run there is no ratio"


def test_with_kv_events_a_run_is_another_one_and_a_prediction_counts_blocks_that_are_gone_no_more() -> None:
    turns = replace(SMALL, traffic=sharing(0.7, requests=400, rate_per_s=12.0), against="gorgo-ms", variants=())
    with_events = replace(turns, cache_reports="events")
    assert with_events.label == "8xA30: 70% shared, 12/s, scrapes each 1 s, KV events"
    tasks = [one.task("gorgo-ms", 0) for one in (turns, with_events)]
    assert tasks[0].key() != tasks[1].key()
    usage, events = (measure(task).row for task in tasks)

    def off(row: ResultRow) -> float:
        assert row.cache_hit is not None
        assert row.cache_hit_estimated is not None
        return abs(row.cache_hit_estimated - row.cache_hit)

    assert off(events) < off(usage)


def test_a_claim_is_made_for_this_project_s_learned_policy_alone() -> None:
    rows = replace(SMALL, variants=("gorgo-residual", "lodestar")).verdicts({}, ())
    assert {row.labels[1]: row.at_least for row in rows} == {"gorgo-residual": 1.41, "lodestar": None}


def test_a_comparison_asks_for_each_run_once() -> None:
    tasks = list(replace(SMALL, also=("gorgo-ms", "random")).tasks(range(2)))
    assert len(tasks) == len(set(tasks)) == 2 * 4
    assert {task.seed for task in tasks} == {0, 1}


def test_every_comparison_names_a_fleet_and_variants_that_there_are() -> None:
    for one in comparisons("trace.jsonl"):
        assert one.fleet in FLEETS
        for label in (one.against, *one.variants, *one.also):
            assert find_variant(label).make(), label


def test_published_systems_neither_queue_nor_hedge_and_a_label_says_where_both_are_on() -> None:
    published, ours = (
        find_variant(label).limits(block_tokens=64, stale_after_s=3.0, requests=10)
        for label in ("gorgo-ms", "gorgo-ms with queueing")
    )
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
    others = [replace(task, seed=1), replace(task, variant="gorgo-ms with queueing"), replace(task, fleet="7xL20")]
    assert len({task.key(), *(other.key() for other in others)}) == 4
    assert task.key() == SMALL.task("gorgo-ms", 0).key()


# -- what learns

LEARNING = replace(
    SMALL, traffic=sharing(0.5, requests=400, rate_per_s=8.0), against="lodestar, small", variants=("lodestar, stops",)
)
SETTINGS = (("first_samples", 80), ("round_samples", 100), ("epochs", 1), ("kind", "linear"))


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "lodestar, small": Variant(policy="lodestar", training=SETTINGS),
        "lodestar, stops": Variant(policy="lodestar", training=SETTINGS, trains_until=0.5),
    }
    monkeypatch.setattr(variants, "VARIANTS", {**VARIANTS, **made})


@pytest.mark.usefixtures("small_rounds")
def test_a_policy_that_learns_adopts_models_within_the_run_and_a_frozen_one_no_more_after_its_time() -> None:
    online, frozen = (measure(LEARNING.task(label, 0)) for label in ("lodestar, small", "lodestar, stops"))
    assert len(online.adopted_s) > len(frozen.adopted_s) > 0
    assert max(frozen.adopted_s) < 30.0 < max(online.adopted_s)
    assert "cold_start" not in online.fallbacks, "a model is there before the requests that are measured"


def test_a_model_from_another_fleet_decides_from_the_first_request_and_is_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run on the other fleet has settings of the policy's own: a model of a thousand samples."""
    small = Lodestar(replace(Lodestar().training, **dict(SETTINGS)))  # type: ignore[arg-type]
    monkeypatch.setattr(variants, "policy_of", lambda _: Lodestar(small.training))
    run = measure(LEARNING.task("lodestar, offline", 0))
    assert run.adopted_s == []
    assert sum(run.fallbacks.values()) == 200
    assert "cold_start" not in run.fallbacks


def test_a_shadow_s_order_is_compared_with_the_measured_one_and_the_shadow_learns() -> None:
    by_priors, learned = (
        measure(LEARNING.task(f"random, shadow {name}", 0)) for name in ("gorgo-ms", "predicted-latency")
    )
    assert by_priors.rho is not None
    assert learned.rho is not None
    assert by_priors.rho > 0.3
    assert learned.adopted_s


def test_a_run_without_a_shadow_has_no_order(run: RouterRun) -> None:
    assert run.rho is None


@pytest.mark.usefixtures("small_rounds")
def test_a_run_has_the_errors_of_its_models_over_time_and_what_each_round_came_to() -> None:
    found = measure(LEARNING.task("lodestar, small", 0))
    assert found.model_errors.n > 150
    assert 0.0 < (found.model_errors.ttft_mean or 0.0) < 10.0
    assert len(found.fitted) >= len(found.adopted_s)
    assert [one.samples for one in found.fitted] == sorted(one.samples for one in found.fitted)
    predicted = [one for one in found.slices if one.predicted_ttft_ms is not None]
    assert 10 <= len(predicted) < len(found.slices), "there is no model at first"
    assert all(one.modelled_ttft_ms is not None for one in predicted)
