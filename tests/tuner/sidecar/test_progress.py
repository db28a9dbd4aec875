from __future__ import annotations

import io

from rich.console import Console

from tuner.sidecar.progress import LINE_EVERY_S, Progress, Reporter, line

PROGRESS = Progress(
    phase="comparing",
    generation=3,
    arm="offspring",
    weights={"w_rtt": 0.61234, "w_queue": 0.14},
    incumbent={"w_rtt": 0.5, "w_queue": 0.1},
    ttft_ms_p95=412.3,
    samples=40,
    needed=128,
)


def test_a_line_says_what_is_in_force_and_how_far_it_is() -> None:
    wanted = "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 40 of 128 samples"
    assert line(PROGRESS) == wanted


def test_a_log_gets_a_line_now_and_then() -> None:
    said: list[str] = []
    reporter = Reporter(said.append, said.append)
    for now in range(0, int(2.5 * LINE_EVERY_S), 10):
        reporter.show(PROGRESS, now=float(now))
    assert len(said) == 3


def test_a_terminal_has_one_line_that_changes() -> None:
    text = io.StringIO()
    said: list[str] = []
    reporter = Reporter(said.append, said.append, Console(file=text, force_terminal=True, width=120))
    reporter.show(PROGRESS, now=0.0)
    reporter.close()
    assert "generation 3 (offspring)" in text.getvalue()
    assert said == []
