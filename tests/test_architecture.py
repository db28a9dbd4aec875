"""docs/architecture.md against the code: each file that it names exists and has the symbol."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import DOCS, ROOT, code, rows_of

PAGE = (DOCS / "architecture.md").read_text()
CHANGES = [(code(row[1])[0], code(row[2])[0]) for row in rows_of(PAGE, "change", "file", "symbol")]


def symbols(path: Path) -> Iterator[str]:
    """Names of a module: functions, classes, and methods, fields and attributes of classes as `Class.name`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}"
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    yield f"{node.name}.{inner.attr}"


@pytest.mark.parametrize(("file", "symbol"), CHANGES)
def test_every_place_to_change_exists(file: str, symbol: str) -> None:
    assert symbol in set(symbols(ROOT / file))


def test_five_questions_of_a_reader_are_answered() -> None:
    assert len(CHANGES) >= 5


def test_every_file_in_the_diagrams_exists() -> None:
    named = {
        name
        for block in re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
        for name in re.findall(r"[\w/]+\.py", block)
    }
    assert len(named) >= 20
    tops = (ROOT, ROOT / "gorgo", ROOT / "gorgo/proxy", ROOT / "gorgo/live", ROOT / "gorgo/core")
    assert {name for name in named if not any((top / name).is_file() for top in tops)} == set()
