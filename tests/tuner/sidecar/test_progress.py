""""""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from tests.tuner.history.examples import generation
from tuner.campaign.generation import Generation
from tuner.sidecar.progress import LINE_EVERY_S, LinePrinter, Progress, Reporter, line, verdict

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


@pytest.mark.parametrize(
    ("progress", "wanted"),
    [
        (
            replace(PROGRESS, samples=128),
            "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 128 of 128 samples",
        ),
        (
            replace(PROGRESS, phase="warming", samples=45, needed=16),
            "warming: w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 45 samples (16 needed)",
        ),
        (replace(PROGRESS, phase="warming"), "warming: w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 40 of 128 samples"),
        (
            replace(PROGRESS, phase="new", weights=None, ttft_ms_p95=None),
            "new: w_rtt=0.5 w_queue=0.1, 40 of 128 samples",
        ),
        (
            replace(PROGRESS, phase="frozen", trouble="frozen: by hand", samples=0),
            "frozen (frozen: by hand): w_rtt=0.6123 w_queue=0.14, p95 TTFT 412 ms, 0 of 128 samples",
        ),
        (
            replace(PROGRESS, needed=0, detail="3 of 20 pairs", ttft_ms_p95=None),
            "comparing, generation 3 (offspring): w_rtt=0.6123 w_queue=0.14, 40 samples, 3 of 20 pairs",
        ),
    ],
)
def test_a_line_leaves_out_what_there_is_not(progress: Progress, wanted: str) -> None:
    assert line(progress) == wanted


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (generation(0), "generation 0 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: the start"),
        (
            generation(0, incumbent_objective_ms=1700.0),
            "generation 0 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: the start",
        ),
        (
            generation(1, incumbent_objective_ms=1700.0, accepted=False, reason="r"),
            "generation 1 rejected: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms against 1700 ms: r",
        ),
        (generation(1, reason="r"), "generation 1 accepted: w_rtt=0.5 w_queue=0.1, p95 TTFT 1584 ms: r"),
        (
            generation(1, objective_ms=None, incumbent_objective_ms=1700.0, reason="r"),
            "generation 1 accepted: w_rtt=0.5 w_queue=0.1: r",
        ),
    ],
)
def test_a_finished_generation_is_one_line(row: Generation, wanted: str) -> None:
    assert verdict(row) == wanted


def test_a_log_gets_a_line_a_minute_and_not_sooner() -> None:
    said: list[str] = []
    reporter = Reporter(said.append, said.append)
    for now in (100.0, 100.0 + LINE_EVERY_S - 0.1, 100.0 + LINE_EVERY_S, 100.0 + 2 * LINE_EVERY_S - 0.1):
        reporter.show(PROGRESS, now=now)
    assert len(said) == 2
    assert LINE_EVERY_S == 60.0
    reporter.close()


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


def test_words_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter()
    printer.say("generation 1 accepted: [w]=0.5")
    printer.complain("no answer")
    assert capsys.readouterr() == ("generation 1 accepted: [w]=0.5\n", "gorgo: no answer\n")


def test_json_lines_have_time_level_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = LinePrinter("json")
    printer.say("x" * 300)
    printer.complain("no answer")
    printed = capsys.readouterr()
    news, trouble = json.loads(printed.out), json.loads(printed.err)
    assert (news["level"], news["event"], news["text"]) == ("info", "tuner", "x" * 300)
    assert (trouble["level"], trouble["text"]) == ("warning", "no answer")
    assert news["time"] <= trouble["time"]
    assert printer.terminal is None


@pytest.mark.parametrize(("level", "out", "err"), [("info", 1, 1), ("warning", 0, 1), ("error", 0, 0)])
def test_lines_below_the_level_are_not_printed(
    level: str, out: int, err: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = LinePrinter("text", level)
    printer.say("news")
    printer.complain("trouble")
    printed = capsys.readouterr()
    assert (printed.out.count("\n"), printed.err.count("\n")) == (out, err)
