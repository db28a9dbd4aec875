""""""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gorgo.errors import FleetError
from gorgo.lab.demo import show_demo
from gorgo.lab.demo.run import Processes
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
        with pytest.raises(FleetError, match="a said nothing of the kind before it was ready:\n  ready on 7"):
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
