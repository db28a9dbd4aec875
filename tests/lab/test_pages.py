"""What a page shows of a command in virtual time: the command is run, and signs, orders and counts are the page's.

Every page is read. Commands that install, listen or take minutes are typed by `tests/packaging/test_guides.py`, which
holds no figure.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.policies import registry
from tests.packaging.guide import Step, agrees, steps

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "datasets" / "README.md"]
#: What is run here of what pages show.
RUN = ("gorgo simulate ", "gorgo rank ", "gorgo datasets describe ")
SHOWN = [
    (page, step)
    for page in PAGES
    for step in steps(page.read_text())
    if step.shown is not None and all(line.startswith(RUN) for line in step.typed.splitlines())
]
_RATIO = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def test_the_researcher_s_page_is_among_those_that_are_run() -> None:
    assert [step.typed.split()[:2] for page, step in SHOWN if page.stem == "first-hour-researcher"] == [
        ["gorgo", "datasets"],
        ["gorgo", "simulate"],
        ["gorgo", "simulate"],
        ["gorgo", "simulate"],
        ["gorgo", "datasets"],
        ["gorgo", "simulate"],
        ["gorgo", "simulate"],
        ["gorgo", "simulate"],
    ]


@pytest.mark.parametrize(("page", "step"), SHOWN, ids=[f"{page.stem}-{step.line}" for page, step in SHOWN])
def test_signs_orders_and_counts_of_a_page_are_those_of_its_command(
    page: Path, step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert step.shown is not None
    own_policy(page, tmp_path, monkeypatch)
    (tmp_path / "regions.yaml").write_bytes((ROOT / "regions.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    if any(name in step.typed for name in own_files(page, tmp_path)):
        own_trace(page, tmp_path)
    printed = "".join(printed_by(line) for line in step.typed.splitlines())
    assert agrees(step.shown, printed)
    said, found = sides(step.shown), iter(sides(printed))
    assert all(one in found for one in said)  # in this order; a page may leave rows out
    for column in (3, 6):  # p95 TTFT and p95 E2E
        for names, others in zip(order(step.shown, column), order(printed, column), strict=False):
            assert names == [name for name in others if name in names]
    assert facts(step.shown) <= facts(printed)


def printed_by(line: str) -> str:
    words = shlex.split(line)[1:]
    one_process = ["--jobs", "1"] if words[0] == "simulate" else []
    result = CliRunner().invoke(app, [*words, *one_process])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def own_policy(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer the policies that a page writes, as their entry points would."""
    offered = {}
    for name, text in re.findall(r"^cat > \w+/(\w+)\.py <<'END'\n(.*?)^END$", page.read_text(), re.MULTILINE | re.S):
        (folder / f"{name}.py").write_text(text)
        found = re.search(rf'^([\w-]+) = "({name}:\w+)"$', page.read_text(), re.MULTILINE)
        assert found, f"{page.name} names no entry point of {name}"
        offered[found[1]] = EntryPoint(found[1], found[2], registry.ENTRY_POINTS)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(os.fspath(folder))
    monkeypatch.setattr(registry, "_third_party", lambda: offered)


def own_files(page: Path, folder: Path) -> list[str]:
    """Write the files that a page writes into its folder; return their names, and that of the trace made of one."""
    found = re.findall(r"^cat > (\w+\.(?:py|yaml)) <<'END'\n(.*?)^END$", page.read_text(), re.MULTILINE | re.S)
    for name, text in found:
        (folder / name).write_text(text)
    return [*[name for name, _ in found], "requests.jsonl"]


def own_trace(page: Path, folder: Path) -> None:
    """Make the trace that a page makes with a program of its own and a conversion."""
    typed = [line for step in steps(page.read_text()) for line in step.typed.splitlines()]
    for line in typed:
        if re.fullmatch(r"python \w+\.py", line):
            runpy.run_path(os.fspath(folder / line.split()[1]))
        if line.startswith("gorgo datasets convert "):
            printed_by(line)


def sides(text: str) -> list[tuple[str, list[int]]]:
    """Of each row of ratios: -1 for an interval below 1, 1 for one above, 0 for one that has 1 in it."""
    rows = [(line.split()[0], _RATIO.findall(line)) for line in text.splitlines() if _RATIO.search(line)]
    return [(name, [(float(low) > 1) - (float(high) < 1) for _, low, high in found]) for name, found in rows]


def order(text: str, column: int) -> list[list[str]]:
    """Return the policies of each table by one of its columns, the lowest first."""
    tables = re.split(r"^─+$", text, flags=re.MULTILINE)
    rows = [[line.split() for line in one.splitlines() if re.match(r"[\w-]+ +(on|off|-) ", line)] for one in tables]
    return [[row[0] for row in sorted(one, key=lambda row: float(row[column + 1]))] for one in rows if one]


def facts(text: str) -> set[str]:
    """Return what follows from the data alone, and of ranks the order of means and the sign of the correlation."""
    found = {
        " ".join(line.split()) for line in text.splitlines() if re.match(r"(requests|distinct|input|block) ", line)
    }
    ranks = [float(mean.replace(",", "")) for mean in re.findall(r"^ +\d+ +\d+ +([\d,.]+) ", text, re.MULTILINE)]
    correlation = re.search(r"rho -?[\d.]+ \(95 %: (-?[\d.]+) to (-?[\d.]+)\)", text)
    if correlation:
        found.add(f"{[float(end) > 0 for end in correlation.groups()]}, ascending: {ranks == sorted(ranks)}")
    return found


def test_a_page_that_is_wrong_by_a_sign_or_an_order_is_found() -> None:
    row = "gorgo {} [{}, {}] 0.871 [0.785, 0.967]"
    assert sides(row.format("0.917", "0.888", "0.948")) == [("gorgo", [-1, -1])]
    assert sides(row.format("1.033", "1.007", "1.059")) == [("gorgo", [1, -1])]
    table = "────\na off 0 1 20 3 4 5 6\nb off 0 1 10 3 4 7 6\n"
    assert order(table, 3) == [["b", "a"]]
    assert order(table, 6) == [["a", "b"]]
    ranked = "   1  60  {}  2\n   2  67  738.9  4\nrho 0.499 (95 %: {} to 0.600)"
    assert facts(ranked.format("417.7", "0.384")) != facts(ranked.format("917.7", "0.384"))
    assert facts(ranked.format("417.7", "0.384")) != facts(ranked.format("417.7", "-0.1"))
