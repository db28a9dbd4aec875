"""Systems by their runs and tables: sources of cached tokens, several routers, sessions that share a prompt."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import cast

import pytest

from experiments.command import main
from experiments.fleets import ExperimentFleet
from experiments.reports import WARM_UP, Grid, SystemReport, mean_cells, variant_report
from experiments.runner import Runner
from experiments.simulated import SimTask
from experiments.systems import herd, push_map, ranvier, several
from experiments.systems.herd import AGENTS, OTHERS, all_targets, report, tuner
from experiments.systems.several import runs_of
from experiments.traffic import ContextTraffic
from experiments.tuning import TuningRun, TuningTask
from experiments.variants import SOURCES, Source, Variant, find_variant
from experiments.windows import SHORT_SIGHTED, PolicyTask, RatioTarget, Workload
from gorgo.lab.datasets import AgentsShape, HerdShape, describe_trace, generate_requests, read_shape, shapes
from gorgo.lab.sim.routers import DELAYS_S
from gorgo.policies.registry import POLICIES
from tests.documents import tables
from tuner.offline.search import RunScore

# --- Sources of cached tokens: runs with each, the audit, and the tables of their comparisons.


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
    found = [one for one in (*push_map.comparisons(), *ranvier.comparisons())
             if one.group != "replicas" or one.base.fleet.replicas <= 4]  # fmt: skip
    grid, runner = Grid(seeds=range(seeds), scale=scale, pictures=True), Runner(None, n_jobs=1, show_progress=False)
    return variant_report(found, groups, grid, runner, push_map.PICTURES | ranvier.PICTURES)


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


# --- Several routers over one fleet: their runs and tables.


def test_prints_every_table_and_takes_stored_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [word for name in ("routers", "delay", "replaced", "overload") for word in ("--only", name)]
    arguments = [
        "--system",
        "routers",
        *groups,
        "--jobs",
        "1",
        "--seeds",
        "1",
        "--scale",
        "0.03",
        "--count",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, routers), (_, targets), (_, delay), (_, replaced), (_, overload) = tables(printed)
    assert [row[0] for row in routers] == ["ART-Chat-like@0.5/2", "ART-Chat-like@1/2"]
    assert all(re.fullmatch(r"\d+\.\d / \d+ / \d+\.\d\d", cell) for row in routers for cell in row[1:])
    assert [row[0] for row in targets] == [row[0] for row in routers]
    small = ["alone, 1,000 routes", "0.005 s, 1,000 routes"]
    assert [row[0] for row in delay] == ["one", "alone", *small, "0.005 s", "0.1 s", "1 s", "10 s"]
    assert [row[-1] == "-" for row in delay] == [True] * 3 + [False] * 5, "bytes of reports"
    assert [row[0] for row in replaced] == ["not replaced", "no store", "store"]
    assert all(0.0 <= float(cell) <= 100.0 for cell in overload[0][1:])
    assert len(list((tmp_path / "runs").glob("*.json"))) == 20
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed, "from the stored runs"


def test_a_large_group_has_so_many_replicas_and_a_row_for_each_sharing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "LARGE", (24, 3))
    assert main(["--only", "large", "--jobs", "1", "--seeds", "1", "--scale", "0.02", "--out", str(tmp_path)]) == 0
    ((_, rows),) = tables(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["none", "30"], ["store", "30"]]
    (one, _) = runs_of(["large"], Grid(seeds=(0,)))
    assert len(one.task.fleet.sim_fleet().replicas) == 24


def test_a_router_of_several_processes_has_a_row_for_each_number_with_the_reports_of_one_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several, "PROCESSES", (2,))
    assert main(["--only", "processes", "--jobs", "1", "--seeds", "1", "--scale", "0.02", "--out", str(tmp_path)]) == 0
    ((_, rows),) = tables(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(re.fullmatch(r"\d+\.\d / \d+ / \d+\.\d\d", cell) for row in rows for cell in row[1:])
    (_, two, *_) = runs_of(["processes"], Grid(seeds=(0,)))
    assert (two.task.routers.report_delay_s, two.task.routers.sharing) == (DELAYS_S["local"], "local")


def test_a_seed_and_a_trace_are_those_of_every_run() -> None:
    found = runs_of(["routers"], Grid(seeds=(5, 6), trace="conversation.jsonl", counts=(4,)))
    assert {one.task.seed for one in found} == {5, 6}
    assert {trace for one in found for trace in one.task.traffic.traces} == {"art-chat-apr5", "conversation.jsonl"}
    assert {one.task.routers.count for one in found if one.column != "one"} == {4}
    assert len(found) == 2 * 4 * 3


def test_a_load_is_in_the_name_of_its_traffic() -> None:
    (one, *_) = runs_of(["overload"], Grid(seeds=(0,)))
    assert one.task.traffic.label == "ART-Chat-like@1.352"
    assert one.task.limits().overload.queue_enabled


# --- The claims about sessions that share a system prompt: which settings they have, and a small run of each kind.


#: Groups of steady herds by where they run.
STEADY = ("herd", "herd-pools", "herd-regions", "herd-regions-pools")


def of_group(group: str) -> list[RatioTarget]:
    return [target for target in all_targets() if target.group == group]


def settings(targets: list[RatioTarget]) -> set[tuple[int, float, str | None, float]]:
    found = set()
    for target in targets:
        (workload,) = target.workloads
        assert isinstance(workload.shape, HerdShape)
        found.add((workload.shape.groups, workload.shape.gap_s, workload.fleet, workload.pool_share))
    return found


def test_the_herd_is_run_at_every_gap_number_of_prompts_fleet_and_part_of_the_pools() -> None:
    steady = [target for group in STEADY for target in of_group(group)]
    places = (("8x1xH100", 1.0), ("8x1xH100", 0.25), ("6x1xH100", 1.0), ("6x1xH100", 0.25))
    nine = {(groups, gap_s, *place) for groups, gap_s, place in product((1, 3, 10), (0.4, 1.5, 4.0), places)}
    assert settings(steady) == nine | {(1, 15.0, "8x1xH100", 1.0)}


def test_the_floor_bounds_what_fits_into_near_pools_and_the_pinned_row_what_does_not() -> None:
    bounds = Counter((one.group, tuple(one.others), one.figure, one.at_most) for one in all_targets())
    assert {(group, others, figure): at_most for group, others, figure, at_most in bounds if len(others) == 1} == {
        ("herd", ("floor",), "mean TTFT"): 1.1,
        ("herd", ("floor",), "p95 TTFT"): 1.1,
        ("herd-pools", ("pinned",), "mean TTFT"): 1.1,
        ("herd-regions", ("pinned",), "mean TTFT"): 1.1,
        ("herd-regions-pools", ("pinned",), "mean TTFT"): 1.1,
        ("herd-changing", ("pinned",), "mean TTFT"): 1.1,
        **{("herd", (SHORT_SIGHTED,), f"{part} TTFT"): 1.0 for part in ("mean", "p95", "p99")},
        **{
            (group, (SHORT_SIGHTED,), f"{part} TTFT"): at_most
            for group in STEADY[1:]
            for part, at_most in (("mean", 0.85), ("p95", 1.03), ("p99", 1.03))
        },
    }
    assert {at_most for _, others, _, at_most in bounds if len(others) > 1} == {1.03}
    assert {one.policy for one in all_targets()} == {"gorgo-ms"}


def test_the_policy_is_compared_with_all_that_were_published_for_such_traffic() -> None:
    assert {"gorgo", "prefix-cache-and-load", "lmetric", "dualmap", "skywalker", "preble-e2"} <= set(OTHERS)
    assert set(OTHERS) <= set(POLICIES)
    for group in herd.GROUPS[:-1]:
        compared = {tuple(one.workloads): one.figure for one in of_group(group) if tuple(one.others) == OTHERS}
        assert set(compared) == {tuple(one.workloads) for one in of_group(group)}


def test_sessions_change_in_a_herd_and_come_and_go_as_agents() -> None:
    shapes_of = [one.workloads[0].shape for one in of_group("herd-changing")]
    assert {one.leaving_share for one in shapes_of if isinstance(one, HerdShape)} == {0.15}
    assert {one.sessions_per_s for one in shapes_of if isinstance(one, AgentsShape)} == {0.05, 0.1, 0.2, 0.5, 1.0}


def test_the_herd_of_the_claims_is_the_shipped_one_and_fits_into_the_context_of_the_engines() -> None:
    assert read_shape(shapes()["herd"]) == herd.HERD
    for shape in (herd.HERD, replace(AGENTS, duration_s=600.0)):
        requests = generate_requests(shape)
        assert max(one.input_tokens + one.output_tokens for one in requests) <= 32_768
    agents = describe_trace(generate_requests(replace(AGENTS, duration_s=6000.0)))
    assert agents.input_p50 == pytest.approx(24_732 - 1948 * 2.5, rel=0.2), "as long as the herd's"


SMALL = HerdShape(
    seed=0, sessions=6, rounds=3, groups=2, gap_s=0.5, system_tokens=2048, question_tokens=500, output_tokens=4,
    leaving_share=0.0,
)  # fmt: skip


def small(**changes: object) -> Workload:
    workload = Workload(name="small herd", traces=("herd",), shape=replace(SMALL, **changes))  # type: ignore[arg-type]
    return workload.on("8x1xH100", pool_share=0.25)


def test_a_shape_is_drawn_with_the_seed_on_a_part_of_the_pools() -> None:
    job = PolicyTask(small(), "gorgo-ms", 1).job()
    assert job.feed is not None
    assert len(job.feed) == 18
    assert job.feed != PolicyTask(small(), "gorgo-ms", 2).job().feed
    assert {one.profile.kv_tokens for one in job.fleet.replicas} == {112_500}
    assert PolicyTask(small().first(5), "gorgo-ms", 1).job().feed == job.feed[:5]
    assert small().label == "small herd, load 1, 8x1xH100, 1/4 of each pool"


def test_without_room_and_shared_sessions_stay_where_their_system_prompt_is() -> None:
    spread = {
        policy: PolicyTask(herd.herd(1, 1.5).on("8x1xH100").first(122), policy, 1).run().row
        for policy in ("gorgo-ms", SHORT_SIGHTED)
    }
    shares = {policy: max(row.share.values()) for policy, row in spread.items()}
    assert shares["gorgo-ms"] < 0.7 < shares[SHORT_SIGHTED]
    assert {row.policy for row in spread.values()} == {"gorgo-ms"}


def test_the_largest_share_of_a_table_is_the_mean_of_each_seed_s_largest() -> None:
    tasks = [PolicyTask(small(), "random", seed) for seed in (0, 1)]
    runs = {task: task.run() for task in tasks}
    shares = ({"h100-0": 1.0}, {"h100-1": 1.0})
    runs = {
        task: replace(run, row=replace(run.row, share=share))
        for (task, run), share in zip(runs.items(), shares, strict=True)
    }
    ((*_, share),) = mean_cells(tasks, runs, herd.MEANS)
    assert share == "100"


def test_runs_of_other_shapes_and_pools_are_other_runs() -> None:
    tasks = [
        PolicyTask(small(), "gorgo", 1),
        PolicyTask(small(), "gorgo", 2),
        PolicyTask(small(gap_s=0.6), "gorgo", 1),
        PolicyTask(small().on("8x1xH100"), "gorgo", 1),
        PolicyTask(small(), "lmetric", 1),
        PolicyTask(small(), "gorgo-ms", 1),
        PolicyTask(small(), SHORT_SIGHTED, 1),
    ]
    assert len({task.key() for task in tasks}) == len(tasks)
    assert PolicyTask(replace(small(), name="other"), "gorgo", 1).key() == tasks[0].key()


def test_a_group_prints_its_targets_and_the_means_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [
        replace(target, workloads=(small().on("6x1xH100"),), others=target.others[:2])
        for target in (of_group("herd")[0], of_group("herd")[-1])
    ]
    monkeypatch.setattr(herd, "all_targets", lambda: few)
    found = report(["herd"], Grid(seeds=range(2)), Runner(None, n_jobs=1, show_progress=False))
    assert [row["group"] for row in found.rows] == ["herd", "herd"]
    means = found.sections[-1]
    assert tuple(means.header) == ("on", "policy", *(name for name, *_ in herd.MEANS))
    assert [row[1] for row in means.rows] == ["floor", "gorgo", "gorgo-ms", "prefix-cache-and-load"]
    assert all(row[2] != "-" for row in means.rows)


def test_the_tuner_s_rows_have_the_share_of_one_replica_before_and_after() -> None:
    def run(task: TuningTask) -> TuningRun:
        moved = task.windows.time_scale < 1 and task.seed == 1
        start = RunScore(n=9, errors=0, ttft_ms_p95=400.0, e2e_s_p95=1.0, max_share=0.9)
        taken = replace(start, ttft_ms_p95=300.0, max_share=0.6) if moved else start
        weights = {"w_rtt": 0.5, "w_queue": 5.0 if moved else 0.1}
        return TuningRun(whole=start, tail=taken, weights=weights, accepted=int(moved))

    experiment = tuner(range(2))
    tasks = [cast(TuningTask, task) for task in next(experiment)]
    assert {(task.policy, task.fleet, task.windows.shapes) for task in tasks} == {("gorgo", "8x1xH100", ("herd",))}
    with pytest.raises(StopIteration) as stopped:
        experiment.send({task: run(task) for task in tasks})
    steady, _, ttft, share = stopped.value.value
    assert (steady.value, steady.note) == (1.0, "moved in 0 of 2: w_rtt 0.5, w_queue 0.1; w_rtt 0.5, w_queue 0.1")
    assert ttft.value == pytest.approx(0.75**0.5)
    assert ttft.note == "moved in 1 of 2: w_rtt 0.5, w_queue 0.1; w_rtt 0.5, w_queue 5"
    assert share.note == f"largest share {fmean((0.9, 0.6)):.2f} after 0.90"
