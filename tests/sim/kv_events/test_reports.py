"""A whole run with each kind of report: what the Router estimates against what the engines find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gorgo.policies.registry import make_policy
from gorgo.sim.engine.profiles import as_vllm
from gorgo.sim.extensions import Startable
from gorgo.sim.faults.kinds import Kill
from gorgo.sim.faults.report_kinds import BadReports, RouterRestart
from gorgo.sim.fleet import SimFleet
from gorgo.sim.kv_events.path import PathFaults
from gorgo.sim.kv_events.reports import CacheReports
from gorgo.sim.records import SimRecord
from gorgo.sim.simulation import Simulation
from gorgo.sim.workload import SimRequest
from tests.sim.feeds import conversations
from tests.sim.fleets import three_regions

#: Of the found tokens: SGLang stores a prompt after its whole prefill, and a dispatched one counts at once.
IN_PREFILL = 0.02
#: One feed's phantoms and misses vary threefold with its seed: what is said of both is of all feeds together.
FEEDS = [conversations(400, every_s=0.6, users=40, seed=seed) for seed in range(4)]
FEED = FEEDS[0]
KINDS = ("sglang", "vllm")
MIDDLE = "eu-frankfurt-0"


def fleet(kind: str = "sglang", *, kv_tokens: int = 150_000) -> SimFleet:
    """Three replicas whose pools evict under the feed."""
    replicas = []
    for replica in three_regions().replicas:
        profile = replace(replica.profile, kv_tokens=kv_tokens)
        replicas.append(replace(replica, profile=as_vllm(profile) if kind == "vllm" else profile))
    return SimFleet(tuple(replicas))


def simulation(reports: CacheReports, faults: Sequence[Startable] = (), **options: object) -> Simulation:
    return Simulation(
        fleet(**options),  # type: ignore[arg-type]
        make_policy("gorgo-ms"),
        seed=0,
        cache_reports=reports,
        faults=faults,
    )


def errors(records: Sequence[SimRecord]) -> tuple[float, float]:
    """Return phantom and missed tokens, of all found tokens."""
    pairs = [(record.estimated_cached_tokens or 0, record.cached_tokens or 0) for record in records]
    found = sum(found for _, found in pairs)
    phantom = sum(max(0, estimated - found) for estimated, found in pairs)
    return phantom / found, sum(max(0, found - estimated) for estimated, found in pairs) / found


@pytest.mark.parametrize("kind", KINDS)
def test_reports_leave_no_phantoms_where_pools_evict(kind: str) -> None:
    phantoms = {}
    for reports in ("none", "usage", "push", "events", "exact"):
        records: list[SimRecord] = []
        for feed in FEEDS:
            run = simulation(reports, kind=kind)
            records += run.run(feed).records
            run.router.check()
            assert sum(site.model.cache.evicted_tokens_total for site in run.engines.values()) > 100_000
        phantoms[reports] = errors(records)[0]
    assert max(phantoms["events"], phantoms["exact"]) < (IN_PREFILL if kind == "sglang" else 0.001)
    if kind == "sglang":  # The bounded history evicts in the order of vLLM's pool.
        assert phantoms["push"] < phantoms["none"]
        assert phantoms["none"] > 0.01


def test_what_a_run_without_reports_does_not_know_is_in_its_records() -> None:
    records = simulation("none").run(FEED[:100]).records
    assert any(record.cached_tokens for record in records)


@pytest.mark.parametrize("reports", ["push", "events"])
def test_the_source_of_each_replica_is_what_it_reports(reports: CacheReports) -> None:
    run = simulation(reports)
    run.run(FEED[:200])
    assert {one.source for one in run.router.caches.sources(now=run.kernel.now).values()} == {reports}
    assert all(feed.path.totals.messages > 0 for feed in run.caches.feeds.values())


def test_evictions_of_a_far_replica_are_known_after_a_trip() -> None:
    run = simulation("events")
    run.run(FEED)
    delays_s = run.caches.feeds[MIDDLE].path.totals.eviction_delays_s
    assert len(delays_s) > 20
    assert 0.0475 <= min(delays_s) < sorted(delays_s)[len(delays_s) // 2] < 0.06
    assert {0.0} == {*run_exact().caches.feeds[MIDDLE].path.totals.eviction_delays_s}


def run_exact() -> Simulation:
    run = simulation("exact")
    run.run(FEED)
    return run


@pytest.mark.parametrize(
    "faults",
    [
        PathFaults(lost=0.3),
        PathFaults(doubled=0.5),
        PathFaults(reordered=0.3),
        PathFaults(late_s=3.0),
        PathFaults(cut=True),
    ],
)
@pytest.mark.parametrize("reports", ["push", "events"])
def test_every_request_is_served_while_reports_fail(reports: CacheReports, faults: PathFaults) -> None:
    half_s = FEED[-1].arrival_s / 2
    run = simulation(reports, [BadReports(None, faults, 10.0, half_s)])
    records = run.run(FEED).records
    assert [record.error for record in records] == [None] * len(FEED)
    run.router.check()
    late = [record for record in records if record.scheduled_s > half_s + 15.0]
    if reports == "events":
        assert errors(late)[0] < IN_PREFILL, "replayed"


@pytest.mark.parametrize(("reports", "within_s"), [("push", 5.5), ("events", 0.6)])
def test_a_router_that_restarts_knows_warm_engines_again(reports: CacheReports, within_s: float) -> None:
    known: list[SimRecord] = []
    unknown: list[SimRecord] = []
    for feed in FEEDS:
        at_s = feed[-1].arrival_s / 2
        for source, found in ((reports, known), ("usage", unknown)):
            records = simulation(source, [RouterRestart(at_s)]).run(feed).records
            found += [one for one in records if 0.0 < one.scheduled_s - at_s - within_s < 20.0]
    assert errors(known)[1] < 0.01 < 0.1 < errors(unknown)[1]


@pytest.mark.parametrize("reports", ["push", "events"])
def test_a_replica_that_dies_comes_back_cold(reports: CacheReports) -> None:
    run = simulation(reports, [Kill(MIDDLE, 60.0, 80.0)])
    records = run.run(FEED).records
    run.router.check()
    late = [record for record in records if record.scheduled_s > 90.0 and record.replica == MIDDLE]
    assert errors(late)[0] < 0.05


def test_engines_of_vllms_kind_let_siblings_hit_a_prompt_in_mid_prefill_and_those_of_sglangs_do_not() -> None:
    """Two prompts of 40 blocks, the second one second into the prefill of the first, which takes about two."""
    blocks = b"".join(number.to_bytes(8, "little") for number in range(40))
    one = SimRequest(index=0, arrival_s=1.0, prompt_tokens=40 * 512 + 9, output_tokens=1, blocks=blocks, prefix_hash=0)
    pair = [one, replace(one, index=1, arrival_s=2.0)]
    found = {}
    for kind in KINDS:
        alone = SimFleet(fleet(kind, kv_tokens=900_000).replicas[:1])
        run = Simulation(alone, make_policy("round-robin"), seed=0)
        found[kind] = [record.cached_tokens for record in run.run(pair).records]
    assert found["sglang"] == [0, 0]
    assert found["vllm"] == [0, 40 * 512], "admitted in the step that computes the end of the first one"
