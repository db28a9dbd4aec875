"""The parts of a TTFT: what is expected at dispatch, and how a measured time is shared out."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.latency.prefill import PrefillQueue
from gorgo.core.latency.ttft import PARTS, TtftEstimate, expected_queue_s
from gorgo.core.limits import HedgeLimits, OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Hedge
from gorgo.policies.registry import POLICIES
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    blocks_of,
    dispatched,
    finished,
    make_router,
    specs,
    submitted,
    timed,
)

SECONDS = st.floats(0, 100)
NO_HOLD = RouterLimits(overload=OverloadLimits(queue_enabled=False))


@given(SECONDS, SECONDS, st.none() | SECONDS, SECONDS, SECONDS, SECONDS)
def test_parts_are_never_negative_and_add_up_to_what_was_measured(
    router_s: float,
    previous_attempts_s: float,
    network_s: float | None,
    queue_s: float,
    prefill_s: float,
    behind_s: float,
) -> None:
    outlook = TtftEstimate(router_s, previous_attempts_s, network_s, queue_s, prefill_s)
    parts = outlook.attribute(router_s + previous_attempts_s + behind_s)
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(router_s + previous_attempts_s + behind_s)
    assert parts.network_s <= (network_s or 0.0)
    assert (parts.queue_s, parts.prefill_s) <= (queue_s, prefill_s)
    assert list(parts.as_ms()) == list(PARTS)


def test_what_is_sooner_than_expected_leaves_nothing_unexplained() -> None:
    parts = TtftEstimate(0.0, 0.0, 0.1, 5.0, 0.5).attribute(0.3)
    assert list(parts) == pytest.approx([0.0, 0.0, 0.1, 0.0, 0.2, 0.0])


def test_outlook_is_what_gorgo_ms_predicts() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=NO_HOLD)
    for number in range(8):
        decision = dispatched(
            submitted(router, a_request(f"r{number}", prompt_tokens=300, received_s=0.9), now=1.0)
        ).decision
        outlook = decision.estimate
        assert outlook.router_s == pytest.approx(0.1)
        assert outlook.network_s is not None
        total_s = (
            outlook.router_s + outlook.previous_attempts_s + outlook.network_s + outlook.queue_s + outlook.prefill_s
        )
        assert decision.predicted_ttft_s == pytest.approx(total_s)
    assert decision.estimate.queue_s > 0.5


def test_outlook_of_a_stuck_engine_is_what_gorgo_ms_predicts() -> None:
    router = make_router(policy="gorgo-ms", replicas=[timed("a")], limits=NO_HOLD)
    router.submit(a_request("stuck", prompt_tokens=300), now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=300, received_s=5.0), now=5.0)).decision
    assert decision.estimate.queue_s > 4.0
    assert decision.predicted_ttft_s == pytest.approx(sum(part or 0.0 for part in astuple(decision.estimate)))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_an_outlook_whether_it_predicts_or_not(policy: str) -> None:
    router = make_router(policy=policy, replicas=[timed("a")])
    router.submit(a_request("before", prompt_tokens=500), now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=100), now=0.0)).decision
    # 10 ms there and back; 500 tokens are before it, at 1,000 a second.
    assert list(astuple(decision.estimate)) == pytest.approx([0.0, 0.0, 0.01, 0.5, 0.1])


def test_network_is_unknown_without_a_round_trip_and_then_unexplained() -> None:
    router = make_router(replicas=[timed("a")])
    router.replicas.on_probe("a", None, now=1000.0)
    router.handle_timer(now=1000.0)
    dispatch = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=1000.0), now=1000.0))
    assert dispatch.decision.estimate.network_s is None
    assert dispatch.decision.as_dict()["predicted_parts_ms"]["network"] is None
    assert dispatch.decision.estimate.attribute(0.35).residual_s == pytest.approx(0.25)


def test_time_on_an_attempt_that_failed_is_a_part_of_its_own() -> None:
    router = make_router(replicas=[timed("a"), timed("b")])
    first = dispatched(submitted(router, a_request("r", prompt_tokens=100, received_s=9.5), now=10.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=11.0))
    router.on_first_token(second.attempt_id, now=12.0)
    router.on_finish(second.attempt_id, COMPLETED, now=13.0)
    (row,) = router.samples.after(0)["samples"]
    assert row["ttft_parts_ms"] == {
        "router": pytest.approx(500.0),
        "previous_attempts": pytest.approx(1000.0),
        "network": pytest.approx(20.0),
        "queue": 0.0,
        "prefill": pytest.approx(100.0),
        "residual": pytest.approx(880.0),
    }
    assert sum(row["ttft_parts_ms"].values()) == pytest.approx(row["ttft_ms"])


def test_time_on_a_late_attempt_that_was_hedged_is_earlier_too() -> None:
    limits = RouterLimits(hedging=HedgeLimits(budget_ratio=1.0, window_s=1000.0))
    router = make_router(policy="gorgo-ms", replicas=[timed("a"), timed("b")], limits=limits)
    router.submit(a_request("r", prompt_tokens=100), now=0.0)
    due_s = router.next_timer()
    assert due_s is not None
    (hedge,) = router.handle_timer(now=due_s)
    assert isinstance(hedge, Hedge)
    assert hedge.dispatch.decision.estimate.previous_attempts_s == pytest.approx(due_s)


def test_request_without_a_first_token_has_no_parts() -> None:
    router = make_router("a")
    dispatch = dispatched(submitted(router, a_request("r"), now=0.0))
    router.on_finish(dispatch.attempt_id, COMPLETED, now=1.0)
    (row,) = router.samples.after(0)["samples"]
    assert row["ttft_parts_ms"] is None


@pytest.mark.parametrize(("drained", "best"), [("b", 256), ("c", 192)])
def test_best_cached_is_of_the_candidates_alone(drained: str, best: int) -> None:
    router = make_router(policy="nearest", replicas=specs("a", "b", "c"))
    blocks = blocks_of(1, 2, 3, 4)
    router.index.confirm(blocks[:24], 1)
    router.index.confirm(blocks, 2)
    router.replicas.drain(drained, now=0.0)
    decision = dispatched(submitted(router, a_request("r", prompt_tokens=256, blocks=blocks), now=0.0)).decision
    assert (decision.replica, decision.estimated_cached_tokens, decision.best_cached_tokens) == ("a", 0, best)


@pytest.mark.parametrize(
    ("now", "queue_s"),
    [
        # Its first token is due at 0.305, is seen 5 ms later, and may be 0.3 s late: stuck after 0.61.
        (0.60, 0.0),
        (0.62, 0.31),
        (0.71, 0.4),
        (1.11, 0.8),
        (1.60, 1.29),
        (1.71, 1.4),
    ],
)
def test_all_that_waits_and_its_lateness_count_as_soon_as_an_engine_is_stuck(now: float, queue_s: float) -> None:
    clock = PrefillQueue()
    clock.add("head", arrives_s=0.005, prior_s=0.3, streamed=True)
    found = expected_queue_s(clock, arrives_s=now + 0.005, one_way_s=0.005, now=now)
    assert found == pytest.approx(queue_s, abs=1e-9)
