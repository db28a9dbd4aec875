"""The wanted number of replicas: from the requests served again, a forecast, a backlog and a memory; pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import pytest

from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Hold, Reject
from gorgo.core.messages.request import COMPLETED, Outcome
from gorgo.core.scaling import (
    DECISION_INTERVAL_S,
    FIRST_REQUESTS,
    HOLD_STARTUPS,
    Group,
    GroupEvidence,
    ScalingLimits,
    ScalingSignal,
    ServedAgain,
    ServedRequest,
    WantedReplicas,
)
from tests.core.routers import a_request, dispatched, make_router, submitted, timed

EU = Group("eu", "m")
LIMITS = ScalingLimits(ttft_s=2.0, startup_s=60.0, max_replicas=32)


def poisson(rate: float, until_s: float, *, seed: int = 1, prefill_s: float = 0.5) -> Iterator[ServedRequest]:
    """Requests of `prefill_s` as an idle fleet serves them, and an answer of three seconds."""
    rng, at_s = random.Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        yield ServedRequest(at_s, prefill_s, 0.01, prefill_s + 3.0, prefill_s + 0.01)


def decide(
    signal: ScalingSignal,
    requests: Sequence[ServedRequest],
    *,
    until_s: float,
    begin_s: float = 0.0,
    replicas: int = 4,
    work: float | None = None,
    backlog_s: float = 0.0,
) -> list[WantedReplicas]:
    """Decisions each ten seconds; the work is that of the requests of the last half minute."""
    found, at_s = [], begin_s
    while at_s < until_s:
        at_s += DECISION_INTERVAL_S
        new = [one for one in requests if at_s - DECISION_INTERVAL_S <= one.arrived_s < at_s]
        own = sum(one.prefill_s for one in requests if at_s - 30.0 <= one.arrived_s < at_s) / 30.0
        known = GroupEvidence(replicas=replicas, work=own if work is None else work, backlog_s=backlog_s)
        found.append(signal.decide({EU: known}, {EU: new}, now=at_s)[EU])
    return found


def test_the_wanted_number_serves_the_objective_and_one_less_does_not() -> None:
    requests = list(poisson(6.0, 900.0))
    (*_, last) = decide(ScalingSignal(LIMITS), requests, until_s=900.0)
    assert last.expected_attainment is not None
    assert last.expected_attainment >= LIMITS.share
    replay = ServedAgain.of(requests[-256:], GroupEvidence(replicas=4), ttft_s=2.0, speed=last.expected_work / 3.0)
    assert replay.share(last.needed) >= LIMITS.share
    assert last.needed == 4 or replay.share(last.needed - 1) < LIMITS.share, "work alone asks for more than three"


def test_a_replay_is_late_where_the_queue_is_longer_than_the_objective_and_never_better_with_fewer() -> None:
    replay = ServedAgain.of(list(poisson(6.0, 60.0)), GroupEvidence(replicas=1), ttft_s=2.0, speed=1.0)
    shares = [replay.share(count) for count in range(1, 12)]
    assert all(less <= more for less, more in pairwise(shares))
    assert shares[0] < 0.3
    assert shares[-1] == 1.0


def test_places_in_a_batch_count_beside_the_prefill_queue() -> None:
    requests = list(poisson(6.0, 60.0))
    free = ServedAgain.of(requests, GroupEvidence(replicas=1), ttft_s=2.0, speed=1.0)
    full = ServedAgain.of(requests, GroupEvidence(replicas=1, slots=4.0), ttft_s=2.0, speed=1.0)
    # 6 a second that stay 3.5 s each are 21 at once: five replicas of four places.
    assert free.share(4) > 0.9 > full.share(4)
    assert full.share(7) > 0.9


def test_more_are_wanted_a_start_up_before_their_work_is_there() -> None:
    signal = ScalingSignal(ScalingLimits(ttft_s=2.0, startup_s=240.0))
    found = [
        signal.decide({EU: GroupEvidence(replicas=9, work=0.5 + second / 600)}, {}, now=float(second))[EU]
        for second in range(0, 3600, 10)
    ]
    late = [one for one, then in zip(found[60:], found[84:], strict=False) if one.needed < int(then.work / 0.6)]
    assert not late, "each number serves the work of four minutes later"


def test_fewer_are_wanted_only_after_two_start_ups_and_more_at_once() -> None:
    signal = ScalingSignal(LIMITS)
    decide(signal, (), until_s=200.0, work=3.0)
    quiet = decide(signal, (), begin_s=200.0, until_s=800.0, work=0.1)
    first = next(place for place, one in enumerate(quiet) if one.wanted < quiet[0].wanted)
    needed = next(place for place, one in enumerate(quiet) if one.needed < quiet[0].wanted)
    assert (first - needed) * DECISION_INTERVAL_S >= HOLD_STARTUPS * LIMITS.startup_s - DECISION_INTERVAL_S
    (*_, more) = decide(signal, (), begin_s=800.0, until_s=860.0, work=6.0)
    assert more.wanted == more.needed > quiet[-1].wanted


def test_a_short_lull_takes_no_replica() -> None:
    signal = ScalingSignal(LIMITS)
    (*_, busy) = decide(signal, (), until_s=300.0, work=3.0)
    lull = decide(signal, (), begin_s=300.0, until_s=380.0, work=0.5)
    assert {one.wanted for one in lull} == {busy.wanted}


def test_what_no_replica_serves_in_time_wants_no_more_of_them() -> None:
    short, long = list(poisson(1.0, 900.0)), list(poisson(0.2, 900.0, seed=2, prefill_s=4.0))
    mixed = sorted([*short, *long])
    (*_, last) = decide(ScalingSignal(LIMITS), mixed, until_s=900.0)
    assert last.wanted < 10, "a fifth of the requests takes four seconds alone, and two are wanted"
    assert last.attainment == 1.0


def test_shed_work_counts_although_it_is_in_no_queue() -> None:
    signal = ScalingSignal(LIMITS)
    decide(signal, (), until_s=300.0, work=1.0)
    shed = 0.0
    for at_s in range(310, 500, 10):
        shed += 30.0  # three seconds of prefill a second
        one = signal.decide({EU: GroupEvidence(replicas=2, work=1.0, shed_s=shed)}, {}, now=float(at_s))[EU]
    assert one.work == pytest.approx(4.0, rel=0.1)
    assert one.needed >= 7


def test_each_of_several_routers_that_share_their_load_wants_what_one_alone_would() -> None:
    requests = list(poisson(6.0, 900.0))
    (*_, whole) = decide(ScalingSignal(LIMITS), requests, until_s=900.0)
    rng, wanted = random.Random(1), []
    part = [one for one in requests if rng.random() < 0.25]
    signal, at_s = ScalingSignal(LIMITS), 0.0
    while at_s < 900.0:
        at_s += DECISION_INTERVAL_S
        own = sum(one.prefill_s for one in part if at_s - 30.0 <= one.arrived_s < at_s) / 30.0
        in_flight = [sum(one.arrived_s < at_s <= one.ended_s for one in each) for each in (part, requests)]
        known = GroupEvidence(replicas=4, work=own, own_requests=in_flight[0], requests=in_flight[1])
        new = [one for one in part if at_s - DECISION_INTERVAL_S <= one.arrived_s < at_s]
        wanted.append(signal.decide({EU: known}, {EU: new}, now=at_s)[EU])
    assert abs(wanted[-1].needed - whole.needed) <= 1
    assert wanted[-1].work == pytest.approx(whole.work, rel=0.3)


def test_a_backlog_is_worked_off_within_a_start_up_and_replicas_on_their_way_count() -> None:
    signal = ScalingSignal(LIMITS)
    decide(signal, (), until_s=300.0, work=2.0)
    usual = signal.wanted[EU].needed
    first = signal.decide({EU: GroupEvidence(replicas=2, work=2.0, backlog_s=240.0)}, {}, now=310.0)[EU]
    # Two serve what arrives, and the two on their way do 100 s of it until then. 140 s in 60 s are 2.3 replicas.
    assert first.backlog_s == pytest.approx(140.0)
    assert first.needed == usual + 1 == 5
    for at_s in range(320, 370, 10):
        one = signal.decide({EU: GroupEvidence(replicas=2, work=2.0, backlog_s=240.0)}, {}, now=float(at_s))[EU]
    assert one.needed < first.needed, "those that were asked for will have worked at it by then"
    assert one.wanted == first.wanted


def test_a_router_that_has_just_started_wants_what_serves() -> None:
    signal = ScalingSignal(LIMITS)
    first = signal.decide({EU: GroupEvidence(replicas=7)}, {}, now=1000.0)[EU]
    assert (first.wanted, first.needed) == (7, 1)
    assert signal.decide({EU: GroupEvidence(replicas=7)}, {}, now=1110.0)[EU].wanted == 7
    assert signal.decide({EU: GroupEvidence(replicas=7)}, {}, now=1130.0)[EU].wanted == 1


def test_a_group_that_is_cut_off_wants_what_it_wanted() -> None:
    signal = ScalingSignal(LIMITS)
    (*_, busy) = decide(signal, (), until_s=300.0, work=3.0)
    cut = decide(signal, (), begin_s=300.0, until_s=900.0, replicas=0, work=0.0)
    assert {one.wanted for one in cut} == {busy.wanted}


def test_a_group_whose_replicas_have_left_is_forgotten_after_two_start_ups() -> None:
    signal = ScalingSignal(LIMITS)
    decide(signal, (), until_s=300.0)
    assert EU in signal.decide({}, {}, now=400.0)
    assert EU not in signal.decide({}, {}, now=421.0)


def test_the_bounds_hold_whatever_is_known() -> None:
    signal = ScalingSignal(ScalingLimits(ttft_s=2.0, startup_s=60.0, min_replicas=2, max_replicas=3))
    assert decide(signal, (), until_s=100.0, replicas=9, work=0.0)[0].wanted == 3
    assert decide(signal, (), begin_s=100.0, until_s=400.0, work=50.0, backlog_s=1e6)[-1].wanted == 3
    assert decide(signal, (), begin_s=400.0, until_s=1600.0, work=0.0)[-1].wanted == 2


def test_what_the_replay_is_too_good_by_is_learned_and_bounded() -> None:
    late = [
        one._replace(ttft_s=9.0 if place % 5 == 0 else one.ttft_s) for place, one in enumerate(poisson(4.0, 3600.0))
    ]
    found = decide(ScalingSignal(LIMITS), late, until_s=1500.0, replicas=8)
    assert found[-1].attainment == pytest.approx(0.8, abs=0.03)
    assert 0.03 < found[-1].correction <= 0.04, "imbalance explains no more"


# --- The evidence of a Router.


def test_evidence_is_by_region_and_first_model_with_work_backlog_and_places() -> None:
    router = make_router(
        replicas=[timed("a", "eu", max_running_requests=8), timed("b", "eu", max_running_requests=4), timed("c", "us")]
    )
    dispatch = dispatched(submitted(router, a_request("r", prompt_tokens=3000, received_s=1.0), now=1.0))
    found = router.view.scaling_evidence(now=1.0)
    assert found.keys() == {Group("eu", None), Group("us", None)}
    eu = found[Group("eu", None)]
    assert (eu.replicas, eu.slots) == (2, 6.0)
    assert eu.work == pytest.approx(3.0 / 30.0)
    assert eu.backlog_s == pytest.approx(3.0, abs=0.01)
    assert found[Group("us", None)] == GroupEvidence(replicas=1, slots=inf)
    router.on_first_token(dispatch.attempt_id, now=4.0)
    router.on_finish(dispatch.attempt_id, Outcome(COMPLETED, status=200), now=6.0)
    (served,) = router.view.served_since(0, limit=10)[Group("eu", None)]
    assert served.arrived_s == 1.0
    assert served.ttft_s == pytest.approx(3.0)
    assert served.ended_s == pytest.approx(6.0)
    assert router.view.served_since(router.samples.last_seq, limit=10) == {}


def test_a_draining_replica_does_not_serve_and_one_that_leaves_takes_its_group() -> None:
    router = make_router(replicas=[timed("a", "eu"), timed("b", "eu")])
    router.replicas.drain("b", now=1.0)
    assert router.view.scaling_evidence(now=1.0)[Group("eu", None)].replicas == 1
    router.replicas.set_fleet([], now=2.0)
    assert router.view.scaling_evidence(now=2.0) == {}


def test_a_request_that_waits_is_backlog_and_one_that_is_shed_is_counted() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, slo_ttft_s=2.0))
    router = make_router(replicas=[timed("a", "eu")], policy="gorgo-ms", limits=limits)
    dispatched(submitted(router, a_request("first", prompt_tokens=1500, received_s=1.0), now=1.0))
    held, _ = router.submit(a_request("held", prompt_tokens=100, received_s=1.0), now=1.0)
    assert isinstance(held, Hold)
    shed, _ = router.submit(a_request("shed", prompt_tokens=1000, received_s=1.0), now=1.0)
    assert isinstance(shed, Reject)
    found = router.view.scaling_evidence(now=1.0)[Group("eu", None)]
    assert found.backlog_s == pytest.approx(1.6, abs=0.05)
    assert found.shed_s == pytest.approx(1.0)


def test_enough_requests_are_served_again_for_the_objective_to_mean_something() -> None:
    few = list(poisson(1.0, 25.0))
    assert len(few) < FIRST_REQUESTS
    (*_, last) = decide(ScalingSignal(LIMITS), few, until_s=30.0)
    assert last.attainment is None
    assert last.expected_attainment is None
