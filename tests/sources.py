"""The code as tests read it: each module is parsed once in a process, whichever tests ask."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which no test changes."""
    return ast.parse(source)


def syntax_tree(path: Path) -> ast.Module:
    """Return the tree of a module, which no test changes."""
    return parsed(path.read_text())
