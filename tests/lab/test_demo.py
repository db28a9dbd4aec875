from __future__ import annotations

import asyncio
import io
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
from rich.console import Console

from gorgo.errors import FleetError, TraceError
from gorgo.lab.datasets import DEMO_TRACE, load_requests, shipped_path
from gorgo.lab.demo import (
    MODEL,
    TUNED_TRACE,
    DemoFleet,
    DemoOptions,
    Processes,
    parted,
    run_demo,
    running_fleet,
    show_demo,
)
from gorgo.lab.replay import replay
from gorgo.lab.replay_client import ReplayOptions, ReplayReport
from gorgo.lab.traces import TraceFilters, load_trace
from tests.lab.test_results import row

SAYS_READY_AND_STAYS = "import time; print('ready on 7', flush=True); time.sleep(60)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SAYS_READY_AND_STAYS}"


def start(processes: Processes, name: str, code: str) -> None:
    processes.start_command(name, [sys.executable, "-c", code])


def running(processes: Processes, name: str) -> subprocess.Popen[bytes]:
    return processes._running[name]


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path, os.environ)


def test_a_process_is_ready_when_it_says_so_and_ended_when_the_block_is_left(processes: Processes) -> None:
    with processes:
        start(processes, "a", SAYS_READY_AND_STAYS)
        assert processes.wait_for_line("a", r"ready on (\d+)")[1] == "7"
        processes.check_alive()
        process = running(processes, "a")
    assert process.returncode == -15


def test_processes_are_ended_when_the_block_is_left_by_ctrl_c(processes: Processes) -> None:
    start(processes, "a", SAYS_READY_AND_STAYS)
    process = running(processes, "a")
    with pytest.raises(KeyboardInterrupt):
        _interrupted(processes)
    assert process.returncode is not None


def _interrupted(processes: Processes) -> None:
    with processes:
        raise KeyboardInterrupt


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with Processes(tmp_path, os.environ, stop_timeout_s=0.05) as processes:
        start(processes, "a", IGNORES_SIGTERM)
        processes.wait_for_line("a", "ready")
        process = running(processes, "a")
    assert process.returncode == -9


PUTS_IN_ORDER = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); {SAYS_READY_AND_STAYS}"


def test_one_that_puts_something_in_order_first_is_waited_for(processes: Processes) -> None:
    with processes:
        start(processes, "a", PUTS_IN_ORDER)
        processes.wait_for_line("a", "ready")
        process = running(processes, "a")
    assert process.returncode == 3


def test_what_a_process_said_is_given_when_it_has_ended_well(processes: Processes) -> None:
    with processes:
        start(processes, "a", PUTS_IN_ORDER.replace("exit(3)", "exit(0)"))
        processes.wait_for_line("a", "ready")
        assert processes.finish("a") == "ready on 7\n"
        processes.check_alive()
        start(processes, "b", "; ".join(f"print({number})" for number in range(9)) + "; raise SystemExit(2)")
        with pytest.raises(FleetError, match=r"^b ended with exit code 2:\n  1\n  2\n  3\n  4\n  5\n  6\n  7\n  8$"):
            processes.wait("b")


def test_one_that_ends_before_it_is_ready_is_quoted(processes: Processes) -> None:
    with processes:
        start(processes, "a", "raise SystemExit('no such port')")
        with pytest.raises(FleetError, match="a ended with exit code 1 before it was ready:\n  no such port"):
            processes.wait_for_line("a", "ready")
        with pytest.raises(FleetError, match="a ended with exit code 1:"):
            processes.check_alive()


def test_one_that_says_something_else_is_not_waited_for_for_ever(processes: Processes) -> None:
    with processes:
        start(processes, "a", SAYS_READY_AND_STAYS)
        processes.wait_for_line("a", "ready")
        with pytest.raises(
            FleetError, match=r"^a was not ready within 0.05 s; expected 'something else' .*less to do:\n  ready on 7"
        ):
            processes.wait_for_line("a", "something else", timeout_s=0.05)


def shown(*policies: str, out: Path | None = None) -> str:
    text = io.StringIO()
    show_demo([row(policy) for policy in policies], Console(file=text, width=20), out=out)
    return text.getvalue()


def test_the_end_says_that_engines_are_simulated_and_where_to_look_next() -> None:
    text = shown("gorgo", "random")
    assert "The proxy is real; engines and round trips are simulated" in text
    assert "gorgo demo --trace" in text
    assert "…" not in text


def test_what_is_kept_is_named() -> None:
    assert "runs/one: results.json" in shown("gorgo", out=Path("runs/one"))
    assert "gorgo report runs/one  " in shown("gorgo", out=Path("runs/one"))
    assert "results.json" not in shown("gorgo")


def test_no_policy_at_all_is_no_error() -> None:
    assert "Where to look next" in shown()


# killed_region


KILLED = "seoul-0"


async def kill_while_it_is_busy(fleet: DemoFleet) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(_in_flight, fleet):
            await asyncio.sleep(0.02)
    fleet.processes._running[KILLED].kill()


def _in_flight(fleet: DemoFleet) -> int:
    replicas = fleet._admin("/admin/fleet")["replicas"]
    return int(next(replica["in_flight_requests"] for replica in replicas if replica["name"] == KILLED))


async def replayed_with_a_kill(fleet: DemoFleet, folder: Path) -> ReplayReport:
    requests = load_trace(shipped_path(DEMO_TRACE), TraceFilters(limit=40, max_input=6000, max_output=8))
    options = ReplayOptions(
        trace=Path("t"), url=fleet.url, model=MODEL, time_scale=0.4, out=folder, show_progress=False
    )
    async with asyncio.TaskGroup() as group:
        report = group.create_task(replay(requests, options))
        group.create_task(kill_while_it_is_busy(fleet))
    return report.result()


@pytest.mark.system
def test_killing_a_region_loses_no_request_that_had_no_content_yet(tmp_path: Path) -> None:
    with running_fleet("round-robin", folder=tmp_path, seed=0) as fleet:
        report = asyncio.run(replayed_with_a_kill(fleet, tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == report.row.n == 40
    assert [row for row in rows if row["error"] is not None and row["ttft_ms"] is None] == []
    assert sum(row["replica"] == KILLED for row in rows) < 13, "the killed one went on getting its third"


# demo


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


def test_the_last_quarter_of_a_trace_is_held_out_and_begins_at_zero() -> None:
    requests = load_requests(TUNED_TRACE, TraceFilters(limit=40), seed=0)
    first_part, held_out = parted(requests)
    assert first_part == requests[:30]
    assert [one.index for one in held_out] == [one.index for one in requests[30:]]
    assert held_out[0].timestamp_s == 0.0
    assert held_out[-1].timestamp_s == pytest.approx(requests[-1].timestamp_s - requests[30].timestamp_s)


def test_a_trace_of_one_request_has_no_part_to_hold_out() -> None:
    with pytest.raises(TraceError, match="expected 2 requests or more, found 1"):
        run_demo(DemoOptions(tune=True, filters=TraceFilters(limit=1)))


@pytest.mark.system
def test_a_demo_with_the_tuner_has_three_rows_and_keeps_its_history(tmp_path: Path) -> None:
    words: list[str] = []
    filters = TraceFilters(limit=240, max_output=2)
    options = DemoOptions(tune=True, filters=filters, out=tmp_path, show_progress=False)
    default, tuned, frozen = run_demo(options, on_words=words.append)
    assert [(row.policy, row.n, row.errors) for row in (default, tuned, frozen)] == [
        ("gorgo, default", 60, 0),
        ("gorgo, while tuned", 180, 0),
        ("gorgo, frozen", 60, 0),
    ]
    assert default.weights == {"w_rtt": 0.5, "w_queue": 0.1}
    assert tuned.weights is None
    folder = tmp_path / "gorgo-while-tuned"
    history = json.loads((folder / "history.json").read_text())
    assert [one["number"] for one in history] == list(range(len(history)))
    incumbent = [one["weights"] for one in history if one["accepted"]][-1]
    assert frozen.weights == pytest.approx(incumbent), "what the tuner accepted last is frozen"
    assert "the start" in words[0]
    assert "Traceback" not in (folder / "tune.log").read_text()


@pytest.mark.system  # tests/live/training/test_service.py trains in a process of its own
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


@pytest.mark.system
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
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
