"""Sources of cached tokens: runs with each, the audit, and the tables of their comparisons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.caches import WARM_UP, report_of
from experiments.fleets import ExperimentFleet
from experiments.grid import Grid, SystemReport
from experiments.runner import Runner
from experiments.simulated import SimTask
from experiments.systems import push_map, ranvier
from experiments.traffic import ContextTraffic
from experiments.variants import SOURCES, Source, Variant, find_variant

FLEET = ExperimentFleet(name="3xL40S", profile="1xL40S-Llama-3.1-8B", replicas=3)
TRAFFIC = ContextTraffic(
    name="contexts", contexts=24, context_tokens=5000, requests=300, rate_per_s=3.0, block_tokens=128
)


def task(source: Source, *, fleet: ExperimentFleet = FLEET, contexts: int = 24, audited: bool = False) -> SimTask:
    variant = Variant(policy="gorgo-ms", source=source)
    traffic = replace(TRAFFIC, contexts=contexts)
    return SimTask(variant=variant, fleet=fleet, traffic=traffic, warm_up=WARM_UP, audited=audited)


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_serves_every_request_and_estimates_what_is_found_on_large_pools(source: Source) -> None:
    run = task(source).run()
    assert (run.row.n, run.row.errors) == (210, 0)
    assert max(run.values["phantom"] or 0.0, run.values["missed"] or 0.0) < 0.02
    assert ("bytes_per_request" in run.values) == (source in ("push", "events"))


def test_small_pools_make_phantoms_of_a_history_without_bound_and_none_of_events() -> None:
    small = replace(FLEET, pool_share=0.25)
    unbounded, events = (
        task(source, fleet=small, contexts=60).run().values["phantom"] or 0.0 for source in ("unbounded", "events")
    )
    assert unbounded > 0.2
    assert events < 0.05


def test_an_audit_changes_no_decision() -> None:
    plain, audited = task("events").run(), task("events", audited=True).run()
    assert plain.row.share == audited.row.share
    assert plain.row.ttft_ms.mean == pytest.approx(audited.row.ttft_ms.mean)
    assert [one["begins_s"] for one in audited.slices[:3]] == [0.0, 5.0, 10.0]
    assert max(one["phantom"] or 0.0 for one in audited.slices[1:]) < 0.5
    assert "phantom" not in plain.slices[0]


def test_the_time_until_an_eviction_is_known_is_that_of_the_way() -> None:
    small = replace(FLEET, pool_share=0.25)
    events, push = (task(source, fleet=small, contexts=60).run().lists["delay local"] for source in ("events", "push"))
    assert 0.5 <= events[0] < 1.0
    assert 50.0 < push[0] < 102.0


def test_a_part_of_each_pool_is_left() -> None:
    whole, quarter = (
        replace(FLEET, pool_share=share).sim_fleet().replicas[0].profile.kv_tokens for share in push_map.POOLS[:2]
    )
    assert quarter == whole // 4


def test_every_target_names_variants_of_its_comparison() -> None:
    for one in (*push_map.comparisons(), *ranvier.comparisons()):
        labels = set(one.variants)
        assert {label for target in one.targets for label in (target.of, target.against)} <= labels
        assert len(labels) == len(one.variants)
        assert all(find_variant(label).make() for label in labels)


# -- tables and pictures


def small_report(groups: tuple[str, ...], *, scale: float, seeds: int = 1) -> SystemReport:
    found = [one for one in (*push_map.comparisons(), *ranvier.comparisons()) if one.group in groups]
    found = [one for one in found if one.group != "replicas" or one.base.fleet.replicas <= 4]
    grid = Grid(seeds=range(seeds), scale=scale, pictures=True)
    return report_of(found, grid, Runner(None, n_jobs=1, show_progress=False), push_map.PICTURES | ranvier.PICTURES)


def test_a_report_has_targets_means_and_bytes_of_reports() -> None:
    report = small_report(("override",), scale=0.05, seeds=2)
    targets, means, *_ = report.sections
    assert [row[1:4] for row in targets.rows] == [
        ("override on", "override off", "p99 TTFT"),
        ("override on", "override off", "hit"),
    ]
    assert all("[" in row[5] for row in targets.rows)
    assert [row[1] for row in means.rows] == ["round-robin", "override off", "override on", "gorgo-ms, events"]
    assert [row[10] == "-" for row in means.rows] == [True, True, True, False]
    assert report.end.startswith("All simulated; 8 runs")


def test_figures_over_time_have_a_column_for_each_source_and_marks_in_the_picture() -> None:
    report = small_report(("faults",), scale=0.1)
    (_, times) = report.sections
    assert times.header == ("from, s", "begins", "history and cached_tokens", "push", "events")
    assert all(len(cell.split(" / ")) == 3 for row in times.rows for cell in row[2:])
    assert [row[0] for row in times.rows[:3]] == ["0", "5", "10"]
    (picture,) = report.pictures
    assert picture.panels[0].marks[110.0] == "reports cut"


def test_pictures_have_hits_over_the_size_of_the_fleet_and_by_depth_mode() -> None:
    report = small_report(("replicas", "depths"), scale=0.02)
    sizes, depths = report.pictures
    assert [panel.title for panel in sizes.panels] == ["hit", "p95 TTFT, ms", "bytes of reports a request"]
    assert [point.x for point in sizes.panels[0].curves["round-robin"]] == [2.0, 4.0]
    assert set(sizes.panels[2].curves) == {"push", "events"}
    for panel in depths.panels:
        assert [bar.x for bar in panel.curves["multi-depth"]] == ["branching", "continued", "resumed"]
