"""The lists of faults: entries are found by their text, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import Equivalents, Fault, fault_of, known
from tests.mutants.mutations import Mutant

_EQUIVALENT = """
[[equivalent]]
file = "gorgo/a.py"
old = "while a < b:"
new = "while a <= b:"
reason = "a is never b"
"""
_KNOWN = """
[[fault]]
does = "one too many"
file = "a.py"
old = "return n"
new = "return n + 1"
"""


def test_every_known_fault_stands_in_its_file_once_and_changes_it() -> None:
    faults = list(known(ROOT))
    assert len(faults) >= 22
    for fault in faults:
        assert fault.text != (ROOT / fault.path).read_text()
        compile(fault.text, fault.path, "exec")


def test_a_known_fault_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(n):\n    return n\n")
    (tmp_path / "known.toml").write_text(_KNOWN)
    (fault,) = known(tmp_path, tmp_path / "known.toml")
    assert (fault.line, fault.old, fault.new) == (2, "return n", "return n + 1")
    assert fault.text == "def f(n):\n    return n + 1\n"


@pytest.mark.parametrize(("text", "times"), [("return m", "0 times"), ("return n\nreturn n", "2 times")])
def test_a_known_fault_whose_text_has_changed_is_named(tmp_path: Path, text: str, times: str) -> None:
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "known.toml").write_text(_KNOWN)
    with pytest.raises(LookupError, match=f"'one too many': a.py has {times}"):
        list(known(tmp_path, tmp_path / "known.toml"))


@pytest.mark.parametrize(
    ("path", "before", "after", "there"),
    [
        ("gorgo/a.py", "while a < b:\n    pass", "while a <= b:\n    pass", True),
        ("gorgo/a.py", "c = 1\nif c:\n    while a < b:\n        pass", "", True),
        ("gorgo/b.py", "while a < b:\n    pass", "", False),
        ("gorgo/a.py", "while a < c:\n    pass", "", False),
    ],
)
def test_an_equivalent_is_known_by_its_lines_and_not_by_their_place(
    tmp_path: Path, path: str, before: str, after: str, there: bool
) -> None:
    (tmp_path / "equivalent.toml").write_text(_EQUIVALENT)
    line = before.splitlines().index(next(line for line in before.splitlines() if "while" in line)) + 1
    fault = fault_of(Mutant(path, line, "swap_op", 0), before)
    assert fault is not None
    assert not after or fault.text == after
    assert (fault in Equivalents(tmp_path / "equivalent.toml")) is there


def test_every_equivalent_of_the_list_says_why() -> None:
    assert all(len(reason.split()) > 3 for reason in Equivalents().reasons.values())


def test_every_equivalent_changes_lines_that_stand_in_its_file_once() -> None:
    for path, old, new in Equivalents().reasons:
        lines = [line.strip() for line in (ROOT / path).read_text().splitlines()]
        wanted = old.splitlines()
        places = [at for at in range(len(lines)) if lines[at : at + len(wanted)] == wanted]
        assert (len(places), old != new) == (1, True), f"equivalent.toml: {path}: {old}"


def test_a_mutant_that_is_no_other_program_is_no_fault() -> None:
    fault = Fault("a.py", 1, "number", "a = 1", "a = 2", "a = 2", "a.py:1 number 0")
    assert fault_of(Mutant("a.py", 1, "number", 0), "a = 1") == fault
    assert fault_of(Mutant("a.py", 1, "if_exp", 0), "def f(): return 1 if 0 else 2") is not None
