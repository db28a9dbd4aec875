"""The command: grids that resume from a store, comparisons and tables of groups, pictures, and what is misspelt."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from experiments import command, runner
from experiments.command import PUBLISHED, SYSTEMS, main
from experiments.comparison import VariantComparison
from experiments.pictures import Panel, Picture, draw, pictures_of, write_pictures
from experiments.published import WORDS
from experiments.runner import Experiment, Runner, Runs, connect, run_key
from experiments.simulated import SimTask, TaskRun
from experiments.systems import llm_d, lodestar
from experiments.tables import ClaimVerdict
from experiments.tuning import TuningTask, Windows
from experiments.windows import PolicyTask
from gorgo.errors import GorgoError, MissingExtra, ReportError, UnknownPolicy
from gorgo.lab.results import Spread
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from gorgo.policies.baselines import Nearest
from tests.documents import ROOT, tables
from tests.experiments.rows import row
from tests.lab.sim.fleets import three_regions

# --- The command: the comparison of every system, tables of groups, and what is misspelt.


SMALL = ["--jobs", "1", "--seeds", "2", "--scale", "0.03"]


def test_a_group_prints_ratios_with_their_intervals_and_means_and_keeps_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--system", "lodestar", "--only", "motivation", *SMALL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    (_, ratios), (_, means) = tables(printed)
    assert [found[1] for found in ratios] == [*["prefix-cache-and-load", "gorgo-ms"] * 2] * 2
    assert all("[" in found[6] for found in ratios)
    assert {found[1] for found in means} == {"least-request", "prefix-cache-and-load", "gorgo-ms"}
    assert {found[2] for found in means} == {"2"}
    assert [re.fullmatch(r"[\d.]+ \[[-\d.]+-[\d.]+\]|-", found[14]) is not None for found in means] == [True] * 6
    assert "all simulated; 12 runs" in printed
    assert len(list((tmp_path / "runs").glob("*.json"))) == 12
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed, "from the stored runs"
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 8


def test_pictures_are_of_the_format_that_was_named(tmp_path: Path) -> None:
    arguments = ["--only", "motivation", "--jobs", "1", "--seeds", "1", "--scale", "0.01", "--out", str(tmp_path)]
    main([*arguments, "--pictures", "png"])
    assert [path.name for path in tmp_path.glob("*.png")] == ["motivation-7xL20.png"]
    main([*arguments, "--pictures"])
    assert [path.name for path in tmp_path.glob("*.svg")] == ["motivation-7xL20.svg"]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[SimTask | PolicyTask]:
    """Every run has the same figures; the tasks that were run."""
    ran: list[SimTask | PolicyTask] = []

    def run(task: SimTask | PolicyTask) -> TaskRun:
        ran.append(task)
        return TaskRun(row=row(seed=task.seed), cpu_s=1.0, values={"ttft_mean": 0.05, "tpot_mean": 0.2})

    monkeypatch.setattr(SimTask, "run", run)
    monkeypatch.setattr(PolicyTask, "run", run)
    return ran


def test_the_comparison_has_a_table_and_a_page_of_all_five_systems(
    made_up: list[SimTask | PolicyTask], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--jobs", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = tables(printed)
    assert len(found) == len(PUBLISHED) == 5
    assert [header for header, _ in found] == [list(command.HEADER)] * 5
    assert {cells[-1] for _, rows in found for cells in rows} <= set(WORDS)
    assert "One seed and short windows: a preview, not a result" in printed
    page = (tmp_path / "compare.html").read_text()
    assert all(system.TITLE in page for system in PUBLISHED.values())
    assert {task.seed for task in made_up} == {0}
    windows = [task.workload.filters.limit for task in made_up if isinstance(task, PolicyTask)]
    assert set(windows) == {command.QUICK_REQUESTS}


@pytest.mark.usefixtures("made_up")
def test_one_system_is_compared_alone_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--system", "ranvier", "--json", "--jobs", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {found["system"] for found in rows} == {"Ranvier"}
    assert all(found["source"].startswith("Ranvier, post") for found in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "motivations"], "--only motivations: no such group; there are gorgo: tables; lodestar: lodestar, "),
        (
            ["--system", "routers", "--only", "router"],
            "there are routers: routers, processes, delay, replaced, overload, large",
        ),
        (["--system", "policies"], "--system policies has no published figures; choose its tables by --only"),
        (["--system", "herd", "--only", "herd", "--queue", "on"], "--queue on: choose --system policies alone"),
        (["--trace", "nowhere.jsonl"], "--trace nowhere.jsonl: no such file"),
        (["--system", "nobody"], "invalid choice: 'nobody'"),
    ],
)
def test_what_is_misspelt_is_an_error_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_error_of_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.jsonl").write_text("")
    arguments = ["--system", "lodestar", "--only", "tau", "--trace", str(tmp_path / "short.jsonl"), "--jobs", "1"]
    assert main([*arguments, "--scale", "0.01", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("experiments: ")


def test_no_group_is_in_two_published_systems() -> None:
    groups = [name for system in PUBLISHED.values() for name in system.GROUPS]
    assert len(groups) == len(set(groups))
    assert list(SYSTEMS) == [
        *PUBLISHED,
        "policies",
        "herd",
        "perturbed",
        "plateau",
        "dynamo",
        "live",
        "routers",
        "tuner",
    ]


def test_make_compare_runs_this_command() -> None:
    assert "-m experiments $(ARGS)" in (ROOT / "Makefile").read_text()


# --- Keys of runs, the store that a grid resumes from, and backends.


def job_key(job: SimJob) -> str:
    return run_key(job.policy, [job.trace], [replace(job, trace="")])


JOB = SimJob(trace="chat-small", policy="gorgo-ms", fleet=three_regions())


def test_the_same_run_has_the_same_key() -> None:
    assert job_key(JOB) == job_key(replace(JOB, fleet=three_regions()))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"policy": "gorgo"},
        {"policy": "oracle"},
        {"time_scale": 2.0},
        {"scenario": "bursts"},
        {"trace": "art-chat-apr5"},
        {"weights": {"lambda": 0.3}},
        {"filters": TraceFilters(limit=5)},
        {"fleet": three_regions(here=0.002)},
        {"probe_interval_s": 5.0},
    ],
)
def test_whatever_changes_the_run_changes_the_key(change: dict[str, Any]) -> None:
    assert job_key(replace(JOB, **change)) != job_key(JOB)


def test_a_trace_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    one, other, copy = tmp_path / "a" / "t.jsonl", tmp_path / "b" / "t.jsonl", tmp_path / "c" / "t.jsonl"
    for path, text in ((one, "1"), (other, "2"), (copy, "1")):
        path.parent.mkdir()
        path.write_text(text)
    keys = [job_key(replace(JOB, trace=str(path))) for path in (one, other, copy)]
    assert keys[0] == keys[2] != keys[1]


def test_a_policy_s_own_file_counts_for_it_alone() -> None:
    files = {
        name: {path.name for path in runner._policy_files(name)}
        for name in ("gorgo-ms", "gorgo", "oracle", "pinned", "floor")
    }
    assert files["gorgo-ms"] - files["gorgo"] == {"gorgo_ms.py"}
    assert files["gorgo"] - files["gorgo-ms"] == {"gorgo.py"}
    assert files["oracle"] == files["pinned"] == files["floor"] == files["gorgo"] & files["gorgo-ms"]
    assert "base.py" in files["oracle"]


def test_a_run_by_compiled_modules_has_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = job_key(JOB)
    for name in ("gorgo_ms", "gorgo"):
        module = sys.modules[f"gorgo.policies.{name}"]
        source = Path(str(module.__file__))
        monkeypatch.setattr(module, "__file__", str(source.with_name(f"{name}.cpython-311-x86_64-linux-gnu.so")))
    runner._code_digest.cache_clear()
    assert job_key(JOB) == key


def test_what_cannot_run_has_no_key() -> None:
    with pytest.raises(UnknownPolicy):
        job_key(replace(JOB, policy="gorgo-mss"))


def test_a_trace_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.jsonl")
    path.write_text("1")
    assert job_key(replace(JOB, trace=str(path))) != job_key(JOB)


class PluginPolicy(Nearest):
    """A policy that another package brings."""

    name = "plugin"


def test_a_plugin_policy_is_known_by_what_its_own_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered, other = tmp_path / "offered.py", tmp_path / "other.py"
    module = ModuleType("offered")
    module.__file__ = str(offered)
    monkeypatch.setitem(sys.modules, "offered", module)
    monkeypatch.setattr(PluginPolicy, "__module__", "offered")
    monkeypatch.setattr(runner, "policy_of", lambda name: PluginPolicy() if name == "plugin" else policy_of(name))
    job = replace(JOB, policy="plugin")

    def key() -> str:
        runner._code_digest.cache_clear()
        return job_key(job)

    keys = []
    for text in ("rule = 1", "rule = 2", "rule = 1"):
        offered.write_text(text)
        keys.append(key())
    other.write_text("rule = 3")
    assert keys[0] == keys[2] == key() != keys[1]
    own = {path.name for path in runner._policy_files("plugin")} - {
        path.name for path in runner._policy_files("oracle")
    }
    assert own == {"offered.py"}
    runner._code_digest.cache_clear()


# -- the runner
TASK = TuningTask(windows=Windows(shapes=("art-chat-apr5",), draw=0, limit=40), policy="gorgo")


def a_runner(folder: Path | None, **options: Any) -> Runner:
    return Runner(folder, n_jobs=1, show_progress=False, **options)


def test_a_task_is_run_once_and_found_again(tmp_path: Path) -> None:
    task, folder = replace(TASK, after=10), tmp_path / "not" / "yet"
    first = a_runner(folder)
    made = first.runs([task, task], title="once")
    again = a_runner(folder)
    assert again.runs([task], title="once") == made
    assert (first.made, again.made) == (1, 0)
    assert (made[task].whole.n, made[task].tail.n) == (40, 30)


@pytest.mark.parametrize("content", ["[{", "[]", "{}"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / f"{TASK.key()}.json").write_text(content)
    with pytest.raises(ReportError, match=f"{TASK.key()}.json: damaged"):
        a_runner(tmp_path).runs([TASK], title="damaged")


def an_experiment(seeds: Sequence[int]) -> Experiment:
    first = replace(TASK, seed=seeds[0])
    runs: Runs = yield [first]
    second = replace(first, after=int(runs[first].whole.n) // 2)
    runs = yield [second]
    counts = [float(part.n) for part in (runs[first].whole, runs[second].tail)]
    return [ClaimVerdict(group="g", labels=("requests",), value=value, at_least=40.0) for value in counts]


def test_an_experiment_asks_for_runs_that_depend_on_earlier_ones() -> None:
    whole, half_of_it = a_runner(None).verdicts(an_experiment([0]), title="g")
    assert (whole.met, half_of_it.met) == (True, False)
    assert (whole.value, half_of_it.value) == (40.0, 20.0)


@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_backend_without_its_package_or_a_cluster_says_what_is_missing(
    backend: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(GorgoError, match=f"--backend {backend} needs the package {package}"):
        a_runner(None, backend=backend).runs([TASK], title="nowhere")
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    variable = {"dask": "DASK_SCHEDULER_ADDRESS", "ray": "RAY_ADDRESS"}[backend]
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(GorgoError, match=f"needs the address of a cluster in {variable}"):
        connect(backend)


def test_a_cluster_that_exists_is_connected_to_and_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    distributed, ray, util = ModuleType("distributed"), ModuleType("ray"), ModuleType("ray.util.joblib")
    distributed.Client = calls.append  # type: ignore[attr-defined]
    ray.init = lambda **options: calls.append(options["address"])  # type: ignore[attr-defined]
    util.register_ray = lambda: calls.append("registered")  # type: ignore[attr-defined]
    for module in (distributed, ray, util):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://scheduler:8786")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    for backend in runner.BACKENDS:
        connect(backend)
    assert calls == ["tcp://scheduler:8786", "auto", "registered"]


# --- The data behind the pictures, of runs whose figures are made up; and the files.


SEEDS = range(2)
PICTURES = {**lodestar.PICTURES, **llm_d.PICTURES}


def made_up_pictures(task: SimTask) -> TaskRun:
    """Mean TTFT of 1,000 ms for seed 0 and 1,100 for seed 1."""
    ms = 1000.0 + 100.0 * task.seed
    learns = task.variant.policy in ("lodestar", "predicted-latency", "gorgo-residual")
    figures = row(task.variant.policy, seed=task.seed)
    spread = Spread(mean=ms, p50=ms, p95=2 * ms, p99=3 * ms)
    per_token = Spread(mean=30.0)
    slices = [
        {
            "begins_s": 60.0 * number,
            "ttft_ms_mean": ms,
            "error_ratio": 0.25 if learns else None,
            "hit": 0.4,
            "best_hit": 0.5,
            "predicted_ttft_ms": 0.5 * ms if learns else None,
            "modelled_ttft_ms": ms if learns else None,
        }
        for number in range(3)
    ]
    changed = {"ttft_ms": spread, "e2e_per_token_ms": per_token, "tokens_per_s": 500.0}
    return TaskRun(row=type(figures)(**{**_fields(figures), **changed}), cpu_s=1.0, slices=slices)


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__slots__}


def chosen(*groups: str) -> list[VariantComparison]:
    return [one for one in (*lodestar.comparisons(), *llm_d.comparisons()) if one.group in groups]


def drawn(*groups: str) -> dict[str, Picture]:
    some = chosen(*groups)
    runs = {task: made_up_pictures(task) for one in some for task in one.tasks(SEEDS)}
    return {one.name: one for one in pictures_of(some, runs, SEEDS, PICTURES)}


def points(panel: Panel, label: str) -> Iterator[tuple[Any, float, float, float]]:
    yield from ((one.x, one.value, one.low, one.high) for one in panel.curves[label])


def test_bars_are_means_over_seeds_per_traffic_with_the_least_and_the_most_seed() -> None:
    found = drawn("lodestar", "lodestar-more")
    mean, p99 = found["lodestar-8xA30"].panels
    assert (mean.title, p99.title, mean.kind) == ("mean TTFT, ms", "p99 TTFT, ms", "bars")
    assert list(points(mean, "lodestar")) == [("50% shared, 6/s", 1050.0, 1000.0, 1100.0)]
    assert list(points(p99, "gorgo-ms")) == [("50% shared, 6/s", 3150.0, 3000.0, 3300.0)]
    more = found["lodestar-more-7xL20-8xA30"].panels[0]
    assert len(more.curves["prefix-cache-and-load"]) == 7


def test_the_shift_is_shown_over_time_and_what_predicts_nothing_has_no_curve_of_errors() -> None:
    error, ttft, hit, best = drawn("shift")["shift-8xA30"].panels
    assert [point[:2] for point in points(error, "lodestar, frozen")] == [(0.0, 0.25), (60.0, 0.25), (120.0, 0.25)]
    assert "prefix-cache-and-load" not in error.curves
    assert [point[1] for point in points(ttft, "prefix-cache-and-load")] == [1050.0] * 3
    assert [next(points(panel, "lodestar"))[1] for panel in (hit, best)] == [0.4, 0.5]


def test_scenarios_are_curves_over_the_rate() -> None:
    found = drawn("qps")
    per_token, tokens = found["qps-scenario A"].panels
    assert [point[:2] for point in points(per_token, "load-prefix 1:1:1")] == [(12.0, 30.0), (21.0, 30.0)]
    assert next(points(tokens, "round-robin"))[1] == 500.0
    assert set(found) == {f"qps-{name}" for name in (*map("scenario {}".format, "ABCD"), "ShareGPT-like")}


def test_a_group_without_a_picture_has_none() -> None:
    assert drawn("production", "oracle") == {}


def test_every_variant_of_a_bar_chart_has_a_bar() -> None:
    for group in ("lodestar", "motivation", "guards"):
        for one in chosen(group):
            (panel, _) = drawn(group)[one.family].panels
            assert set(one.variants) <= set(panel.curves)


def test_a_run_that_is_missing_leaves_its_bar_out() -> None:
    some = chosen("motivation")
    runs = {
        task: made_up_pictures(task) for one in some for task in one.tasks(SEEDS) if task.variant.policy != "gorgo-ms"
    }
    (picture,) = pictures_of(some, runs, SEEDS, PICTURES)
    assert "gorgo-ms" not in picture.panels[0].curves


def test_files_are_svg_with_the_titles_as_text_or_a_small_png(tmp_path: Path) -> None:
    some = list(drawn("motivation").values())
    (path,) = write_pictures(tmp_path, some)
    assert path.name == "motivation-7xL20.svg"
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert "mean TTFT, ms" in path.read_text()
    (png,) = write_pictures(tmp_path, some, suffix="png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size < 40_000


def test_bars_are_drawn_with_a_bar_per_traffic_and_policy() -> None:
    (picture,) = drawn("motivation").values()
    axes = draw(picture).get_axes()
    assert [axis.get_title(loc="left") or axis.get_title() for axis in axes] == ["mean TTFT, ms", "p99 TTFT, ms"]
    assert [len(axis.patches) for axis in axes] == [6, 6]


def test_curves_over_time_are_drawn_with_what_begins_at_a_time() -> None:
    panel = drawn("shift")["shift-8xA30"].panels[1]
    (axis,) = draw(Picture("p", [Panel("t", "x", "times", panel.curves, {60.0: "half"})])).get_axes()
    assert len(axis.lines) == len(panel.curves) + 1
    assert [text.get_text() for text in axis.texts] == ["half"]


def test_without_matplotlib_the_error_says_what_to_install_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"a picture needs matplotlib.*gorgo-router\[report\]"):
        write_pictures(tmp_path, [])
    arguments = ["--system", "lodestar", "--only", "motivation", "--pictures", "--out", str(tmp_path)]
    assert command.main(arguments) == 1
    assert "a picture needs matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
