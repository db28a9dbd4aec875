"""What a policy gets and gives: candidates, ages of signals, tie-break, and weights in their box."""

from __future__ import annotations

from dataclasses import fields
from math import inf, nan
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.replica import Columns
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import (
    TIE_EPSILON,
    USUAL_SCRAPE_S,
    Candidates,
    Choice,
    Policy,
    Prediction,
    argmin_tiebreak,
    choose_min_cost,
    fill_unknown,
    least_of_rows,
    required_index,
    scrape_interval_s,
    signal_ages,
    slow_signals,
)
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.router import Router
from gorgo.errors import ConfigError, WeightsError
from gorgo.policies.registry import POLICIES, make_policy
from tests.core.routers import COMPLETED, a_request, dispatched, set_policy, specs, submitted
from tests.policies.table import request, table


def make(policy: str, shadow: str | None, *, seed: int = 0) -> Router:
    shadowing = None if shadow is None else make_policy(shadow)
    router = Router(
        specs("a", "b", "c"), make_policy(policy), rng=np.random.default_rng(seed), boot_id="boot", shadow=shadowing
    )
    for rank, name in enumerate("abc"):
        router.replicas.on_probe(name, 0.1 * (rank + 1), now=0.0)
    return router


def asked(number: int) -> RouteRequest:
    return a_request(f"r{number}", prompt_tokens=1000, received_s=float(number))


def test_rank_is_the_place_of_the_chosen_replica_in_the_shadows_order() -> None:
    router = make("round-robin", "nearest")
    decisions = [dispatched(submitted(router, asked(number), now=float(number))).decision for number in range(3)]
    scores = [decision.shadow for decision in decisions]
    assert [(decision.replica, score and score.rank) for decision, score in zip(decisions, scores, strict=True)] == [
        ("a", 1),
        ("b", 2),
        ("c", 3),
    ]
    assert [score and score.cost for score in scores] == pytest.approx([100.0, 200.0, 300.0])
    assert decisions[1].as_dict()["shadow"] == {
        "policy": "nearest",
        "rank": 2,
        "cost": pytest.approx(200.0),
        "predicted_ttft_ms": None,
    }


def test_replicas_that_cost_the_same_have_the_least_rank_of_them() -> None:
    router = make("round-robin", "least-request")
    first = dispatched(submitted(router, asked(0), now=0.0)).decision.shadow
    second = dispatched(submitted(router, asked(1), now=1.0)).decision.shadow
    assert first is not None
    assert second is not None
    assert (first.rank, second.rank) == (1, 1)


def test_a_shadow_changes_no_decision_and_draws_nothing() -> None:
    alone, watched = make("random", None, seed=3), make("random", "gorgo-ms", seed=3)
    for number in range(50):
        routes = [
            dispatched(submitted(router, asked(number), now=float(number))).replica for router in (alone, watched)
        ]
        assert routes[0] == routes[1]


def test_a_sample_has_what_the_shadow_predicted_for_the_replica_that_was_chosen() -> None:
    router = make("round-robin", "gorgo-ms")
    for number in range(3):
        attempt = dispatched(submitted(router, asked(number), now=float(number))).attempt_id
        router.on_first_token(attempt, now=number + 0.5)
        router.on_finish(attempt, COMPLETED, now=number + 0.9)
    rows = router.samples.after(0)["samples"]
    assert [row["shadow_policy"] for row in rows] == ["gorgo-ms"] * 3
    assert [row["shadow_rank"] for row in rows] == [1, 2, 3]
    assert rows[2]["shadow_predicted_ttft_ms"] > 300.0
    assert rows[0]["shadow_cost"] < rows[2]["shadow_cost"]


def test_one_candidate_has_no_rank() -> None:
    router = make("random", "nearest")
    router.replicas.drain("a", now=0.0)
    router.replicas.drain("b", now=0.0)
    score = dispatched(submitted(router, asked(0), now=0.0)).decision.shadow
    assert score is not None
    assert score.rank is None
    assert score.cost == pytest.approx(300.0)


def test_a_policy_without_a_cost_is_no_shadow() -> None:
    with pytest.raises(ConfigError, match="'random' has no cost"):
        make("nearest", "random")


def test_the_index_is_the_shadows_where_the_policy_reads_none() -> None:
    assert make("random", "gorgo-ms").index.bounded
    assert not make("random", "gorgo").index.bounded
    assert not make("random", None).index.bounded
    assert make("gorgo-ms", "nearest").index.bounded


def test_two_policies_that_read_different_indexes_are_refused_and_nothing_changes() -> None:
    with pytest.raises(ConfigError, match="'gorgo' the published one, 'gorgo-ms' the events one"):
        make("gorgo", "gorgo-ms")
    router = make("random", "gorgo-ms")
    with pytest.raises(ConfigError):
        set_policy(router, "prefix-cache")
    with pytest.raises(ConfigError):
        make("gorgo", None).settings.set_shadow(make_policy("gorgo-ms"), now=0.0)
    assert (router.settings.policy.name, router.settings.weights.version, router.index.bounded) == ("random", 1, True)


def test_a_shadow_can_be_set_and_taken_away_while_requests_come() -> None:
    router = make("random", None)
    router.settings.set_shadow(make_policy("gorgo-ms"), now=0.0)
    assert dispatched(submitted(router, asked(0), now=0.0)).decision.shadow is not None
    assert (router.settings.shadow and router.settings.shadow.name, router.index.bounded) == ("gorgo-ms", True)
    router.settings.set_shadow(None, now=0.0)
    assert dispatched(submitted(router, asked(1), now=0.0)).decision.shadow is None
    assert (router.settings.shadow, router.index.bounded) == (None, False)


def test_a_policy_that_reads_no_index_goes_with_any() -> None:
    assert required_index(make_policy("gorgo"), make_policy("nearest")) == "published"
    assert required_index(make_policy("nearest"), make_policy("gorgo-ms")) == "events"


# --- What a policy reads of its candidates: the fleet's own columns where all are candidates, else a row for each.


NAMES = tuple(item.name for item in fields(Columns))


def columns() -> Columns:
    """Column n of replica k holds 100 n + k."""
    made = Columns.empty()
    for _ in range(4):
        made.grow()
    for number, name in enumerate(NAMES):
        for slot in range(4):
            getattr(made, name)[slot] = 100 * number + slot
    return made


def candidates(*slots: int) -> Candidates:
    matched = np.array([0.0, 40.0, 80.0, 120.0])
    names = tuple(f"r{slot}" for slot in slots)
    return Candidates(np.array(slots, dtype=np.intp), names, columns(), matched, 200, is_all=slots == (0, 1, 2, 3))


def test_a_column_of_some_replicas_has_their_rows_alone() -> None:
    some = candidates(1, 3)
    expected = {name: [100 * number + 1, 100 * number + 3] for number, name in enumerate(NAMES)}
    assert {name: getattr(some, name).tolist() for name in NAMES} == expected
    assert {name: getattr(some, name).tolist() for name in NAMES} == expected, "and so at the second reading"


def test_a_column_of_all_replicas_is_the_fleet_s_own() -> None:
    everyone = candidates(0, 1, 2, 3)
    assert [name for name in NAMES if getattr(everyone, name) is not getattr(everyone.columns, name)] == []


@pytest.mark.parametrize("slots", [(1, 3), (0, 1, 2, 3), (2,)])
def test_uncached_tokens_are_the_rest_of_the_prompt(slots: tuple[int, ...]) -> None:
    some = candidates(*slots)
    assert len(some) == len(slots)
    assert some.cached_tokens.tolist() == [40.0 * slot for slot in slots]
    assert some.uncached_tokens.tolist() == [200.0 - 40.0 * slot for slot in slots]


def test_a_new_slot_is_empty_and_an_old_one_can_be_emptied() -> None:
    made = Columns.empty()
    made.grow()
    empty = {name: float(getattr(made, name)[0]) for name in NAMES}
    unknown = {name for name, value in empty.items() if value != value}
    assert unknown == {
        *("rtt_s", "running_requests", "queued_requests", "used_tokens", "kv_capacity_tokens", "max_running_requests"),
        *("cwnd_bytes", "rwnd_bytes", "sent_s", "sampled_s", "token_gap_s", "accelerator", "slo_tpot_s"),
        *("uncached_prefill_tokens", "decoding_requests", "first_tokens_s"),
    }
    assert {name: value for name, value in empty.items() if name not in unknown} == {
        **dict.fromkeys(("in_flight_requests", "in_flight_tokens", "queued_prefill_tokens", "waiting_prefill_s"), 0.0),
        **dict.fromkeys(("prefill_base_s", "prefill_token_s", "prefill_kappa_s", "salt", "cache_fill"), 0.0),
        **{"slowdown": 1.0, "connect_round_trips": 1.0},
        **dict.fromkeys(("drained_at_s", "head_began_s"), -np.inf),
        **dict.fromkeys(("shared_s", "head_shared_s", "prefill_share", "prefill_share_s"), 0.0),
        **dict.fromkeys(("head_due_s", "pace_bytes", "burst_bytes"), np.inf),
    }
    full = columns()
    full.clear(2)
    for number, name in enumerate(NAMES):
        assert getattr(full, name)[2] == pytest.approx(empty[name], nan_ok=True)
        assert getattr(full, name)[[0, 1, 3]].tolist() == [100 * number, 100 * number + 1, 100 * number + 3]


# --- The tie-break by rows beside the one by columns.


COSTS = ([3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [2.0, 1.0, 1.0 + TIE_EPSILON / 2, 1.0], [0.0], [1.0, 1.0 + 3 * TIE_EPSILON])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("costs", COSTS)
def test_rows_choose_as_columns_do_and_draw_as_often(costs: list[float], seed: int) -> None:
    in_flight = np.random.default_rng(seed).integers(0, 3, len(costs)).astype(float)
    by_rows, by_columns = np.random.default_rng(seed), np.random.default_rng(seed)
    row = least_of_rows(costs, min(costs), in_flight, by_rows)
    assert row == argmin_tiebreak(np.array(costs), in_flight, by_columns)
    assert by_rows.bit_generator.state == by_columns.bit_generator.state


def test_unknown_is_taken_as_the_worst_known() -> None:
    np.testing.assert_array_equal(fill_unknown(np.array([1.0, nan, 3.0])), [1, 3, 3])


def test_all_unknown_drops_out() -> None:
    np.testing.assert_array_equal(fill_unknown(np.array([nan, nan])), [0, 0])


def test_the_least_sum_of_all_terms_is_chosen_with_what_is_predicted_there() -> None:
    columns = Columns.empty()
    for _ in range(3):
        columns.grow()
    candidates = Candidates(np.arange(3), ("a", "b", "c"), columns, np.zeros(3), 100, is_all=True)
    terms = {"one": np.array([1.0, 5.0, 3.0]), "two": np.array([6.0, 1.0, 3.0]), "three": np.array([0.0, 0.5, 1.0])}

    def chosen(**more: Any) -> Choice:
        return choose_min_cost(terms, candidates, np.random.default_rng(0), **more)

    assert chosen().cost is not None
    np.testing.assert_array_equal(chosen().cost, [7.0, 6.5, 7.0])
    assert (chosen().row, chosen().terms, chosen().fallback, chosen().predicted_ttft_s) == (1, terms, None, None)
    by_row = chosen(predicted_ttft_s=lambda row: 10.0 + row, fallback="why")
    assert (by_row.predicted_ttft_s, by_row.fallback) == (11.0, "why")
    by_column = chosen(predicted_ttft_s=np.array([nan, 0.5, 0.7]))
    assert by_column.predict is not None
    assert (by_column.predicted_ttft_s, by_column.predict(2), by_column.predict(0)) == (0.5, 0.7, None)
    forecast = Prediction(np.zeros(3), np.zeros(3), np.zeros(3))
    assert chosen(forecast=lambda: forecast).prediction() is forecast  # type: ignore[misc]  # it was given


def test_equal_costs_go_to_the_fewest_in_flight() -> None:
    columns = Columns.empty()
    for _ in range(2):
        columns.grow()
    columns.in_flight_requests[0] = 1.0
    candidates = Candidates(np.arange(2), ("a", "b"), columns, np.zeros(2), 100, is_all=True)
    rows = {choose_min_cost({"x": np.ones(2)}, candidates, np.random.default_rng(seed)).row for seed in range(20)}
    assert rows == {1}


def test_known_columns_are_passed_on_as_they_are() -> None:
    column = np.array([1.0, 2.0])
    assert fill_unknown(column) is column


# --- How old a scraped signal may be, by what policies declare.


#: Columns that change from scrape to scrape; sizes of pools and slots do not.
SCRAPED = ("running_requests", "queued_requests", "used_tokens", "sampled_s")


class Watched:
    """The fleet's columns, with those of scrapes that were read."""

    def __init__(self, columns: object) -> None:
        self._columns = columns
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> object:
        if name in SCRAPED:
            self.read.add(name)
        return getattr(self._columns, name)


def read_by(policy: Policy) -> set[str]:
    made = table(3, running_requests=[1, 2, 3], queued_requests=[0, 1, 2], used_tokens=[5, 6, 7], cached=[64, 0, 0])
    watched = Watched(made.columns)
    candidates = Candidates(made.slots, made.names, watched, made.matched_tokens, 640, is_all=True)  # type: ignore[arg-type]
    policy.choose(request(), candidates, Weights.of(policy.weight_specs), np.random.default_rng(0))
    return watched.read


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_declares_an_age_of_every_scraped_signal_that_it_reads(name: str) -> None:
    policy = make_policy(name)
    assert read_by(policy) <= signal_ages(policy).keys()


def test_the_least_age_of_policy_and_shadow_counts_and_a_setting_goes_before() -> None:
    plain, fresh = make_policy("round-robin"), make_policy("load-prefix")
    assert scrape_interval_s(None, plain) == scrape_interval_s(None, plain, None) == USUAL_SCRAPE_S
    assert scrape_interval_s(None, make_policy("least-load")) == USUAL_SCRAPE_S
    assert scrape_interval_s(None, plain, fresh) == scrape_interval_s(None, fresh) == 1.0
    assert scrape_interval_s(30.0, fresh) == 30.0


def test_signals_that_a_setting_makes_too_old_are_named() -> None:
    fresh = make_policy("predicted-latency")
    assert slow_signals(30.0, fresh) == {"queued_requests": 1.0, "used_tokens": 1.0}
    assert slow_signals(1.0, fresh) == slow_signals(600.0, make_policy("random")) == {}


# --- Values in their box, and outside it only on purpose.


SPECS = (WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms of RTT"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token"))


@pytest.mark.parametrize("value", [0.04, 2.1, -1.0, nan, inf])
def test_value_outside_its_box_is_refused(value: float) -> None:
    with pytest.raises(WeightsError, match=r"'w_rtt' is .*; expected a number in \[0.05, 2\]"):
        Weights.of(SPECS, {"w_rtt": value})


def test_a_value_may_lie_on_either_edge_of_its_box() -> None:
    for value in (0.05, 2.0):
        weights = Weights.of(SPECS, {"w_rtt": value}, version=7)
        assert (weights["w_rtt"], weights.version, weights.out_of_range(SPECS)) == (value, 7, ())
    assert Weights.of(SPECS, {"w_rtt": 2.01}, allow_out_of_range=True).out_of_range(SPECS) == ("w_rtt",)
    assert Weights.of(SPECS).version == 0


def test_a_set_of_weights_is_a_mapping_of_its_values() -> None:
    weights = Weights.of(SPECS)
    assert (len(weights), list(weights), "w_rtt" in weights, weights.get("nope")) == (
        2,
        ["w_rtt", "w_queue"],
        True,
        None,
    )


def test_a_change_may_widen_the_box_too() -> None:
    assert Weights.of(SPECS).changed(SPECS, {"w_rtt": 9.0}, allow_out_of_range=True)["w_rtt"] == 9.0


def test_widened_box_takes_any_value_that_keeps_the_cost_positive() -> None:
    weights = Weights.of(SPECS, {"w_rtt": 0.0, "w_queue": 30.0}, allow_out_of_range=True)
    assert dict(weights) == {"w_rtt": 0.0, "w_queue": 30.0}
    assert weights.out_of_range(SPECS) == ("w_rtt", "w_queue")
    assert Weights.of(SPECS).out_of_range(SPECS) == ()


@pytest.mark.parametrize("value", [-1.0, nan, inf])
def test_widened_box_takes_no_value_that_is_no_cost(value: float) -> None:
    with pytest.raises(WeightsError, match="expected a number of 0 or more"):
        Weights.of(SPECS, {"w_rtt": value}, allow_out_of_range=True)


def test_unknown_weight_is_refused_whatever_the_box() -> None:
    with pytest.raises(WeightsError, match="it has: w_rtt, w_queue"):
        Weights.of(SPECS, {"w_rt": 1.0}, allow_out_of_range=True)


def test_change_leaves_what_it_does_not_name_even_outside_the_box() -> None:
    widened = Weights.of(SPECS, {"w_rtt": 9.0}, version=4, allow_out_of_range=True)
    changed = widened.changed(SPECS, {"w_queue": 0.2})
    assert (changed.version, dict(changed)) == (5, {"w_rtt": 9.0, "w_queue": 0.2})
    with pytest.raises(WeightsError):
        widened.changed(SPECS, {"w_rtt": 8.0})
