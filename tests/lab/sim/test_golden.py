"""The live shell and the simulator agree decision for decision, and a small window is what it was when it was last
approved.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, ProxyConfig, RegionConfig
from gorgo.config.router_settings import replica_spec, router_limits
from gorgo.config.values import BLOCK_BYTES
from gorgo.core.messages.decision import Decision
from gorgo.core.router import Router
from gorgo.core.training.learning import TrainingSpec
from gorgo.core.training.outcomes import COLUMNS, TrainingRows
from gorgo.lab.datasets import load_requests
from gorgo.lab.prompt_text import body_of
from gorgo.lab.sim.engine.profiles import EngineProfile, as_vllm, find_profile
from gorgo.lab.sim.faults import FailFast, FaultInjector
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.training import TrainingController
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate.feed import feed_of, fingerprinted
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from gorgo.live.build import build_live
from gorgo.live.event_loop import RouterGateway
from gorgo.live.http import body
from gorgo.live.telemetry.health import HealthLog
from gorgo.policies.registry import make_policy
from gorgo.proxy.exchange import passage, relay, response
from tests.core.learners import NAMES, LeastPredicted, LeastSquaresTrainer
from tests.lab.sim.fleets import REGIONS, three_regions
from tests.lab.sim.live_shell import LiveShell, VirtualLoop, use
from tests.proxy.conftest import system_tls

# --- A small window of the shipped trace under several policies, request by request, as it was when it was last
# approved.
#
# A change here is a change of behaviour: of a policy, the Router, the engine model, or the simulation. If it is meant,
# renew the files by `python -m tests.lab.sim.test_golden` and say in the commit why they changed.


FOLDER = Path(__file__).parent / "golden"
POLICIES = (
    "gorgo-ms",
    "gorgo",
    "least-load",
    "least-load-first-token",
    "least-request",
    "prefix-cache",
    "prefix-cache-in-flight",
    "simple-session-affinity",
    "power-of-two",
    "oracle",
)
#: So that there are queues, and choices that depend on them.
TIME_SCALE = 0.5


def replayed(policy: str) -> list[list[Any]]:
    """Per request: replica, cached and believed tokens, TTFT in ms and E2E in s."""
    feed = feed_of(load_requests("chat-small", TraceFilters(limit=120)), time_scale=TIME_SCALE)
    records = Simulation(three_regions(), policy_of(policy), seed=0).run(feed).records
    return [
        [r.replica, r.cached_tokens, r.estimated_cached_tokens, round(r.ttft_ms or 0.0, 3), round(r.e2e_s or 0.0, 6)]
        for r in records
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_small_window_is_served_as_it_always_was(policy: str) -> None:
    golden = json.loads((FOLDER / f"{policy}.json").read_text())
    found = replayed(policy)
    assert [row[:3] for row in found] == [row[:3] for row in golden]
    for mine, theirs in zip(found, golden, strict=True):
        assert mine[3:] == pytest.approx(theirs[3:], abs=2e-3)  # the last digits are the machine's


def renew() -> None:
    for policy in POLICIES:
        lines = ",\n".join(json.dumps(row) for row in replayed(policy))
        (FOLDER / f"{policy}.json").write_text(f"[\n{lines}\n]\n")


# --- The live shell driven by a virtual clock and the simulator agree decision for decision.
#
# Both serve the same small trace with the same engines, jitter and faults: here through the proxy's ASGI app (body,
# fingerprint, Router, retries, relay of server-sent events), there through the simulator's shell.


SPEC = TrainingSpec("linear", NAMES, round_samples=10, fit_s=0.5)
MODEL, KEY, SEED, BLOCK_TOKENS = "m", 7, 3, 64
NEAR = "us-ashburn-0"
#: Twice as fast as it was: there are queues, and one replica dies in the middle and comes back.
TIME_SCALE_PARITY, REQUESTS = 0.5, 110
KILLED_S, REVIVED_S = 3.0, 4.5

TRACE = load_requests("chat-small", TraceFilters(limit=REQUESTS))
FEED = fingerprinted(TRACE, model=MODEL, key=KEY, block_bytes=BLOCK_BYTES, time_scale=TIME_SCALE_PARITY)
PROFILE = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")


@dataclass
class Seen:
    """One run: decisions per request, and the Router's own samples at the end."""

    decisions: dict[str, list[Decision]]
    router: Router


@dataclass
class Dies:
    """A fault: the nearest replica is killed and comes back."""

    def start(self, world: FaultInjector) -> None:
        world.kernel.at(KILLED_S, lambda: world.kill(NEAR))
        world.kernel.at(REVIVED_S, lambda: world.revive(NEAR))


def config(policy: str) -> Config:
    return Config(
        proxy=ProxyConfig(region="us-ashburn", policy=policy, probe_interval_s=10.0, scrape_interval_s=10.0),
        regions=tuple(RegionConfig(name=region) for region in REGIONS),
        replicas=tuple(
            ReplicaConfig(name=f"{region}-0", region=region, url="http://127.0.0.1:1") for region in REGIONS
        ),
    )


def fleet_of(config: Config, profile: EngineProfile = PROFILE) -> SimFleet:
    return SimFleet(
        [SimReplica(replica_spec(row), profile, Link(rtt_s=REGIONS[row.region])) for row in config.replicas]
    )


def seen_of(router: Router, feed: Sequence[SimRequest]) -> Seen:
    return Seen({str(request.index): router.view.decisions(str(request.index)) for request in feed}, router)


def simulated(
    policy: str,
    *,
    dies: bool,
    status: int | None = None,
    profile: EngineProfile = PROFILE,
    learns: TrainingController | None = None,
) -> Seen:
    """With `learns` a policy that learns has the place of `policy`."""
    found = config(policy)
    simulation = Simulation(
        fleet_of(found, profile),
        make_policy(policy) if learns is None else LeastPredicted(SPEC),
        controllers=[] if learns is None else [learns],
        seed=SEED,
        faults=[Dies()] if dies else [] if status is None else [FailFast(NEAR, status, KILLED_S, REVIVED_S)],
        limits=router_limits(found),
        probe_interval_s=found.proxy.probe_interval_s,
        scrape_interval_s=found.proxy.scrape_interval_s,
        block_tokens=BLOCK_TOKENS,
    )
    simulation.run(FEED)
    return seen_of(simulation.router, FEED)


def live(
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    dies: bool,
    status: int | None = None,
    profile: EngineProfile = PROFILE,
    learns: TrainingController | None = None,
) -> Seen:
    found = config(policy)

    async def run() -> Seen:
        loop = asyncio.get_running_loop()
        for module in (passage, relay, response, body):
            monkeypatch.setattr(module, "monotonic", loop.time)
        started = make_policy(policy) if learns is None else LeastPredicted(SPEC)
        state = build_live(found, policy=started, weights=None, environ={}, key=KEY, seed=SEED, tls=system_tls())
        await state.aclose()
        state.routing.clock = loop.time
        state.routing.gateway = RouterGateway(state.routing.router, loop.time, HealthLog(state.telemetry.metrics))
        shell = LiveShell(state, fleet_of(found, profile), FEED, seed=SEED, block_tokens=BLOCK_TOKENS)
        use(state, shell)
        shell.start(probe_interval_s=found.proxy.probe_interval_s, scrape_interval_s=state.scrape_interval_s)
        if learns is not None:
            trains(shell, state.routing.router, learns)
        if dies:
            loop.call_at(KILLED_S, shell.engines[NEAR].kill)
            loop.call_at(REVIVED_S, shell.engines[NEAR].revive)
        if status is not None:
            loop.call_at(KILLED_S, shell.engines[NEAR].set_failing, status)
            loop.call_at(REVIVED_S, shell.engines[NEAR].set_failing, None)
        bodies = {str(request.index): body_of(request, MODEL) for request in TRACE}
        answers = await shell.serve(bodies.__getitem__)
        assert status == 400 or all(answer.endswith(b"data: [DONE]\n\n") for answer in answers.values())
        return seen_of(state.routing.router, FEED)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def trains(shell: LiveShell, router: Router, controller: TrainingController) -> None:
    """The rounds of a training at the times of a simulation."""

    def act() -> None:
        controller.act(router, shell.kernel.now)
        trains(shell, router, controller)

    assert controller.next_s is not None
    shell.kernel.at(controller.next_s, act)


@pytest.mark.parametrize(
    ("policy", "dies", "profile"),
    [
        ("gorgo-ms", False, PROFILE),
        ("gorgo-ms", True, PROFILE),
        ("gorgo-ms", True, as_vllm(PROFILE)),
        ("gorgo", True, PROFILE),
        ("least-load", True, PROFILE),
        ("prefix-cache", True, PROFILE),
    ],
)
def test_the_live_shell_and_the_simulator_decide_alike(
    policy: str, dies: bool, profile: EngineProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = simulated(policy, dies=dies, profile=profile)
    mine = live(policy, monkeypatch, dies=dies, profile=profile)
    assert len(theirs.decisions) == REQUESTS
    for request_id, expected in theirs.decisions.items():
        found = mine.decisions[request_id]
        assert [decision.replica for decision in found] == [decision.replica for decision in expected], request_id
        for one, other in zip(found, expected, strict=True):
            _assert_alike(one, other)
    _assert_samples_alike(mine.router, theirs.router)
    if dies:
        assert any(len(decisions) > 1 for decisions in theirs.decisions.values()), "somebody was sent elsewhere"
        assert any(sample.continued for sample in theirs.router.samples), "somebody was in the middle of an answer"
    asked = {str(request.index): request.output_tokens for request in FEED}
    assert {sample.request_id: sample.output_tokens for sample in theirs.router.samples} == asked


@pytest.mark.parametrize("status", [401, 404, 400, 429, 503, 500])
def test_both_decide_alike_while_a_replica_fails_fast_and_lose_nothing_to_it(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = simulated("gorgo-ms", dies=False, status=status)
    mine = live("gorgo-ms", monkeypatch, dies=False, status=status)
    for request_id, expected in theirs.decisions.items():
        found = mine.decisions[request_id]
        assert [decision.replica for decision in found] == [decision.replica for decision in expected], request_id
        for one, other in zip(found, expected, strict=True):
            _assert_alike(one, other)
    _assert_samples_alike(mine.router, theirs.router)
    lost = [sample for sample in theirs.router.samples if sample.status != 200]
    assert len(lost) <= (3 if status == 400 else 0), "the first three are taken for the client's fault"
    assert any(len(decisions) > 1 for decisions in theirs.decisions.values())


def test_both_learn_the_same_share_from_engines_that_find_part_of_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = simulated("gorgo-ms", dies=False, profile=replace(PROFILE, hit_share=0.5))
    mine = live("gorgo-ms", monkeypatch, dies=False, profile=replace(PROFILE, hit_share=0.5))
    for request_id, expected in theirs.decisions.items():
        for found, other in zip(mine.decisions[request_id], expected, strict=True):
            assert found.replica == other.replica
            _assert_alike(found, other)
    _assert_samples_alike(mine.router, theirs.router)
    shares = [view.found_share for view in theirs.router.view.snapshots(now=1e3)]
    assert [view.found_share for view in mine.router.view.snapshots(now=1e3)] == pytest.approx(shares)
    assert shares == pytest.approx([0.5] * 3, abs=0.05)


def test_both_leave_the_same_outcomes_and_train_the_same_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries, a replica that dies and adopted models included."""
    mine, theirs = (TrainingController(LeastSquaresTrainer, seed=SEED) for _ in range(2))
    simulation = simulated("gorgo-ms", dies=True, learns=theirs)
    shell = live("gorgo-ms", monkeypatch, dies=True, learns=mine)
    for request_id, expected in simulation.decisions.items():
        for found, other in zip(shell.decisions[request_id], expected, strict=True):
            assert (found.replica, found.model_version) == (other.replica, other.model_version)
            _assert_alike(found, other)
            assert found.features is not None
            assert other.features is not None
            np.testing.assert_allclose(found.features, other.features, rtol=1e-6)
    ours, others = rows_of(shell.router), rows_of(simulation.router)
    for name in COLUMNS:
        np.testing.assert_allclose(getattr(ours, name), getattr(others, name), rtol=1e-6, atol=1e-9, err_msg=name)
    assert others.censored.any()
    assert len(theirs.rounds) >= 2
    for one, round_ in zip(mine.rounds, theirs.rounds, strict=True):
        assert (one.started_s, one.adopted_s) == pytest.approx((round_.started_s, round_.adopted_s))


def rows_of(router: Router) -> TrainingRows:
    assert router.learning.outcomes is not None
    return router.learning.outcomes.since(0)


def _assert_alike(one: Decision, other: Decision) -> None:
    assert one.candidates == other.candidates
    assert one.excluded == other.excluded
    assert one.decided_s == pytest.approx(other.decided_s, abs=1e-9)
    assert (one.prompt_tokens, one.estimated_cached_tokens) == (other.prompt_tokens, other.estimated_cached_tokens)
    assert one.terms.keys() == other.terms.keys()
    for name, column in one.terms.items():
        np.testing.assert_allclose(column, other.terms[name], rtol=1e-9, atol=1e-6, err_msg=name)
    assert one.predicted_ttft_s == pytest.approx(other.predicted_ttft_s, abs=1e-9)


def _assert_samples_alike(one: Router, other: Router) -> None:
    found = {sample.request_id: sample for sample in one.samples}
    assert len(found) == len(one.samples) == len(other.samples)
    for sample in other.samples:
        mine = found[sample.request_id]
        assert (mine.status, mine.replica, mine.retries) == (sample.status, sample.replica, sample.retries)
        assert (mine.continued, mine.input_tokens) == (sample.continued, sample.input_tokens)
        assert (mine.cached_tokens, mine.output_tokens) == (sample.cached_tokens, sample.output_tokens)
        assert mine.ttft_ms == pytest.approx(sample.ttft_ms, abs=1e-6)
        assert mine.e2e_s == pytest.approx(sample.e2e_s, abs=1e-9)


if __name__ == "__main__":
    renew()
