"""Which test runs which line, how long it takes, and whether it passes on the unchanged tree.

One record per test file, kept until the sources, the tests' helpers or the file itself change. Tests that are
processes, or need minutes, are not traced.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage.numbits import numbits_any_intersection, numbits_union, nums_to_numbits

#: Folders of tests that run the product as processes, and the driver's own.
UNTRACED = {"chaos", "mutants", "overload", "packaging", "real", "soak", "system", "terraform"}


@dataclass(frozen=True, slots=True, eq=False)
class TracedTest:
    """A test that passes, and the lines that it runs: bits by source file."""

    id: str
    seconds: float
    lines: Mapping[str, bytes]

    @property
    def file(self) -> str:
        return _file(self.id)

    def runs(self, path: str, lines: Iterable[int]) -> bool:
        bits = self.lines.get(path)
        return bits is not None and numbits_any_intersection(bits, nums_to_numbits(lines))


class Records:
    """The records of one tree in a folder.

    Parameters
    ----------
    root: the tree.
    folder: where the records are; made if it is missing.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = test_files(root)
        self._folder, common = folder, digest(root, common_files(root))
        self._keys = {name: common + digest(root, [name]) for name in self.files}
        #: A digest of all that verdicts rest on.
        self.tree = common + digest(root, self.files)

    def stale(self) -> list[str]:
        """Test files without a record of this tree."""
        return [name for name in self.files if self._read(name).get("key") != self._keys[name]]

    def write(self, names: Sequence[str], traced: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what `plugin.Tracing` wrote of these test files."""
        for name in names:
            parts = {kind: {at: v for at, v in whole.items() if _file(at) == name} for kind, whole in traced.items()}
            part = self._path(name).with_suffix(".part")
            part.write_text(json.dumps({"key": self._keys[name], **parts}))
            part.replace(self._path(name))

    def tests(self) -> list[TracedTest]:
        """Every traced test that passes."""
        return [test for name in self.files for test in _passing(name, self._read(name))]

    def without_verdict(self) -> int:
        """How many tests were skipped or failed on the unchanged tree, so that they can show nothing."""
        records = [self._read(name)["tests"].values() for name in self.files]
        return sum(not passed for record in records for _, passed in record)

    def _read(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.replace('/', '.')}.json"


def test_files(root: Path) -> list[str]:
    """Test files that are traced."""
    found = (path.relative_to(root) for path in (root / "tests").rglob("test_*.py"))
    return sorted(path.as_posix() for path in found if not UNTRACED & set(path.parts))


def common_files(root: Path) -> list[str]:
    """What every test rests on: sources and the tests' helpers."""
    paths = [path for top in ("gorgo", "tuner", "tests") for path in (root / top).rglob("*") if path.is_file()]
    names = [path.relative_to(root) for path in paths if path.suffix != ".pyc" and not path.name.startswith("test_")]
    return [name.as_posix() for name in names if name.parts[:2] != ("tests", "mutants")]


def digest(root: Path, names: Iterable[str]) -> str:
    """Of the names and the contents of these files."""
    whole = hashlib.sha256()
    for name in sorted(names):
        whole.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).digest())
    return whole.hexdigest()[:16]


def statement_at(source: str, line: int) -> tuple[Sequence[int], bool]:
    """Lines of the statement, or of the head of the block, at `line`; and whether a call of a function runs it."""
    lines: Sequence[int] = [line]
    local = False
    for node in ast.walk(ast.parse(source)):  # outer ones come first
        if isinstance(node, ast.stmt) and node.end_lineno and node.lineno <= line <= node.end_lineno:
            body: list[ast.stmt] = getattr(node, "body", [])
            inside = bool(body) and line >= body[0].lineno
            local = local or (inside and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            lines = [line] if inside else range(node.lineno, body[0].lineno if body else node.end_lineno + 1)
    return lines, local


def function_lines(source: str) -> list[int]:
    """Every line that runs when a function is called."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sorted({line for node in found for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)})


def _passing(name: str, record: Mapping[str, Any]) -> Iterator[TracedTest]:
    bits = {at: {path: bytes.fromhex(text) for path, text in of.items()} for at, of in record["lines"].items()}
    shared = bits.get(name, {})
    for test, (seconds, passed) in record["tests"].items():
        own = bits.get(test, {})
        both = {path: numbits_union(shared.get(path, b""), own.get(path, b"")) for path in {*shared, *own}}
        if passed:
            yield TracedTest(test, seconds, both)


def _file(at: str) -> str:
    return at.split("::")[0]
