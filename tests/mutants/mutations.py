"""Every mutant of a source file, and the text that it makes.

The operators are mutmut's, and three more: a call whose result is unused is dropped, a condition is negated, one side
of `and` or `or` is dropped. Left out is what no test can see: annotations, type aliases, docstrings and other prose,
`__repr__`, `__slots__`, imports, `if TYPE_CHECKING`, assertions, options of `dataclass`, `strict`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_number, operator_swap_op

#: One more or less of so many is no fault that a test should see: they are doubled.
MANY = 100
#: A text of so many words is written for people.
PROSE_WORDS = 3
_TYPE_NAME = m.Name(m.MatchRegex(r"_?[A-Z][a-z]\w*"))
_TYPE = m.Subscript() | m.BinaryOperation(operator=m.BitOr()) | m.Call(func=m.Name("TypeVar") | m.Name("NewType"))
_UNSEEN = (
    m.Annotation()
    | m.Assert()
    | m.Import()
    | m.ImportFrom()
    | m.FunctionDef(name=m.Name("__repr__"))
    | m.If(test=m.Name("TYPE_CHECKING"))
    | m.Expr(value=m.SimpleString() | m.ConcatenatedString())
    | m.Assign(targets=[m.AssignTarget(target=m.Name("__slots__") | m.Name("__all__"))])
    | m.Assign(targets=[m.AssignTarget(target=_TYPE_NAME)], value=_TYPE)
    | m.Decorator(decorator=m.Call(func=m.Name("dataclass")))
    | m.Arg(keyword=m.Name("help") | m.Name("description") | m.Name("strict"))
)
_Operator = Callable[[Any], Iterable[cst.CSTNode]]
_BLANK = cst.BaseParenthesizableWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Comment


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the `place`-th, from 0, that `operator` makes on `line`."""

    path: str
    line: int
    operator: str
    place: int


def mutants(path: str, source: str) -> list[Mutant]:
    """All of a file, in the order of its nodes."""
    return [mutant for mutant, _, _ in _changes(path, source)[1]]


def mutated(source: str, wanted: Mutant) -> str | None:
    """The file after the change; None if it is no Python or the same program."""
    module, changes = _changes(wanted.path, source)
    old, new = next((old, new) for mutant, old, new in changes if mutant == wanted)
    changed = module.deep_replace(old, new)
    assert isinstance(changed, cst.Module), "no operator removes a module"
    return None if same_program(source, changed.code) else changed.code


def same_program(source: str, changed: str) -> bool:
    """Whether the second text compiles to the first one's program; true too if it is no Python."""
    try:
        return ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return True


def difference(source: str, changed: str) -> tuple[int, str, str]:
    """First line that differs, and the lines there before and after, without indentation."""
    before, after = source.splitlines(), changed.splitlines()
    short = min(len(before), len(after))
    head = next((at for at in range(short) if before[at] != after[at]), short)
    tail = next((at for at in range(short - head) if before[-1 - at] != after[-1 - at]), short - head)
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    return head + 1, "\n".join(line.strip() for line in old), "\n".join(line.strip() for line in new)


def _changes(path: str, source: str) -> tuple[cst.Module, list[tuple[Mutant, cst.CSTNode, cst.CSTNode]]]:
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = _Visitor(path)
    wrapper.visit(visitor)
    return wrapper.module, visitor.found


class _Visitor(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, path: str) -> None:
        super().__init__()
        self.found: list[tuple[Mutant, cst.CSTNode, cst.CSTNode]] = []
        self._path = path
        self._places: Counter[tuple[int, str]] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _BLANK) or is_unseen(node):
            return False
        for kind, operator in _OPERATORS:
            if isinstance(node, kind):
                for new in operator(node):
                    self._add(operator.__name__.removeprefix("operator_"), node, new)
        return True

    def _add(self, operator: str, old: cst.CSTNode, new: cst.CSTNode) -> None:
        where = self.get_metadata(PositionProvider, old)
        assert isinstance(where, CodeRange), "every node has its place"
        line = where.start.line
        self.found.append((Mutant(self._path, line, operator, self._places[line, operator]), old, new))
        self._places[line, operator] += 1


def is_unseen(node: cst.CSTNode) -> bool:
    """Whether no test can see a change within this node."""
    if isinstance(node, cst.Assign | cst.AnnAssign | cst.Arg) and node.value is not None and is_prose(node.value):
        return True
    return is_prose(node) or m.matches(node, _UNSEEN)


def is_prose(node: cst.CSTNode) -> bool:
    """Whether it is a text for people: a message, a description, help."""
    return len(_words(node).split()) >= PROSE_WORDS


def _words(node: cst.CSTNode) -> str:
    if isinstance(node, cst.SimpleString):
        return node.evaluated_value if isinstance(node.evaluated_value, str) else ""
    if isinstance(node, cst.FormattedString):
        return " ".join(part.value if isinstance(part, cst.FormattedStringText) else "x" for part in node.parts)
    if isinstance(node, cst.ConcatenatedString):
        return f"{_words(node.left)} {_words(node.right)}"
    return ""


def drop_call(node: cst.Expr) -> Iterable[cst.CSTNode]:
    """A call for its effect is not made."""
    if isinstance(node.value, cst.Call | cst.Await):
        yield cst.Expr(cst.Ellipsis())


def negate(node: cst.If | cst.While) -> Iterable[cst.CSTNode]:
    """A branch is taken where it was not."""
    if not m.matches(node.test, m.UnaryOperation(operator=m.Not())):
        whole = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), whole))


def drop_operand(node: cst.BooleanOperation) -> Iterable[cst.CSTNode]:
    """One side alone decides."""
    for side in (node.left, node.right):
        yield side.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def number(node: cst.BaseNumber) -> Iterable[cst.CSTNode]:
    """One more, or twice as many."""
    if isinstance(node, cst.Integer | cst.Float) and node.evaluated_value >= MANY:
        yield node.with_changes(value=repr(2 * node.evaluated_value))
    else:
        yield from operator_number(node)


def arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """mutmut's changes of arguments, where the argument can be seen and the call does not fail at once without it."""
    if m.matches(node.func, m.Name("len") | m.Name("isinstance") | m.Name("cast")):
        return
    for new in operator_arg_removal(node):
        assert isinstance(new, cst.Call), "arguments are changed, not the call"
        pairs = zip(node.args, (*new.args, None), strict=False)
        lost = next(old for old, other in pairs if old is not other)
        if not is_unseen(lost):
            yield new


def _operators() -> Iterator[tuple[Any, _Operator]]:
    swapped = cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.ComparisonTarget, cst.AugAssign
    ours: dict[Any, _Operator] = {operator_arg_removal: arguments, operator_number: number}
    for kind, operator in mutation_operators:
        yield swapped if operator is operator_swap_op else kind, ours.get(operator, operator)
    yield cst.Expr, drop_call
    yield (cst.If, cst.While), negate
    yield cst.BooleanOperation, drop_operand


_OPERATORS = tuple(_operators())
