"""Every figure of the documents that a command makes against that command's stored result, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.documents import DOCS, ROOT
from tests.figures.__main__ import show
from tests.figures.marked import Part, parts_of, problems, tables_outside
from tests.figures.stored import FOLDER, read_stored, stored_names
from tests.figures.table import FIGURES, NOT_STORED, view_of

PAGES = [
    ROOT / "README.md",
    ROOT / "datasets/README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "policies").glob("*.md")),
]
#: First columns of tables that hold figures which nothing has measured: other tests hold those against the code.
NOT_MEASURED = {"replica", "label", "tuner label", "code", "policy in table 6"}
#: Pages that still name commits; a page leaves this set when it is rewritten.
WITH_COMMITS: set[str] = set()
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b")


def all_parts() -> Iterator[Part]:
    for page in PAGES:
        yield from parts_of(page.read_text())[0]


def test_marked_figures_are_those_of_their_stored_results() -> None:
    wrong = [
        f"{page.name}, line {part.line}: {problem}"
        for page in PAGES
        for part in parts_of(page.read_text())[0]
        if part.stored
        for problem in problems(part.text, view_of(part.names))
    ]
    assert wrong == []


def test_every_stored_result_is_shown_and_every_shown_one_is_stored() -> None:
    shown = {name for part in all_parts() if part.stored for name in part.names}
    assert shown == set(stored_names()) <= set(FIGURES)


def test_a_stored_result_names_commands_machine_commit_and_date() -> None:
    for name in stored_names():
        stored = read_stored(name)
        assert [run.command for run in stored.runs] == list(FIGURES[name].commands)
        assert re.fullmatch(r"[0-9a-f]{7}", stored.commit), name
        for run in stored.runs:
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run.date), name
            assert "cores" in run.machine, name
            assert "load average" in run.machine, name
            assert run.result, name


def test_what_was_measured_and_is_not_stored_is_listed_with_its_commits(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part for part in all_parts() if not part.stored]
    assert {name for part in parts for name in part.names} == set(NOT_STORED)
    assert [name for name, one in NOT_STORED.items() if not (one.why and COMMIT.search(one.commits))] == []
    show()
    printed = capsys.readouterr().out
    assert [name for name in (*FIGURES, *NOT_STORED) if not re.search(rf"^{name} ", printed, re.M)] == []


def test_no_measured_table_is_without_a_mark() -> None:
    for page in PAGES:
        _, outside = parts_of(page.read_text())
        assert [header for header in tables_outside(outside) if header[0] not in NOT_MEASURED] == [], page


def test_no_page_names_a_commit() -> None:
    """The stored result has it, and for the others the list of what is not stored."""
    pages = [
        page for page in PAGES if page.name not in {"overload.md", "security.md", "status-page.md"}
    ]  # still to be rewritten
    named = [(page.name, found) for page in pages for found in COMMIT.findall(page.read_text())]
    assert named == []


def test_pages_link_to_the_folder_of_results() -> None:
    assert f"]({FOLDER.name}/" in (DOCS / "README.md").read_text()
