"""The documents as tests read them: sections, tables, code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from gorgo.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

Row = list[str]


def code(cell: str) -> list[str]:
    """Code words of a cell or a text."""
    return re.findall(r"`([^`\n]*)`", cell)


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    parts = re.split(rf"^{re.escape(heading)}$", text, flags=re.MULTILINE)
    assert len(parts) == 2, f"{len(parts) - 1} times {heading}"
    return re.split(rf"^#{{1,{level}}} ", parts[1], flags=re.MULTILINE)[0]


def headings(text: str, level: int = 2) -> list[str]:
    """Headings of one level, those in code blocks left out."""
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^{'#' * level} (.*)$", bare, flags=re.MULTILINE)


def tables(text: str) -> list[tuple[Row, list[Row]]]:
    """Header and rows of each table, in order."""
    found = re.findall(r"^(\|.*\|)\n\|[-|: ]+\|\n((?:\|.*\|\n?)*)", text, flags=re.MULTILINE)
    return [(_cells(header), [_cells(line) for line in body.splitlines()]) for header, body in found]


def rows_of(text: str, *header: str) -> list[Row]:
    """Rows of the one table with this header."""
    found = [rows for columns, rows in tables(text) if columns == list(header)]
    assert len(found) == 1, f"{len(found)} tables with the header {header}"
    return found[0]


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words after `gorgo`, and the group itself."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if not inner or not path:
        yield " ".join(path), command
    for name, found in (inner or {}).items():
        yield from commands(found, (*path, name))


def check_gorgo_lines(text: str) -> int:
    """Assert that each `gorgo ...` line of the shell blocks names a command and options that exist; how many."""
    known = {name: {option for p in command.params for option in p.opts} for name, command in commands()}
    shell = "".join(blocks(text, "sh"))
    lines = [
        shlex.split(line, comments=True)
        for line in re.findall(r"^(?:\$ )?(?:\w+=\S+ )?gorgo (.*)", shell, re.MULTILINE)
    ]
    for words in lines:
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in known), "")
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        assert name or set(words) <= known[""], words
        assert options <= known[name] | {"--help"}, words
    return len(lines)


def _cells(line: str) -> Row:
    return [cell.strip() for cell in line.strip("|").split("|")]
