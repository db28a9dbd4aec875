"""Faults: what is changed, what is drawn and which tests are chosen, and the table of survivors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from coverage.numbits import nums_to_numbits
from rich.console import Console

from tests.mutants.__main__ import ROOT
from tests.mutants.choice import affordable, drawn, is_mirror, rounds, sample, sources
from tests.mutants.faults import Equivalents, Fault, fault_of, known
from tests.mutants.mutations import Mutant, difference, mutants, mutated, same_program
from tests.mutants.reach import TracedTest
from tests.mutants.report import Row, as_json, package_of, share_killed, shown
from tests.mutants.trial import Tried, Verdict

# --- What is changed, what is left out as unseen, and that a mutant is found again by its place.


def changed(source: str) -> set[str]:
    """Every other text of one line of source."""
    texts = [mutated(source, mutant) for mutant in mutants("a.py", source)]
    return {difference(source, text)[2] for text in texts if text is not None}


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("a = b < 2", {"a = b <= 2", "a = b < 3", "a = None"}),
        ("a += 2.5", {"a -= 2.5", "a = 2.5", "a += 3.5"}),
        ("a = 100", {"a = 200", "a = None"}),
        ("close(a)", {"...", "close(None)"}),
        ("return f(a, b)", {"return f(None, b)", "return f(a, None)", "return f(b)", "return f(a, )"}),
        ("return a and b", {"return a or b", "return (a)", "return (b)"}),
        ("return 1 if a else 0", {"return 2 if a else 0", "return 1 if a else 1"}
         | {"return 1 if (a) and False else 0", "return 1 if (a) or True else 0"}),
        ("if a: pass", {"if not (a): pass"}),
        ("if not a: pass", {"if a: pass"}),
        ("while a.b: pass", {"while not (a.b): pass"}),
        ("a: bool = True", {"a: bool = False", "a: bool = None"}),
        ("return 'code'", {"return 'XXcodeXX'", "return 'CODE'"}),
    ],
)  # fmt: skip
def test_a_line_becomes_each_of_these(line: str, others: set[str]) -> None:
    assert changed(line) == others


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: int | None) -> dict[str, list[float]]: ...",
        '"""A module of three sentences. It is 1. It is not 2."""',
        "class A:\n    __slots__ = ('a', 'b')",
        "__all__ = ['a', 'b']",
        "def __repr__(self):\n    return f'{1 + 1}'",
        "if TYPE_CHECKING:\n    A = 1",
        "assert a < 1, 'never'",
        "from a import b",
        "Handler = Callable[[int], None]",
        "Action = Start | Stop",
        "_Item = TypeVar('_Item')",
        "@dataclass(frozen=True, slots=True)\nclass A:\n    a: int",
        "HELP = 'how many requests were answered'",
        "WRONG = f'{a + 1} is more than {b - 1}'",
    ],
)
def test_what_no_test_can_see_is_left_out(source: str) -> None:
    assert mutants("a.py", source) == []


def test_a_message_is_left_out_and_the_code_beside_it_is_not() -> None:
    assert changed("raise Refused(400, f'{a + 1} requests are too many')") == {
        "raise Refused(None, f'{a + 1} requests are too many')",
        "raise Refused(f'{a + 1} requests are too many')",
        "raise Refused(800, f'{a + 1} requests are too many')",
    }


def test_strict_is_left_out_as_an_assertion_is() -> None:
    assert changed("zip(a, b, strict=True)") == {
        "zip(None, b, strict=True)",
        "zip(a, None, strict=True)",
        "zip(b, strict=True)",
        "zip(a, strict=True)",
        "...",
    }


def test_mutants_of_a_line_are_told_apart_by_their_place() -> None:
    source = "a = 1\nb = c(1, 2)\n"
    numbers = [mutant for mutant in mutants("a.py", source) if mutant.operator == "number" and mutant.line == 2]
    assert numbers == [Mutant("a.py", 2, "number", 0), Mutant("a.py", 2, "number", 1)]
    assert [mutated(source, one) for one in numbers] == ["a = 1\nb = c(2, 2)\n", "a = 1\nb = c(1, 3)\n"]


@pytest.mark.parametrize(("text", "same"), [("a = (1)", True), ("a = 2", False), ("a = = 1", True)])
def test_a_change_that_is_no_other_program_is_known(text: str, same: bool) -> None:
    assert same_program("a = 1", text) is same


def test_a_difference_is_the_lines_that_differ_without_indentation() -> None:
    before = "def f():\n    a = 1\n    b = 2\n    return a\n"
    assert difference(before, before.replace("b = 2", "b = 3")) == (3, "b = 2", "b = 3")
    assert difference(before, before.replace("    b = 2\n", "")) == (3, "b = 2", "")
    assert difference("a\na\n", "a\na\na\n") == (3, "", "a")


# --- The lists of faults: entries are found by their text, wherever it stands.


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


# --- The draw is seeded and hangs on the text of a line alone; tests are chosen by what they run, nearest first.


_SOURCE = "def f(a):\n" + "".join(f"    b{n} = a < {n} and g(a, {n})\n" for n in range(12)) + "    return b1\n"
_PATH = "gorgo/core/a.py"
_NONE = Path(__file__).with_name("equivalent.toml")


def lines(source: str, seed: int) -> list[str]:
    """What is drawn, as texts of lines with the operator."""
    texts = {_PATH: source}
    found = drawn(mutants(_PATH, source), texts, seed)
    return [f"{source.splitlines()[one.line - 1]} {one.operator} {one.place}" for one in found]


def test_a_seed_draws_the_same_and_another_seed_others() -> None:
    assert lines(_SOURCE, 1) == lines(_SOURCE, 1)
    assert lines(_SOURCE, 1)[:6] != lines(_SOURCE, 2)[:6]


def test_a_line_is_drawn_once_and_every_line_is_drawn() -> None:
    found = list(drawn(mutants(_PATH, _SOURCE), {_PATH: _SOURCE}, 0))
    assert sorted(one.line for one in found) == list(range(2, 14))


def test_lines_that_come_or_go_leave_the_draw_of_others_as_it_is() -> None:
    longer = _SOURCE.replace("def f(a):\n", "def f(a):\n    c = 1\n    h(c)\n")
    before, after = lines(_SOURCE, 3), lines(longer, 3)
    assert [line for line in after if "c" not in line.split()[0]] == before


def test_operators_weigh_the_same_however_many_places_they_have() -> None:
    texts = {_PATH: "".join(f"a{n} = f({n})\n" for n in range(600))}
    places = [Mutant(_PATH, line, "arguments", place) for line in range(1, 601) for place in range(9)]
    whole = [Mutant(_PATH, line, "assignment", 0) for line in range(1, 601)]
    found = [one.operator for one in drawn([*places, *whole], texts, 0)]
    assert abs(found.count("arguments") - 300) < 50  # four times the deviation of 600 fair coins


def test_a_sample_leaves_out_equivalents_and_goes_on_to_the_next(tmp_path: Path) -> None:
    texts, found = {_PATH: _SOURCE}, list(drawn(mutants(_PATH, _SOURCE), {_PATH: _SOURCE}, 0))
    first, second, third = sample(found, texts, 3, Equivalents(_NONE))
    listed = tmp_path / "equivalent.toml"
    listed.write_text(
        f"[[equivalent]]\nfile='{_PATH}'\nold='''{second.old}'''\nnew='''{second.new}'''\nreason='it is said to be'"
    )
    assert list(sample(found, texts, 2, Equivalents(listed))) == [first, third]


def test_sources_are_of_the_packages_that_are_wanted(tmp_path: Path) -> None:
    for name in ("gorgo/core/a.py", "gorgo/proxy/b.py", "gorgo/cli/c.py", "experiments/d.py", "tuner/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sources(tmp_path) == ["gorgo/core/a.py", "gorgo/proxy/b.py", "tuner/e.py"]
    assert sources(tmp_path, ["tuner", "core"]) == ["gorgo/core/a.py", "tuner/e.py"]


@pytest.mark.parametrize(
    ("test_file", "path", "mirrored"),
    [
        ("tests/core/latency/test_ttft.py", "gorgo/core/latency/ttft.py", True),
        ("tests/core/latency/test_ttft_properties.py", "gorgo/core/latency/ttft.py", True),
        ("tests/core/latency/test_ttfts.py", "gorgo/core/latency/ttft.py", False),
        ("tests/live/admin/page/test_routes.py", "gorgo/live/admin/page.py", True),
        ("tests/proxy/test_ttft.py", "gorgo/core/latency/ttft.py", False),
        ("tests/tuner/campaign/test_comparison.py", "tuner/campaign/comparison.py", True),
    ],
)
def test_mirrors_are_known_by_path(test_file: str, path: str, mirrored: bool) -> None:
    assert is_mirror(test_file, path) is mirrored


_TEXTS = {
    _PATH: "LIMIT = 3\n\ndef f(a):\n    return a\n",
    "gorgo/core/constants.py": "TIE = 1.0\n",
    "gorgo/core/b.py": "from gorgo.core.constants import TIE\n\ndef g():\n    return TIE\n",
}


def traced(name: str, seconds: float = 0.1, **ran: int) -> TracedTest:
    """A test that runs one line of each of these modules of `gorgo.core`."""
    return TracedTest(name, seconds, {f"gorgo/core/{name}.py": nums_to_numbits([line]) for name, line in ran.items()})


def fault(path: str, line: int) -> Fault:
    return Fault(path, line, "number", "", "", "", "")


def names(found: list[list[TracedTest]]) -> list[list[str]]:
    return [[test.id for test in tests] for tests in found]


def test_tests_that_run_the_line_come_first_and_of_those_the_mirrored_ones() -> None:
    far, near = traced("tests/sim/test_x.py::far", a=4), traced("tests/core/test_a.py::near", 0.5, a=4)
    other = traced("tests/core/test_a.py::other", b=4)
    unrelated = traced("tests/core/test_b.py::unrelated", b=4)
    found = rounds(fault(_PATH, 4), [far, other, unrelated, near], _TEXTS)
    assert names(found) == [[near.id], [far.id, other.id]]


def test_a_line_that_runs_on_import_is_tried_by_those_that_run_its_functions_or_its_users() -> None:
    test, user = traced("tests/sim/test_x.py::one", a=4), traced("tests/sim/test_y.py::two", b=4)
    assert names(rounds(fault(_PATH, 1), [test, user], _TEXTS)) == [[test.id]]
    assert names(rounds(fault("gorgo/core/constants.py", 1), [test, user], _TEXTS)) == [[user.id]]


def test_a_line_that_no_test_runs_itself_is_tried_by_the_mirrored_folder() -> None:
    near, far = traced("tests/core/test_b.py::near"), traced("tests/sim/test_a.py::far")
    assert names(rounds(fault(_PATH, 4), [near, far], _TEXTS)) == [[near.id]]
    assert rounds(fault(_PATH, 4), [far], _TEXTS) == []


def test_as_many_tests_as_there_is_time_for_of_as_many_files_as_can_be() -> None:
    tests = [traced(f"a.py::{n}", 1.0 + n) for n in range(4)] + [traced(f"b.py::{n}", 0.5 + n) for n in range(4)]
    assert [test.id for test in affordable(tests, 4.5)] == ["a.py::0", "b.py::0", "b.py::1"]
    assert [test.id for test in affordable(tests[3:4], 0.1)] == ["a.py::3"]  # one is always tried


# --- Shares and the table of survivors.


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
