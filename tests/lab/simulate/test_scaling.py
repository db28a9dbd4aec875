"""A fleet that grows and shrinks in virtual time: what is paid, what serves, and the autoscalers that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.router import Router
from gorgo.core.scaling import ScalingLimits
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.workload import SimRequest
from tests.bench.scaling import WARM_PROMPTS, join
from tests.lab.simulate.elastic import (
    ElasticRun,
    FleetState,
    PodAutoscaler,
    PredictedAttainment,
    ScalingRule,
    Static,
    Utilisation,
    hot_beginnings,
    queue_length,
    run_elastic,
    through_the_day,
)

LIMITS = RouterLimits(overload=OverloadLimits(queue_enabled=True))
STARTUP_S = 60.0


def fleet(count: int) -> SimFleet:
    profile = find_profile("1xL20-Llama-3.1-8B")
    replicas = (SimReplica(ReplicaSpec(f"eu-{number}", "eu"), profile, Link(rtt_s=0.002)) for number in range(count))
    return with_accurate_priors(SimFleet(tuple(replicas)))


def feed(rates: Sequence[float], *, each_s: float = 600.0, tokens: int = 5120) -> list[SimRequest]:
    """Prompts of their own that take an engine 1.3 s each, at so many a second for ten minutes each."""
    rng, at_s, found = np.random.default_rng(4), 0.0, list[SimRequest]()
    for place, rate in enumerate(rates):
        while at_s < (place + 1) * each_s:
            blocks = rng.bytes(tokens // 512 * 8)
            found.append(
                SimRequest(
                    index=len(found),
                    arrival_s=at_s,
                    prompt_tokens=tokens,
                    output_tokens=20,
                    blocks=blocks,
                    prefix_hash=len(found),
                )
            )
            at_s += rng.exponential(1 / rate)
    return found


def run(
    rule: ScalingRule,
    requests: Sequence[SimRequest],
    *,
    first: int = 1,
    policy: str = "gorgo-ms",
    warm_prompts: int = 0,
) -> ElasticRun:
    return run_elastic(
        "rule",
        rule,
        fleet(6),
        requests,
        first=first,
        startup_s=STARTUP_S,
        ttft_s=4.0,
        limits=LIMITS,
        policy=policy,
        warm_prompts=warm_prompts,
    )


@dataclass
class Wishes:
    """Wants what is written down, from each time on."""

    numbers: dict[float, int]
    seen: list[tuple[float, int, int]] = field(default_factory=list)

    def wanted(self, router: Router, state: FleetState, *, now: float) -> int:
        self.seen.append((now, len(state.serving), state.starting))
        return self.numbers[max(at_s for at_s in self.numbers if at_s <= now)]


def test_a_replica_serves_after_its_start_up_and_both_are_paid() -> None:
    wishes = Wishes({0.0: 1, 100.0: 3})
    found = run(wishes, feed([0.2], each_s=300.0))
    assert found.served == [(0.0, 1), (160.0, 3)]
    assert found.paid == [(0.0, 1), (100.0, 3)]
    until_s = (3600.0 * found.replica_hours + 200.0) / 3
    assert until_s == pytest.approx(found.records[-1].scheduled_s)


def test_a_replica_that_is_not_wanted_any_more_ends_its_answers_and_comes_back_cold() -> None:
    requests = feed([0.5], each_s=400.0)
    same = [replace(request, blocks=requests[0].blocks) for request in requests]
    wishes = Wishes({0.0: 2, 100.0: 1, 200.0: 2})
    found = run(wishes, same, first=2, policy="round-robin")
    assert all(record.error is None for record in found.records)
    assert [count for _, count in found.served] == [2, 1, 2]
    cached = {
        name: [one.cached_tokens or 0 for one in found.records if one.replica == name and one.scheduled_s > 260.0]
        for name in ("eu-0", "eu-1")
    }
    assert min(cached["eu-0"], default=0) > 0
    assert cached["eu-1"][0] == 0 < cached["eu-1"][1], "another process, with an empty cache"


def test_hot_beginnings_are_what_two_requests_have_in_common_the_most_frequent_first() -> None:
    one, *others = feed([0.5], each_s=60.0)
    groups = [bytes([group]) * 24 for group in (1, 2)]
    requests = [
        replace(each, blocks=groups[number % 3 == 0] + each.blocks, prefix_hash=int(number % 3 == 0))
        for number, each in enumerate([one, *others])
    ]
    assert hot_beginnings(requests, requests[-1].arrival_s, wanted=2) == groups
    assert hot_beginnings(requests, requests[-1].arrival_s, wanted=1) == groups[:1]
    assert hot_beginnings(requests, requests[0].arrival_s, wanted=2) == [], "one request alone has none in common"


def test_a_warmed_replica_has_the_beginnings_in_its_cache_when_its_first_request_comes() -> None:
    requests = [replace(each, blocks=b"systemic" * 5 + each.blocks[40:], prefix_hash=1) for each in feed([0.4])]
    rule = {0.0: 1, 100.0: 2}
    for warm_prompts, cached in ((0, 0), (1, 5 * 512)):
        found = run(Wishes(rule), requests, policy="round-robin", warm_prompts=warm_prompts)
        first = next(one for one in found.records if one.replica == "eu-1")
        assert first.cached_tokens == cached


def test_a_warmed_replica_takes_more_of_a_herd_and_first_tokens_come_sooner() -> None:
    cold, warmed = (join(4.0, warm_prompts=prompts) for prompts in (0, WARM_PROMPTS))
    assert warmed["by_the_fifth"] > 1.2 * cold["by_the_fifth"]
    assert warmed["ttft_ms_mean"] < 0.97 * cold["ttft_ms_mean"]
    assert warmed["ttft_ms_p95"] < 0.97 * cold["ttft_ms_p95"]


def test_the_signal_serves_a_day_with_less_than_its_peak_needs() -> None:
    requests = feed([0.3, 0.5, 0.8, 1.1, 1.4, 1.0, 0.6, 0.3], each_s=150.0)
    limits = ScalingLimits(ttft_s=4.0, startup_s=STARTUP_S, max_replicas=6)
    found = run(PredictedAttainment(limits), requests)
    peak = max(count for _, count in found.served)
    assert found.attained > 0.9
    assert 3 <= peak <= 5
    assert found.mean_replicas < 0.85 * peak


def test_a_fleet_that_stands_is_paid_whole() -> None:
    assert run(Static(3), feed([0.5], each_s=60.0), first=3).mean_replicas == pytest.approx(3.0)


# --- The autoscalers.


@dataclass(frozen=True)
class Idle:
    """An engine with a request, or without."""

    running: int = 0
    queued: int = 0

    @property
    def models(self) -> list[Idle]:
        return [self]


@pytest.mark.parametrize(
    ("total", "serving", "starting", "expected"),
    [
        (4.0, 4, 0, 4),  # as the target
        (4.3, 4, 0, 4),  # within 10 % of it
        (4.8, 4, 0, 5),
        (7.9, 4, 4, 8),  # those that start count with nothing, and are enough
        (9.5, 4, 4, 10),
        (99.0, 4, 0, 10),  # bounded
    ],
)
def test_the_pod_autoscaler_divides_the_sum_by_the_target(
    total: float, serving: int, starting: int, expected: int
) -> None:
    scaler = PodAutoscaler(lambda *_: total, 1.0, most=10)
    state = FleetState([f"r{n}" for n in range(serving)], starting, {})
    assert scaler.wanted(None, state, now=0.0) == expected  # type: ignore[arg-type]


def test_the_pod_autoscaler_takes_fewer_only_after_its_window() -> None:
    totals = iter([8.0] * 4 + [1.0] * 100)
    scaler = PodAutoscaler(lambda *_: next(totals), 1.0, most=10)
    state = FleetState([f"r{n}" for n in range(8)], 0, {})
    wanted = [scaler.wanted(None, state, now=15.0 * turn) for turn in range(40)]  # type: ignore[arg-type]
    assert wanted[:20] == [8] * 20
    assert wanted[-1] == 1


def test_metrics_are_those_of_the_replicas_that_serve() -> None:
    engines = {"r0": Idle(running=3, queued=2), "r1": Idle(), "r2": Idle(running=1, queued=9)}
    state = FleetState(["r0", "r1"], 0, engines)  # type: ignore[arg-type]
    busy = Utilisation()
    assert busy(None, state) == pytest.approx(1.0)  # type: ignore[arg-type]
    router = type("Waiting", (), {"queued": 4})
    assert queue_length(router, state) == 6.0  # type: ignore[arg-type]


def test_the_day_has_every_request_in_order_and_more_of_them_in_the_afternoon() -> None:
    steady = np.sort(np.random.default_rng(1).uniform(0.0, 1000.0, 5000))
    moved = through_the_day(steady)
    assert all(one <= other for one, other in pairwise(moved))
    assert moved[-1] == pytest.approx(86_400.0)
    counts, _ = np.histogram(moved / 3600.0, bins=24, range=(0, 24))
    assert counts[15] > 4 * counts[4]
