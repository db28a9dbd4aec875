"""A Router with a policy that learns: features, rows of outcomes, what attempts leave for a training, and the
adopted model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec, accelerator_code
from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.core.messages.actions import Hedge
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.core.router import Router
from gorgo.core.training.candidate_table import FEATURES, GROUP_BLOCKS, feature_table, prefix_group
from gorgo.core.training.learning import Learner
from gorgo.core.training.outcomes import OutcomeRing, OutcomeRow, TrainingRows
from gorgo.errors import ConfigError
from gorgo.policies.registry import make_policy
from tests.core.learners import NAMES, LeastPredicted, LinearModel
from tests.core.routers import GONE, a_request, blocks_of, dispatched, finished, specs, submitted
from tests.policies.table import request, table


def test_a_table_has_a_row_per_candidate_and_a_column_per_name() -> None:
    candidates = table(3, cached=[0, 250, 1000], in_flight_requests=[1, 2, 3])
    made = feature_table(("prompt_tokens", "uncached_tokens", "hit_share", "in_flight_requests"), request(), candidates)
    assert made.dtype == np.float32
    assert made.tolist() == [[1000, 1000, 0, 1], [1000, 750, 0.25, 2], [1000, 0, 1, 3]]


def test_an_unknown_cell_is_the_worst_known_one_and_0_where_none_is_known() -> None:
    candidates = table(3, rtt_s=[0.1, nan, 0.3], used_tokens=[nan, nan, nan])
    made = feature_table(("rtt_s", "kv_usage", "scrape_age_s", "is_queued"), request(), candidates)
    np.testing.assert_allclose(made, [[0.1, 0, 0, 0], [0.3, 0, 0, 0], [0.3, 0, 0, 0]], rtol=1e-6)


def test_every_feature_of_an_empty_table_of_any_size_is_a_finite_number() -> None:
    for rows in (1, 3):
        for prompt_tokens in (0, 1000):
            candidates = table(rows, prompt_tokens=prompt_tokens)
            made = feature_table((*FEATURES, "accelerator=A30"), request(prompt_tokens=prompt_tokens), candidates)
            assert made.shape == (rows, len(FEATURES) + 1)
            assert np.isfinite(made).all()


def test_quarters_of_the_hit_are_0_to_3() -> None:
    candidates = table(5, cached=[0, 249, 250, 750, 1000])
    assert feature_table(("hit_quarter",), request(), candidates)[:, 0].tolist() == [0, 0, 1, 3, 3]


def test_counts_by_the_router_are_split_by_the_first_token() -> None:
    candidates = table(
        2, in_flight_requests=[3, 5], decoding_requests=[1, 5], queued_prefill_tokens=[900, 0],
        uncached_prefill_tokens=[300, 0],
    )  # fmt: skip
    names = ("prefilling_requests", "decoding_requests", "prefill_tokens", "uncached_prefill_tokens")
    assert feature_table(names, request(), candidates).tolist() == [[2, 1, 900, 300], [0, 5, 0, 0]]


@pytest.mark.parametrize("name", ["L40S", "2xL40S", "8 x l40s", "NVIDIA-L40S", "nvidia L40S-48GB"])
def test_a_one_hot_knows_an_accelerator_whatever_its_number_and_maker(name: str) -> None:
    codes = [accelerator_code(name), accelerator_code("L40"), nan]
    made = feature_table(("accelerator=L40S",), request(), table(3, accelerator=codes))
    assert made.ravel().tolist() == [1.0, 0.0, 0.0]


def test_a_one_hot_is_1_on_replicas_of_that_accelerator_alone() -> None:
    codes = [accelerator_code("A30"), accelerator_code("V100"), nan]
    made = feature_table(("accelerator=A30", "accelerator=V100"), request(), table(3, accelerator=codes))
    assert made.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_a_name_that_is_no_feature_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no feature named 'kv_use' .*'kv_usage'.*; there are: prompt_tokens, "):
        feature_table(("kv_use",), request(), table(1))


def test_a_prefix_group_is_that_of_all_prompts_with_the_same_first_blocks() -> None:
    shared = list(range(1, GROUP_BLOCKS + 1))
    one, other = (a_request("r", prompt_tokens=2000, blocks=blocks_of(*shared, last)) for last in (77, 88))
    apart = a_request("r", prompt_tokens=2000, blocks=blocks_of(9, *shared))
    assert prefix_group(one) == prefix_group(other) != prefix_group(apart)
    assert prefix_group(a_request("r", prompt_tokens=10, blocks=b"")) == 0
    assert prefix_group(one, depth=11) != prefix_group(other, depth=11)


def test_a_decode_step_is_the_learned_gap_at_the_number_that_decodes_and_0_where_none_does() -> None:
    candidates = table(3, decoding_requests=[0, 16, 16], token_gap_s=[0.01, 0.02, nan])
    made = feature_table(("decode_step_s",), request(), candidates)[:, 0]
    assert made == pytest.approx([0.0, 0.04, 0.04])


def test_kv_tokens_are_short_by_what_waits_and_the_prompt_less_what_is_free() -> None:
    candidates = table(
        4, cached=[0, 0, 900, 0], kv_capacity_tokens=[5000, 5000, 5000, nan], used_tokens=[4500, 1000, 4500, 0],
        uncached_prefill_tokens=[700, 700, 300, 0],
    )  # fmt: skip
    made = feature_table(("kv_short_tokens",), request(), candidates)[:, 0]
    assert made.tolist() == [1200, 0, 0, 1200]


NAMES_OUTCOMES = ("prompt_tokens", "rtt_s")


def filled(rows: int, *, capacity: int = 8) -> OutcomeRing:
    """Row n was dispatched at second n and has n and -n as features."""
    ring = OutcomeRing(NAMES_OUTCOMES, capacity)
    for number in range(rows):
        row = OutcomeRow(
            float(number), ttft_s=0.5, e2e_s=1.0, prompt_tokens=7.0, slot=number % 3, censored=number % 2 == 1,
            tpot_s=0.01, output_tokens=4.0, cached_tokens=nan, group=-number,
        )  # fmt: skip
        ring.append(np.array([number, -number], dtype=np.float32), row)
    return ring


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 29])
def test_a_reader_gets_every_stored_row_once_in_order(rows: int) -> None:
    ring, read = filled(rows), []
    ring.check()
    seq = 0
    while seq < ring.next_seq:
        part = ring.since(seq, limit=3)
        read += part.dispatched_s.tolist()
        seq = part.first_seq + len(part)
    assert read == list(range(max(0, rows - 8), rows))
    assert (ring.next_seq, ring.first_seq, len(ring)) == (rows, max(0, rows - 8), min(rows, 8))


def test_a_reader_that_lags_finds_the_gap_and_one_that_is_ahead_gets_nothing() -> None:
    ring = filled(20)
    assert ring.since(3).first_seq == 12
    late = ring.since(99)
    assert (len(late), late.first_seq) == (0, 20)


def test_rows_that_were_read_do_not_change_with_the_ring() -> None:
    ring = filled(8)
    rows = ring.since(0)
    ring.append(np.zeros(2), OutcomeRow(9.0, 0.1, 0.2, 3.0, slot=0, censored=False))
    assert rows.dispatched_s[0] == 0.0
    assert rows.features[5].tolist() == [5.0, -5.0]
    assert (rows.slots[5], rows.censored[5], rows.groups[5], rows.output_tokens[5]) == (2, True, -5, 4.0)
    assert np.isnan(rows.cached_tokens).all()


def test_parts_of_rows_can_be_selected_and_joined() -> None:
    rows = filled(6).since(0)
    later = rows.select(slice(4, None))
    assert (later.first_seq, later.dispatched_s.tolist()) == (4, [4.0, 5.0])
    joined = TrainingRows.concat([later, rows.select(np.array([0, 2])), rows.select(rows.censored)])
    assert joined.dispatched_s.tolist() == [4.0, 5.0, 0.0, 2.0, 1.0, 3.0, 5.0]
    assert joined.features[:, 1].tolist() == [-4.0, -5.0, 0.0, -2.0, -1.0, -3.0, -5.0]


def test_parts_of_other_features_are_not_joined() -> None:
    with pytest.raises(AssertionError, match="the same features"):
        TrainingRows.concat([filled(2).since(0), TrainingRows.empty(("rtt_s", "prompt_tokens"))])


@pytest.mark.parametrize("later", [0, 3, 9])
@pytest.mark.parametrize("saved", [0, 5, 8])
def test_outcomes_of_a_former_process_come_before_those_since(saved: int, later: int) -> None:
    before = filled(20 + saved).since(20)
    ring = filled(later)
    since = ring.since(0).dispatched_s.tolist()
    ring.restore(before)
    ring.check()
    expected = [*before.dispatched_s.tolist(), *since][-8:]
    assert ring.since(0).dispatched_s.tolist() == expected
    assert ring.next_seq == before.first_seq + len(before) + min(later, 8)
    ring.append(np.zeros(2), OutcomeRow(99.0, 0.1, 0.2, 3.0, slot=0, censored=False, unstreamed=True))
    newest = ring.since(ring.next_seq - 1)
    assert (newest.dispatched_s.tolist(), newest.unstreamed.tolist()) == ([99.0], [True])


@pytest.mark.parametrize("more", [0, 3, 8, 11])
@pytest.mark.parametrize("rows", [0, 5, 20])
def test_outcomes_of_another_worker_come_behind_the_own_ones(rows: int, more: int) -> None:
    ring, twin = filled(rows), filled(rows)
    added = filled(more, capacity=16).since(0)
    ring.extend(added)
    for number in range(max(0, more - 8), more):
        part = added.select(slice(number, number + 1))
        dispatched_s, ttft_s, e2e_s, tokens = (
            float(column[0]) for column in (part.dispatched_s, part.ttft_s, part.e2e_s, part.prompt_tokens)
        )
        slot, censored = int(part.slots[0]), bool(part.censored[0])
        row = OutcomeRow(dispatched_s, ttft_s, e2e_s, tokens, slot=slot, censored=censored)
        twin.append(part.features[0], row)
    ring.check()
    assert ring.since(0).dispatched_s.tolist() == twin.since(0).dispatched_s.tolist()
    assert ring.since(0).features.tolist() == twin.since(0).features.tolist()
    assert (ring.next_seq, len(ring)) == (twin.next_seq, len(twin))
    ring.extend(TrainingRows.empty(("rtt_s",), 2))
    assert ring.next_seq == twin.next_seq, "of another policy"


def test_outcomes_of_other_features_are_refused() -> None:
    with pytest.raises(ConfigError, match="outcomes of features rtt_s; expected prompt_tokens, rtt_s"):
        filled(3).restore(TrainingRows.empty(("rtt_s",), 2))


# --- A Router with a policy that learns: what its attempts leave for a training, and the model that it adopts.


ANSWERED = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=1010, cached_tokens=64, output_tokens=11)
FAILED = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=None, error="disconnected")


def make(
    policy: Policy | None = None,
    *,
    shadow: Policy | None = None,
    limits: RouterLimits | None = None,
    replicas: Sequence[ReplicaSpec] | None = None,
) -> Router:
    router = Router(
        replicas or specs("a", "b"), policy or LeastPredicted(), rng=np.random.default_rng(0), boot_id="boot",
        limits=limits or RouterLimits(), shadow=shadow,
    )  # fmt: skip
    for rank, name in enumerate("ab"):
        router.replicas.on_probe(name, 0.1 * (rank + 1), now=0.0)
    return router


def rows_of(router: Router) -> TrainingRows:
    assert router.learning.outcomes is not None
    router.learning.outcomes.check()
    return router.learning.outcomes.since(0)


def test_an_answer_leaves_a_row_with_the_times_from_its_dispatch() -> None:
    router = make()
    request = a_request("r", prompt_tokens=1000, received_s=1.0, blocks=blocks_of(1, 2))
    dispatch = dispatched(submitted(router, request, now=3.0))
    router.on_first_token(dispatch.attempt_id, now=3.5)
    finished(router, dispatch.attempt_id, ANSWERED, now=4.5)
    rows = rows_of(router)
    assert (rows.dispatched_s[0], rows.ttft_s[0], rows.e2e_s[0]) == (3.0, 0.5, 1.5)
    assert rows.tpot_s[0] == pytest.approx(0.1)
    assert (rows.output_tokens[0], rows.cached_tokens[0], rows.prompt_tokens[0]) == (11, 64, 1010)
    assert not rows.censored[0]
    assert rows.groups[0] != 0
    assert rows.names == NAMES == dispatch.decision.feature_names
    assert dispatch.decision.features is not None
    assert rows.features[0].tolist() == dispatch.decision.features[dispatch.decision.row].tolist()


def test_features_are_those_of_the_decision_whatever_has_changed_by_the_end() -> None:
    router = make(replicas=specs("a"))
    ids = []
    for number in range(3):
        request = a_request(f"r{number}", prompt_tokens=100 * number, received_s=0.0)
        ids.append(dispatched(submitted(router, request, now=float(number))).attempt_id)
    for attempt_id in reversed(ids):
        router.on_first_token(attempt_id, now=9.0)
        finished(router, attempt_id, ANSWERED, now=10.0)
    rows = rows_of(router)
    assert rows.features[:, 2].tolist() == [2.0, 1.0, 0.0]
    assert rows.ttft_s.tolist() == [7.0, 8.0, 9.0]


def test_a_failed_attempt_leaves_a_censored_row_and_its_retry_one_that_begins_anew() -> None:
    router = make()
    first = dispatched(submitted(router, a_request("r", prompt_tokens=10, received_s=0.0), now=1.0))
    again = dispatched(finished(router, first.attempt_id, FAILED, now=4.0))
    router.on_first_token(again.attempt_id, now=4.25)
    finished(router, again.attempt_id, ANSWERED, now=5.0)
    rows = rows_of(router)
    assert rows.censored.tolist() == [True, False]
    assert rows.ttft_s.tolist() == [3.0, 0.25]
    assert sorted(rows.slots.tolist()) == [0, 1]
    assert np.isnan(rows.tpot_s[0])


def test_the_slower_attempt_of_a_hedge_leaves_a_censored_row() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, delay_s=0.1))
    router = make(make_policy("gorgo-ms"), shadow=LeastPredicted(), limits=limits)
    first = dispatched(submitted(router, a_request("r", prompt_tokens=10, received_s=0.0), now=0.0))
    (hedge,) = router.handle_timer(now=5.0)
    assert isinstance(hedge, Hedge)
    second = hedge.dispatch
    router.on_first_token(second.attempt_id, now=5.5)
    finished(router, first.attempt_id, Outcome(AttemptResult.SUPERSEDED), now=5.75)
    finished(router, second.attempt_id, ANSWERED, now=7.0)
    rows = rows_of(router)
    assert rows.censored.tolist() == [True, False]
    assert rows.ttft_s.tolist() == [5.75, 0.5]


@pytest.mark.parametrize(
    ("outcome", "streamed"),
    [
        (ANSWERED, True),
        (Outcome(AttemptResult.UPSTREAM_4XX, 400), True),
        (Outcome(AttemptResult.UPSTREAM_4XX, 400), False),
    ],
)
def test_an_end_that_is_no_bound_of_a_first_token_leaves_no_row(outcome: Outcome, streamed: bool) -> None:
    """A stream without content, a request that is wrong."""
    router = make(replicas=specs("a"))
    request = a_request("r", prompt_tokens=10, received_s=0.0, streamed=streamed)
    attempt_id = dispatched(submitted(router, request, now=0.0)).attempt_id
    finished(router, attempt_id, outcome, now=1.0)
    assert len(rows_of(router)) == 0


@pytest.mark.parametrize("reported", [False, True], ids=["no first token", "a first token that a gateway reports"])
def test_an_answer_in_one_piece_leaves_the_time_to_its_end(reported: bool) -> None:
    router = make(replicas=specs("a"))
    request = a_request("r", prompt_tokens=10, received_s=0.0, streamed=False)
    attempt_id = dispatched(submitted(router, request, now=0.0)).attempt_id
    if reported:
        router.on_first_token(attempt_id, now=2.5)
    finished(router, attempt_id, ANSWERED, now=3.0)
    rows = rows_of(router)
    assert (rows.ttft_s.tolist(), rows.e2e_s.tolist()) == ([3.0], [3.0])
    assert (rows.unstreamed.tolist(), rows.censored.tolist()) == ([True], [False])
    assert np.isnan(rows.tpot_s).all(), "without a first token there is no time per token after it"


def test_an_answer_in_one_piece_that_fails_is_censored() -> None:
    router = make(replicas=specs("a"))
    request = a_request("r", prompt_tokens=10, received_s=0.0, streamed=False)
    finished(router, dispatched(submitted(router, request, now=0.0)).attempt_id, FAILED, now=2.0)
    rows = rows_of(router)
    assert (rows.ttft_s.tolist(), rows.censored.tolist(), rows.unstreamed.tolist()) == ([2.0], [True], [True])


@pytest.mark.parametrize("outcome", [GONE, FAILED, Outcome(AttemptResult.BUSY, 503)])
def test_any_other_end_without_a_first_token_is_censored(outcome: Outcome) -> None:
    router = make(replicas=specs("a"))
    attempt_id = dispatched(submitted(router, a_request("r", prompt_tokens=10, received_s=0.0), now=0.0)).attempt_id
    finished(router, attempt_id, outcome, now=2.0)
    rows = rows_of(router)
    assert (rows.censored.tolist(), rows.ttft_s.tolist()) == ([True], [2.0])


def test_a_policy_that_does_not_learn_leaves_nothing() -> None:
    router = make(make_policy("gorgo-ms"))
    dispatch = dispatched(submitted(router, a_request("r", prompt_tokens=10, received_s=0.0), now=0.0))
    finished(router, dispatch.attempt_id, ANSWERED, now=1.0)
    assert router.learning.outcomes is None
    assert router.learning.learner is None
    assert (dispatch.decision.features, dispatch.decision.feature_names) == (None, ())
    with pytest.raises(ConfigError, match="no policy here learns"):
        router.learning.adopt(LinearModel())


def test_a_shadow_learns_from_the_decisions_of_the_policy() -> None:
    shadow = LeastPredicted()
    router = make(make_policy("round-robin"), shadow=shadow)
    router.learning.adopt(LinearModel())
    for number in range(4):
        request = a_request(f"r{number}", prompt_tokens=1000, received_s=float(number))
        dispatch = dispatched(submitted(router, request, now=float(number)))
        router.on_first_token(dispatch.attempt_id, now=number + 0.5)
        finished(router, dispatch.attempt_id, ANSWERED, now=number + 0.75)
        assert dispatch.decision.shadow is not None
        assert dispatch.decision.shadow.rank == 1 + number % 2, "the farther one costs more"
    rows = rows_of(router)
    np.testing.assert_allclose(rows.features[:, 1], [0.1, 0.2, 0.1, 0.2], rtol=1e-6)


def test_a_router_trains_one_model() -> None:
    with pytest.raises(ConfigError, match="both learn, and a router trains one model"):
        make(LeastPredicted(), shadow=LeastPredicted())
    router = make(make_policy("random"), shadow=LeastPredicted())
    before = router.settings.policy, router.learning.outcomes
    with pytest.raises(ConfigError, match="both learn"):
        router.settings.set_policy(LeastPredicted(), Weights(), now=0.0)
    assert (router.settings.policy, router.learning.outcomes) == before


def test_decisions_follow_the_model_from_the_next_one_on_and_say_its_version() -> None:
    policy = LeastPredicted()
    assert isinstance(policy, Learner)
    router = make(policy)
    cold = dispatched(submitted(router, a_request("r0", prompt_tokens=10, received_s=0.0), now=0.0)).decision
    router.learning.adopt(LinearModel((0.0, -1.0, 0.0), version=7))
    learned = dispatched(submitted(router, a_request("r1", prompt_tokens=10, received_s=0.0), now=0.0)).decision
    assert (cold.model_version, cold.fallback) == (None, "cold_start")
    assert (learned.model_version, learned.replica, learned.fallback) == (7, "b", None)
    shown = learned.as_dict()
    assert shown["model_version"] == 7
    features = shown["candidates"][1]["features"]
    assert (list(features), features["rtt_s"]) == (list(NAMES), pytest.approx(0.2))
    router.learning.adopt(None)
    assert (router.learning.model_version, policy.model) == (None, None)


def test_a_model_of_other_features_is_refused_and_the_last_one_stays() -> None:
    router = make()
    router.learning.adopt(LinearModel(version=3))
    foreign = LinearModel((1.0, 1.0), names=("rtt_s", "kv_usage"), version=4)
    with pytest.raises(ConfigError, match=r"trained on rtt_s, kv_usage; .* expects: uncached_tokens, rtt_s, in_flight"):
        router.learning.adopt(foreign)
    assert router.learning.model_version == 3


def test_an_attempt_of_an_earlier_policy_writes_nothing_for_the_next_one() -> None:
    router = make()
    old = router.learning.outcomes
    attempt_id = dispatched(submitted(router, a_request("r", prompt_tokens=10, received_s=0.0), now=0.0)).attempt_id
    router.settings.set_policy(LeastPredicted(), Weights(), now=0.5)
    finished(router, attempt_id, GONE, now=1.0)
    assert old is not None
    assert (len(old), len(rows_of(router))) == (1, 0)


def test_a_shadow_that_learns_retains_its_rows_when_the_policy_changes() -> None:
    router = make(make_policy("round-robin"), shadow=LeastPredicted())
    router.learning.adopt(LinearModel(version=2))
    rows = router.learning.outcomes
    router.settings.set_policy(make_policy("random"), Weights(), now=0.0)
    assert router.learning.outcomes is rows
    assert router.learning.model_version == 2
    router.settings.set_shadow(None, now=0.0)
    assert router.learning.outcomes is None
