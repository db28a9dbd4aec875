"""`gorgo` and `gorgo-ms`: terms, units, weights, and stalls of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.prefix.residency import SharedRuns
from gorgo.policies.gorgo import Gorgo
from gorgo.policies.gorgo_ms import (
    FEW_RUN,
    RISE_MAX,
    STALLED,
    WHOLE,
    GorgoMs,
    counted,
    counted_of_rows,
    excess,
    stall_ms,
)
from tests.policies.table import choose, request, rows_chosen, table


def test_cost_is_equation_3() -> None:
    candidates = table(2, rtt_s=[0.002, 0.1], in_flight_tokens=[3000, 0], cached=[0, 600])
    choice = choose(Gorgo(), candidates, w_rtt=0.5, w_queue=0.1)
    np.testing.assert_allclose(choice.terms["rtt"], [0.5 * 2, 0.5 * 100])
    np.testing.assert_allclose(choice.terms["queue"], [0.1 * 3000, 0])
    np.testing.assert_allclose(choice.terms["prefill"], [1000, 400])
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, [1 + 300 + 1000, 50 + 400])
    assert choice.row == 1


def test_start_weights_are_the_published_ones_and_the_box_holds_theirs() -> None:
    assert [(spec.name, spec.default, spec.low, spec.high) for spec in Gorgo.weight_specs] == [
        ("w_rtt", 0.5, 0.05, 200.0),
        ("w_queue", 0.1, 0.02, 5.0),
    ]
    assert Gorgo.index == "published"


def test_cold_replica_is_not_free() -> None:
    """A replica that has not answered a probe yet counts as far as the farthest known one."""
    choice = choose(Gorgo(), table(3, rtt_s=[np.nan, 0.05, 0.2]))
    assert choice.terms["rtt"][0] == choice.terms["rtt"][2]
    assert choice.row == 1


def test_a_warm_cache_far_away_beats_a_cold_one_nearby() -> None:
    assert choose(Gorgo(), table(2, rtt_s=[0.002, 0.18], cached=[0, 900])).row == 1


def test_a_long_queue_outweighs_a_warm_cache() -> None:
    candidates = table(2, rtt_s=[0.002, 0.002], cached=[1000, 0], in_flight_tokens=[20_000, 0])
    assert choose(Gorgo(), candidates).row == 1


def test_ties_go_to_the_fewest_in_flight_and_then_to_chance() -> None:
    assert rows_chosen(Gorgo(), table(3, in_flight_requests=[1, 0, 0])) == {1, 2}


#: Two replicas with the same prior: 10 ms and 1 ms a token, no attention.
PRIORS: dict[str, Any] = {
    "prefill_base_s": [0.010, 0.010],
    "prefill_token_s": [0.001, 0.001],
    "prefill_kappa_s": [0.0, 0.0],
    "slowdown": [1.0, 1.0],
    "drained_at_s": [-np.inf, -np.inf],
    "head_due_s": [np.inf, np.inf],
    "rtt_s": [0.002, 0.100],
}


def candidates(*, now: float = 100.0, cached: tuple[float, float] = (0, 0), **given: Any) -> Candidates:
    return replace(table(2, cached=list(cached), **{**PRIORS, **given}), now=now)


def chosen(rows: Candidates, **weights: Any) -> Choice:
    return choose(GorgoMs(), rows, asked=replace(request(), received_s=99.5), **weights)


def _runs(lengths: list[int], share: float) -> SharedRuns:
    """Runs of so many tokens, of each of which that share is worth something to others."""
    depths, worths = [float(sum(lengths))], [0.0]
    for length in lengths:
        depths.append(depths[-1] - length)
        worths.append(worths[-1] + share * length)
    return SharedRuns(depths, worths)


def test_cost_is_the_sum_of_times() -> None:
    rows = candidates(
        cached=(0, 600),
        prefill_kappa_s=[1e-6, 1e-6],
        slowdown=[1.0, 2.0],
        drained_at_s=[101.001, 0.0],
        in_flight_requests=[3, 1],
    )
    choice = chosen(rows, m_rtt=0.5, m_queue=2.0, **{"lambda": 0.1}, delta=7.0)
    prefill = [10 + 1000 + 1e-3 * 1000 * 500, 2 * (10 + 400 + 1e-3 * 400 * (600 + 200))]
    np.testing.assert_allclose(choice.terms["rtt"], [0.5 * 2, 0.5 * 100])
    np.testing.assert_allclose(choice.terms["queue"], [2 * 1000, 0])
    np.testing.assert_allclose(choice.terms["prefill"], prefill)
    np.testing.assert_allclose(choice.terms["externality"], [3 * (0.1 * prefill[0] + 7), 0.1 * prefill[1] + 7])
    assert choice.cost is not None
    np.testing.assert_allclose(choice.cost, sum(choice.terms.values()))


def test_what_a_full_pool_pushes_out_is_prefilled_again_as_far_as_prompts_are_found() -> None:
    """A prefill of 1,010 ms on a pool that is half full, where 80 % of prompt tokens are found."""
    rows = replace(candidates(cache_fill=[0.5, 0.0]), found_share=0.8)
    choice = chosen(rows)
    np.testing.assert_allclose(choice.terms["room"], [0.5 * 0.8 * 1010, 0.0])
    assert choice.row == 1, "404 ms more than 98 ms of distance"
    assert choice.predicted_ttft_s == pytest.approx(0.5 + 0.1 + 1.01), "no part of the prediction"


def test_a_copy_that_others_will_use_is_not_charged_unless_it_is_pushed_out_again() -> None:
    """Of 1,000 tokens the near replica has 800, which 60 others went on from: 60 / 62 of the copy is theirs."""
    shared = _runs([800], 60 / 62)
    rows = replace(candidates(cached=(800, 0), cache_fill=[1.0, 0.5]), shared=shared, found_share=0.4)
    terms = chosen(rows).terms
    np.testing.assert_allclose(terms["prefill"], [210, 1010])
    np.testing.assert_allclose(terms["room"], [0.4 * 210, 0.2 * 1010])
    np.testing.assert_allclose(terms["shared"], [0.0, -1010 * 0.8 * (800 * 60 / 62) / 1000], rtol=1e-6)


def test_sixty_sessions_with_one_system_prompt_leave_its_owner_when_it_has_work() -> None:
    """Without the term the owner wins by 800 ms of prefill; with it 0.1 s of work there suffice."""
    idle_s, busy_s = [-np.inf, -np.inf], [100.1, -np.inf]
    for drained_at_s, row in ((idle_s, 0), (busy_s, 1)):
        rows = candidates(cached=(800, 0), drained_at_s=drained_at_s, rtt_s=[0.002, 0.002])
        assert chosen(replace(rows, shared=_runs([800], 60 / 62))).row == row
        assert chosen(rows).row == 0


def test_a_prefill_stalls_the_running_batch_at_most() -> None:
    rows = candidates(in_flight_requests=[3, 90], max_running_requests=[12, 12])
    np.testing.assert_allclose(chosen(rows, delta=0.0).terms["externality"], [0.15 * 1010 * 3, 0.15 * 1010 * 12])
    unknown = candidates(in_flight_requests=[3, 12], max_running_requests=[np.nan, np.nan])
    np.testing.assert_allclose(chosen(unknown, delta=0.0).terms["externality"], [0.15 * 1010 * 3, 0.15 * 1010 * 12])


def test_where_many_are_in_flight_a_long_prompt_is_not_sent_far_for_a_few_less() -> None:
    """Of 40 and 37 in flight the three more are worth a fifth of what they are worth where few are."""
    rows = candidates(in_flight_requests=[40, 37])
    near, far = chosen(rows, delta=0.0).terms["externality"]
    np.testing.assert_allclose(near - far, 0.15 * 1010 * 3 * 8 / 38.5)
    np.testing.assert_allclose(near + far, 0.15 * 1010 * 77)
    assert chosen(rows, delta=0.0, m_rtt=2.0).row == 0
    assert chosen(candidates(in_flight_requests=[4, 1]), delta=0.0, m_rtt=2.0).row == 1


def test_a_replica_that_prefills_much_of_its_time_will_stall_this_request_too() -> None:
    """Shares of a half and a fifth, of now: 240 ms more than 98 ms of distance."""
    shares: dict[str, Any] = {"prefill_share": [0.5, 0.2], "prefill_share_s": [100.0, 100.0]}
    choice = chosen(candidates(**shares), **{"lambda": 0.1})
    np.testing.assert_allclose(choice.terms["externality"], [400.0, 160.0])
    assert choice.row == 1
    assert chosen(candidates(**shares), eta=0.0).row == 0
    assert choice.predicted_ttft_s == chosen(candidates(**shares, rtt_s=[0.3, 0.1])).predicted_ttft_s


def test_what_was_prefilled_long_ago_stalls_nobody() -> None:
    rows = candidates(prefill_share=[0.5, 0.2], prefill_share_s=[100.0 - 300.0, 100.0])
    near, far = chosen(rows).terms["externality"]
    assert near < 5.0
    np.testing.assert_allclose(far, 160.0)


def test_where_batches_are_large_stalls_to_come_count_for_less() -> None:
    """A mean of 8 in flight: half."""
    shares: dict[str, Any] = {"prefill_share": [0.5, 0.2], "prefill_share_s": [100.0, 100.0]}
    near, far = chosen(candidates(in_flight_requests=[8, 8], **shares), delta=0.0).terms["externality"]
    np.testing.assert_allclose(near - far, 0.5 * 240.0)


def test_prediction_is_network_work_and_prefill_without_their_factors_from_receipt_on() -> None:
    rows = candidates(drained_at_s=[100.501, 0.0], in_flight_requests=[0, 50])
    choice = chosen(rows, m_rtt=4.0, m_queue=0.5)
    assert choice.row == 0
    assert choice.predicted_ttft_s == pytest.approx(0.5 + 0.002 + 0.5 + 1.010)


def test_a_forecast_is_of_times_for_every_candidate_whatever_the_weights() -> None:
    """A second of work left when a request gets there, none on the other; prefills of 1.01 s and 0.41 s."""
    rows = candidates(cached=(0, 600), drained_at_s=[101.001, 0.0], in_flight_requests=[3, 1])
    choice = chosen(rows, m_rtt=4.0, m_queue=0.5, **{"lambda": 1.0}, delta=100.0)
    assert choice.prediction is not None
    forecast = choice.prediction()
    np.testing.assert_allclose(forecast.idle_s, [0.002 + 1.01, 0.1 + 0.41])
    np.testing.assert_allclose(forecast.backlog_s, [1.0, 0.0])
    np.testing.assert_allclose(forecast.prefill_s, [1.01, 0.41])


def test_any_candidate_can_be_asked_for_its_prediction() -> None:
    """Half a second at the proxy, then network, work and prefill of that one."""
    choice = chosen(candidates(cached=(0, 600), drained_at_s=[100.501, 0.0], rtt_s=[0.002, 0.1]))
    assert choice.predict is not None
    assert [choice.predict(row) for row in (0, 1)] == pytest.approx([0.5 + 0.002 + 0.5 + 1.01, 0.5 + 0.1 + 0.41])


def test_slower_decoding_is_not_priced_where_its_price_is_nothing() -> None:
    terms = chosen(candidates(in_flight_requests=[2, 1]), delta=0.0).terms
    np.testing.assert_allclose(terms["externality"], [0.15 * 1010 * 2, 0.15 * 1010])


@pytest.mark.parametrize(("head_due_s", "queue_ms"), [(99.6995, 0.0), (99.69, 2000 + 9), (99.2, 2000 + 499)])
def test_a_first_token_is_late_from_300_ms_on_by_the_time_it_could_be_seen(head_due_s: float, queue_ms: float) -> None:
    """Half a round trip of 2 ms passes before a token made by now is seen."""
    rows = candidates(drained_at_s=[99.0, 99.0], head_due_s=[head_due_s, np.inf], waiting_prefill_s=[2.0, 0.0])
    np.testing.assert_allclose(chosen(rows).terms["queue"], [queue_ms, 0.0], atol=1e-9)


def test_nothing_is_predicted_where_the_round_trip_is_unknown() -> None:
    choice = chosen(candidates(cached=(990, 0), rtt_s=[np.nan, 0.1]))
    assert choice.row == 0
    assert choice.predicted_ttft_s is None
    assert choice.terms["rtt"][0] == choice.terms["rtt"][1]


def test_a_busy_replica_may_be_free_by_the_time_that_a_request_gets_there() -> None:
    choice = chosen(candidates(drained_at_s=[100.040, 100.040]))
    np.testing.assert_allclose(choice.terms["queue"], [39, 0])


def test_a_large_body_is_priced_by_the_connection_that_it_would_get() -> None:
    rows = candidates(
        rtt_s=[0.1, 0.1],
        cwnd_bytes=[14_600, 114_600],
        rwnd_bytes=[131_070, 131_070],
        sent_s=[99.9, 99.9],
        drained_at_s=[100.300, 100.300],
    )
    asked = replace(request(), received_s=100.0, body_bytes=100_000)
    choice = choose(GorgoMs(), rows, asked=asked)
    np.testing.assert_allclose(choice.terms["rtt"], [300, 100])
    np.testing.assert_allclose(choice.terms["queue"], [50, 250])
    assert choice.predicted_ttft_s == pytest.approx(0.35 + 1.01)


def test_a_connection_yet_to_be_opened_costs_its_handshake() -> None:
    rows = candidates(rtt_s=[0.1, 0.1], cwnd_bytes=[0, 14_600], connect_round_trips=[2, 2])
    np.testing.assert_allclose(chosen(rows).terms["rtt"], [300, 100])


def test_a_stuck_replica_does_not_look_idle() -> None:
    """0.5 s late by the time its token could be seen: its 2 s of waiting work count, and what is beyond 300 ms."""
    rows = candidates(drained_at_s=[99.0, 99.0], head_due_s=[99.499, np.inf], waiting_prefill_s=[2.0, 0.0])
    choice = chosen(rows)
    np.testing.assert_allclose(choice.terms["queue"], [2000 + 200, 0])
    assert choice.row == 1


def test_the_prefills_before_a_request_begin_when_it_has_waited_for_memory() -> None:
    """3 s for memory, then the 2 s of work that are left, less half a round trip of 2 ms; a late token is no news."""
    rows = candidates(drained_at_s=[102.0, 102.0], head_due_s=[99.0, np.inf], waiting_prefill_s=[2.0, 0.0])
    rows = replace(rows, kv_wait_of_slots_s=np.array([3.0, 0.0]))
    np.testing.assert_allclose(chosen(rows).terms["queue"], [3000 + 2000 - 1, 2000 - 50])


def test_a_replica_a_little_late_is_not_stuck() -> None:
    rows = candidates(drained_at_s=[99.0, 99.0], head_due_s=[99.8, np.inf], waiting_prefill_s=[2.0, 0.0])
    np.testing.assert_allclose(chosen(rows).terms["queue"], [0, 0])


def test_a_prefill_is_dearer_where_more_requests_would_stall() -> None:
    near_and_busy = candidates(in_flight_requests=[5, 0])
    assert chosen(near_and_busy).row == 1
    assert chosen(candidates()).row == 0


def test_cold_replica_is_not_free_under_gorgo_ms() -> None:
    assert chosen(candidates(rtt_s=[np.nan, 0.1], in_flight_requests=[1, 0])).row == 1


def test_weights_and_their_boxes_are_those_of_the_design() -> None:
    assert [(spec.name, spec.default, spec.low, spec.high, spec.tunable) for spec in GorgoMs.weight_specs] == [
        ("m_rtt", 1.0, 0.25, 4.0, "yes"),
        ("m_queue", 1.0, 0.25, 4.0, "yes"),
        ("lambda", 0.15, 0.1, 1.0, "opt_in"),
        ("delta", 25.0, 0.0, 100.0, "no"),
        ("eta", 800.0, 0.0, 4000.0, "no"),
    ]
    assert GorgoMs.index == "events"


def test_ties_go_to_chance() -> None:
    assert rows_chosen(GorgoMs(), candidates(rtt_s=[0.1, 0.1])) == {0, 1}


def test_where_prefills_stall_many_at_any_time_a_prefill_costs_more_and_a_shorter_batch_less() -> None:
    """Six in flight and two thirds of the time in prefills stall four at any time: twice the bound."""
    busy: dict[str, Any] = {
        "in_flight_requests": [8, 4],
        "prefill_share": [2 / 3, 2 / 3],
        "prefill_share_s": [100.0] * 2,
    }
    near, far = chosen(candidates(cached=(0, 1000), **busy), eta=0.0).terms["externality"]
    np.testing.assert_allclose(near, 2 * 0.15 * 1010 * 8 + 25 / 2 * 8)
    np.testing.assert_allclose(far, 2 * 0.15 * 10 * 4 + 25 / 2 * 4)


def _cells(*values: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(st.one_of(*values), min_size=6, max_size=6)


@given(
    given_columns=st.fixed_dictionaries(
        {
            "rtt_s": _cells(st.floats(0.001, 0.3), st.just(np.nan)),
            "cwnd_bytes": _cells(st.floats(14_600, 2e6), st.sampled_from([0.0, np.nan])),
            "rwnd_bytes": _cells(st.floats(65_535, 2e6)),
            "sent_s": _cells(st.floats(0, 100), st.just(np.inf)),
            "connect_round_trips": _cells(st.sampled_from([1.0, 2.0])),
            "pace_bytes": _cells(st.just(np.inf)) | _cells(st.floats(0, 1e7), st.just(np.inf)),
            "burst_bytes": _cells(st.floats(0, 15_000), st.just(np.inf)),
            "drained_at_s": _cells(st.floats(99, 103), st.just(-np.inf)),
            "head_due_s": _cells(st.floats(95, 103), st.just(np.inf)),
            "waiting_prefill_s": _cells(st.floats(0, 5)),
            "slowdown": _cells(st.floats(0.1, 10)),
            "prefill_base_s": _cells(st.floats(0, 0.1)),
            "prefill_token_s": _cells(st.floats(1e-5, 1e-3)),
            "prefill_kappa_s": _cells(st.floats(0, 1e-8)),
            "prefill_share": _cells(st.floats(0, 2)),
            "prefill_share_s": _cells(st.floats(0, 100)),
            "in_flight_requests": _cells(st.integers(0, 60).map(float)),
            "max_running_requests": _cells(st.integers(1, 60).map(float), st.just(np.nan)),
            "cache_fill": _cells(st.floats(0, 1)),
        }
    ),
    cached=_cells(st.integers(0, 1000).map(float)),
    body_bytes=st.sampled_from([0, 500, 1_460, 2_000, 14_600, 20_000, 300_000]),
    runs=st.none() | st.builds(_runs, st.lists(st.integers(1, 300), min_size=1, max_size=3), st.floats(0.01, 0.99)),
    memory=st.none() | _cells(st.floats(0, 5), st.just(0.0)),
    slots=st.sampled_from([[0, 1, 2, 3, 4, 5], [1, 4], [3]]),
    delta=st.sampled_from([0.0, 50.0]),
    eta=st.sampled_from([0.0, 800.0]),
)
def test_a_few_candidates_row_by_row_have_the_very_values_of_columns(
    given_columns: dict[str, list[float]],
    cached: list[float],
    body_bytes: int,
    runs: SharedRuns | None,
    memory: list[float] | None,
    slots: list[int],
    delta: float,
    eta: float,
) -> None:
    width = max(slots) + 1
    columns: dict[str, Any] = {name: cells[:width] for name, cells in given_columns.items()}
    rows = replace(
        table(6, cached=cached[:width], slots=slots, **columns),
        now=100.0,
        shared=runs,
        found_share=0.7,
        kv_wait_of_slots_s=None if memory is None else np.array(memory[:width]),
    )
    asked = replace(request(), received_s=99.5, body_bytes=body_bytes)
    by_rows = choose(GorgoMs(), rows, asked=asked, delta=delta, eta=eta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gorgo.policies.gorgo_ms.FEW", 0)
        by_columns = choose(GorgoMs(), rows, asked=asked, delta=delta, eta=eta)
    assert {name: column.tolist() for name, column in by_rows.terms.items()} == {
        name: column.tolist() for name, column in by_columns.terms.items()
    }
    assert (by_rows.row, by_rows.predicted_ttft_s) == (by_columns.row, by_columns.predicted_ttft_s)
    assert by_rows.cost is not None
    assert by_columns.cost is not None
    assert by_rows.cost.tolist() == by_columns.cost.tolist()
    for one, other in zip(_parts(by_rows), _parts(by_columns), strict=True):
        assert one.tolist() == other.tolist()


def _parts(choice: Choice) -> tuple[np.ndarray[Any, Any], ...]:
    assert choice.prediction is not None
    predicted = choice.prediction()
    return predicted.idle_s, predicted.backlog_s, predicted.prefill_s


numbers = st.lists(st.integers(0, 500).map(float), min_size=1, max_size=12)


@given(numbers)
def test_rows_have_the_very_numbers_of_columns(given_numbers: list[float]) -> None:
    mean = sum(given_numbers) / len(given_numbers)
    assert counted_of_rows(given_numbers, mean) == counted(np.array(given_numbers), mean).tolist()


@given(numbers)
def test_the_mean_and_the_order_are_those_of_the_numbers(given_numbers: list[float]) -> None:
    found = counted(np.array(given_numbers), sum(given_numbers) / len(given_numbers))
    np.testing.assert_allclose(found.mean(), np.mean(given_numbers))
    assert (np.diff(found[np.argsort(given_numbers, kind="stable")]) >= -1e-9).all()


def test_up_to_a_mean_of_eight_every_difference_counts_in_full() -> None:
    assert counted(np.array([WHOLE - 8, WHOLE + 8]), WHOLE).tolist() == [0.0, 16.0]
    assert counted(np.array([4 * WHOLE - 8, 4 * WHOLE + 8]), 4 * WHOLE).tolist() == [30.0, 34.0]


@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_stalls_to_come_never_count_for_more_where_more_are_in_flight(fewer: float, more: float) -> None:
    fewer, more = sorted((fewer, more))
    assert stall_ms(1000.0, FEW_RUN) == 1000.0
    assert 0.0 <= stall_ms(1000.0, more) <= stall_ms(1000.0, fewer) <= 1000.0


means = st.tuples(st.floats(0.0, 500.0), st.floats(0.0, 3.0))


@given(means, means)
def test_prefills_never_cost_less_where_they_stall_more(one: tuple[float, float], other: tuple[float, float]) -> None:
    less, more = ([pick(pair) for pair in zip(one, other, strict=True)] for pick in (min, max))
    assert 1.0 <= excess(*less) <= excess(*more) <= RISE_MAX


@given(means)
def test_up_to_two_stalled_at_any_time_the_prices_are_as_given(given_means: tuple[float, float]) -> None:
    mean, share = given_means
    assert (excess(mean, share) > 1.0) == (mean * share > STALLED)
    assert excess(1.5 * STALLED, 1.0) == 1.5
