"""Lines of the sidecar: words or objects, down to a level."""

from __future__ import annotations

import json

import pytest

from tuner.sidecar.line_printer import LinePrinter


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
