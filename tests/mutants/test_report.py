"""Shares and the table of survivors."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.mutants.faults import Fault
from tests.mutants.report import Row, as_json, package_of, share_killed, shown
from tests.mutants.trial import Tried, Verdict


def row(path: str, verdict: Verdict, line: int = 7) -> Row:
    fault = Fault(path, line, "swap_op", "a < b", "a <= b", "the whole file", f"{path}:{line}")
    return Row(fault, Tried(verdict, 12, 3.4, "tests/test_a.py::test_it"))


@pytest.mark.parametrize(
    ("verdicts", "share"),
    [
        (["failed"], 1.0),
        (["failed", "timed out", "survived", "not reached"], 0.5),
        (["not reached"], 0.0),
        ([], 1.0),
    ],
)
def test_a_fault_dies_if_a_test_fails_or_does_not_end(verdicts: list[Verdict], share: float) -> None:
    assert share_killed([row("gorgo/core/a.py", verdict) for verdict in verdicts]) == share


def test_the_report_shows_survivors_and_shares_by_package() -> None:
    rows = [row("gorgo/core/a.py", "survived"), row("gorgo/core/b.py", "failed"), row("tuner/c.py", "failed")]
    out = io.StringIO()
    Console(file=out, width=120).print(shown(rows))
    text = [line.rstrip() for line in out.getvalue().splitlines()]
    assert text[:3] == ["gorgo/core/a.py:7  swap_op, survived, 12 tests in 3 s", "    - a < b", "    + a <= b"]
    shares = {line.split()[0]: line.split()[-1] for line in text if line.endswith("%")}
    assert shares == {"gorgo/core": "50.0%", "tuner": "100.0%", "swap_op": "66.7%", "all": "66.7%"}
    assert "gorgo/core/b.py" not in out.getvalue()


def test_the_json_has_every_fault_without_the_text_of_its_file() -> None:
    (one,) = as_json([row("tuner/a.py", "timed out")])
    assert (one["path"], one["line"], one["verdict"], one["by"]) == (
        "tuner/a.py", 7, "timed out", "tests/test_a.py::test_it",
    )  # fmt: skip
    assert "text" not in one


@pytest.mark.parametrize(
    ("path", "package"),
    [("gorgo/core/a.py", "gorgo/core"), ("tuner/campaign/a.py", "tuner"), ("gorgo/lab/replay/a.py", "gorgo/lab")],
)
def test_packages_are_those_of_the_draw(path: str, package: str) -> None:
    assert package_of(row(path, "failed")) == package
