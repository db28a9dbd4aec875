from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gorgo.apps.claims import run_cache
from gorgo.apps.claims.workload import job_key
from gorgo.apps.simulate import SimJob
from gorgo.apps.simulate.run import policy_of
from gorgo.apps.traces import TraceFilters
from gorgo.errors import UnknownPolicy
from gorgo.policies.nearest import Nearest
from tests.sim.fleets import three_regions

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
    files = {name: {path.name for path in run_cache._policy_files(name)} for name in ("gorgo-ms", "gorgo", "oracle")}
    assert files["gorgo-ms"] - files["gorgo"] == {"gorgo_ms.py"}
    assert files["gorgo"] - files["gorgo-ms"] == {"gorgo.py"}
    assert files["oracle"] == files["gorgo"] & files["gorgo-ms"]
    assert "base.py" in files["oracle"]


def test_a_run_by_compiled_modules_has_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = job_key(JOB)
    for name in ("gorgo_ms", "gorgo"):
        module = sys.modules[f"gorgo.policies.{name}"]
        source = Path(str(module.__file__))
        monkeypatch.setattr(module, "__file__", str(source.with_name(f"{name}.cpython-311-x86_64-linux-gnu.so")))
    run_cache._code_digest.cache_clear()
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
    monkeypatch.setattr(run_cache, "policy_of", lambda name: PluginPolicy() if name == "plugin" else policy_of(name))
    job = replace(JOB, policy="plugin")

    def key() -> str:
        run_cache._code_digest.cache_clear()
        return job_key(job)

    keys = []
    for text in ("rule = 1", "rule = 2", "rule = 1"):
        offered.write_text(text)
        keys.append(key())
    other.write_text("rule = 3")
    assert keys[0] == keys[2] == key() != keys[1]
    own = {path.name for path in run_cache._policy_files("plugin")} - {
        path.name for path in run_cache._policy_files("oracle")
    }
    assert own == {"offered.py"}
    run_cache._code_digest.cache_clear()
