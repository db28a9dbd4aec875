"""What is changed, what is left out as unseen, and that a mutant is found again by its place."""

from __future__ import annotations

import pytest

from tests.mutants.mutations import Mutant, difference, mutants, mutated, same_program


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
