"""Values with many fields are made by position, and each line names its field: by its last word, or in a comment."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gorgo.core.dispatch import dispatcher, in_flight
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import Sample

MADE = [
    (Decision, dispatcher),
    (Sample, in_flight),
]


@pytest.mark.parametrize(("kind", "module"), MADE)
def test_arguments_by_position_are_in_the_order_of_the_fields(kind: Any, module: Any) -> None:
    source = Path(module.__file__).read_text()
    calls = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)]
    (call,) = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == kind.__name__]
    lines = [source.splitlines()[each.end_lineno - 1] for each in call.args if each.end_lineno is not None]
    assert [_named(line) for line in lines] == [each.name for each in fields(kind)]
    assert not call.keywords


def _named(line: str) -> str:
    found = re.search(r"(?:# |\.|^ *)(\w+),?$", line)
    assert found is not None, line
    return found[1].lstrip("_")
