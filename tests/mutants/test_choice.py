"""The draw is seeded and hangs on the text of a line alone; tests are chosen by what they run, nearest first."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage.numbits import nums_to_numbits

from tests.mutants.choice import affordable, drawn, is_mirror, rounds, sample, sources
from tests.mutants.faults import Equivalents, Fault
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.reach import TracedTest

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
