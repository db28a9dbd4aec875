from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gorgo.errors import TraceError
from gorgo.lab.demo import DemoOptions, run_demo
from gorgo.lab.traces import TraceFilters


@pytest.mark.system  # the next one runs the same fleet with a tuner
def test_the_demo_runs_each_policy_on_a_fleet_of_real_processes(tmp_path: Path) -> None:
    options = DemoOptions(
        policies=("gorgo", "random"),
        filters=TraceFilters(limit=8, max_input=3000, max_output=4),
        time_scale=0.1,
        out=tmp_path,
        show_progress=False,
    )
    rows = run_demo(options)
    assert [(row.policy, row.n, row.errors) for row in rows] == [("gorgo", 8, 0), ("random", 8, 0)]
    assert sum(rows[1].share.values()) == pytest.approx(1.0)
    assert set(rows[1].share) <= {"ashburn-0", "frankfurt-0", "seoul-0"}
    assert rows[0].weights == {"w_rtt": 0.5, "w_queue": 0.1}
    assert rows[0].cache_hit_estimated is not None
    assert json.loads((tmp_path / "results.json").read_text())[1]["policy"] == "random"
    assert (tmp_path / "gorgo" / "requests.jsonl").exists()


@pytest.mark.system
def test_a_demo_with_the_tuner_moves_weights_and_keeps_its_history(tmp_path: Path) -> None:
    told: list[str] = []
    filters = TraceFilters(limit=60, max_input=6000, max_output=2)
    options = DemoOptions(tune=True, filters=filters, time_scale=0.6, out=tmp_path, show_progress=False)
    (row,) = run_demo(options, on_words=told.append)
    assert (row.policy, row.n, row.errors, row.weights) == ("gorgo", 60, 0, None)
    history = json.loads((tmp_path / "gorgo" / "history.json").read_text())
    assert [one["number"] for one in history] == list(range(len(history)))
    assert len(history) >= 2
    assert history[1]["weights"] != history[0]["weights"]
    assert "the start" in told[0]
    assert "Traceback" not in (tmp_path / "gorgo" / "tune.log").read_text()


@pytest.mark.system  # tests/live/training/test_process.py trains in a process of its own
@pytest.mark.parametrize("policy", ["lodestar", "gorgo-residual"])
def test_a_policy_that_learns_does_so_within_the_demo(policy: str, tmp_path: Path) -> None:
    words: list[str] = []
    options = DemoOptions(policies=(policy,), filters=TraceFilters(max_output=2), out=tmp_path, show_progress=False)
    (row,) = run_demo(options, on_words=words.append)
    assert (row.policy, row.errors) == (policy, 0)
    (learned,) = words
    assert re.match(rf"{policy} learned: model \d+ \((mlp|residual)\) of \d+ outcomes", learned), learned
    log = (tmp_path / policy / "serve.log").read_text()
    assert "training_failed" not in log
    assert "Traceback" not in log


def test_a_trace_that_cannot_be_read_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        run_demo(DemoOptions(trace=tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(
    "by", [signal.SIGTERM, *(pytest.param(by, marks=pytest.mark.system) for by in (signal.SIGINT, signal.SIGKILL))]
)
def test_a_demo_that_is_ended_in_the_middle_ends_its_processes_and_leaves_nothing(
    tmp_path: Path, by: signal.Signals
) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "gorgo", "demo", "--policy", "gorgo"]
    # In a group of its own, so that a test that ends early can end what the demo has started.
    demo = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        children = _children_once_serving(demo.pid, tmp_path)
        demo.send_signal(by)
        demo.wait(timeout=20)
        deadline_s = time.monotonic() + 20
        while (left := [pid for pid in children if _runs(pid)]) and time.monotonic() < deadline_s:
            assert by == signal.SIGKILL, "a demo that may end in order waits for its processes"
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
    assert len(children) == 4
    assert left == []
    # Nobody can remove a folder after a SIGKILL.
    assert by == signal.SIGKILL or list(tmp_path.iterdir()) == []


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children_once_serving(pid: int, folder: Path) -> list[int]:
    """The four processes, as soon as the proxy has said that it listens."""
    deadline_s = time.monotonic() + 40
    while time.monotonic() < deadline_s:
        logs = list(folder.glob("gorgo-demo-*/*/serve.log"))
        if logs and "listening" in logs[0].read_text():
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the demo's proxy did not start")
