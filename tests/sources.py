"""The code as the tests of the house read it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which no test changes: the tests of names, layers and docstrings share it.

    They come last. A tree that is retained slows each full collection of garbage of every test behind it.
    """
    return ast.parse(source)


def syntax_tree(path: Path) -> ast.Module:
    """Return the tree of a module, retained by nobody."""
    return ast.parse(path.read_text())
