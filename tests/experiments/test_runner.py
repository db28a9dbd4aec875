"""Keys of runs, the store that a grid resumes from, and backends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import runner
from experiments.runner import Experiment, Runner, Runs, connect, run_key
from experiments.tables import ClaimVerdict
from experiments.tuning import TuningTask, Windows
from gorgo.errors import GorgoError, ReportError, UnknownPolicy
from gorgo.lab.simulate import SimJob
from gorgo.lab.simulate.run import policy_of
from gorgo.lab.traces import TraceFilters
from gorgo.policies.baselines import Nearest
from tests.lab.sim.fleets import three_regions


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
    assert again.missing([task]) == {}
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
