from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.apps.cache_sources.fleets import CacheFleet
from gorgo.apps.cache_sources.groups import POOLS, comparisons
from gorgo.apps.cache_sources.measure import SOURCES, CacheTask, Source, measure
from gorgo.apps.cache_sources.traffic import ContextTraffic

FLEET = CacheFleet(name="3xL40S", profile="1xL40S-Llama-3.1-8B", replicas=3)
TRAFFIC = ContextTraffic(
    name="contexts", contexts=24, context_tokens=5000, requests=300, rate_per_s=3.0, block_tokens=128
)


def task(source: Source, *, fleet: CacheFleet = FLEET, contexts: int = 24, audited: bool = False) -> CacheTask:
    traffic = replace(TRAFFIC, contexts=contexts)
    return CacheTask(policy="gorgo-ms", source=source, fleet=fleet, traffic=traffic, audited=audited)


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_serves_every_request_and_estimates_what_is_found_on_large_pools(source: Source) -> None:
    run = measure(task(source))
    assert (run.row.n, run.row.errors) == (210, 0)
    assert max(run.phantom, run.missed) < 0.02
    assert (run.bytes_per_request is not None) == (source in ("push", "events"))


def test_small_pools_make_phantoms_of_a_history_without_bound_and_none_of_events() -> None:
    small = replace(FLEET, pool_share=0.25)
    unbounded, events = (measure(task(source, fleet=small, contexts=60)) for source in ("unbounded", "events"))
    assert unbounded.phantom > 0.2
    assert events.phantom < 0.05


def test_an_audit_changes_no_decision() -> None:
    plain, audited = measure(task("events")), measure(task("events", audited=True))
    assert plain.row.share == audited.row.share
    assert plain.row.ttft_ms.mean == pytest.approx(audited.row.ttft_ms.mean)
    assert not plain.slices
    assert sum(one.n for one in audited.slices) == 300
    assert max(one.phantom for one in audited.slices[1:]) < 0.5


def test_the_time_until_an_eviction_is_known_is_that_of_the_way() -> None:
    small = replace(FLEET, pool_share=0.25)
    events, push = (
        measure(task(source, fleet=small, contexts=60)).eviction_delays_ms["local"] for source in ("events", "push")
    )
    assert 0.5 <= events[0] < 1.0
    assert 50.0 < push[0] < 102.0


def test_a_part_of_each_pool_is_left() -> None:
    whole, quarter = (replace(FLEET, pool_share=share).sim_fleet().replicas[0].profile.kv_tokens for share in POOLS[:2])
    assert quarter == whole // 4


def test_every_target_names_variants_of_its_comparison() -> None:
    for one in comparisons():
        labels = {variant.label for variant in one.variants}
        assert {label for target in one.targets for label in (target.of, target.against)} <= labels
        assert len(labels) == len(one.variants)
