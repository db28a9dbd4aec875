"""A fault: one source file with other text, from the operators or from the lists beside this file.

`known.toml` has faults that tests once missed, as text that is replaced; `equivalent.toml` has changes that make no
difference, each with the reason. Both go by text, so that lines may move.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import Mutant, difference, mutated

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fault:
    """What is changed, and the whole file after it.

    Parameters
    ----------
    label: the operator, or what the fault does.
    old, new: the lines that differ, without indentation.
    """

    path: str
    line: int
    label: str
    old: str
    new: str
    text: str
    key: str


def fault_of(mutant: Mutant, source: str) -> Fault | None:
    """None if the mutant is no other program."""
    text = mutated(source, mutant)
    if text is None:
        return None
    _, old, new = difference(source, text)
    key = f"{mutant.path}:{mutant.line} {mutant.operator} {mutant.place}"
    return Fault(mutant.path, mutant.line, mutant.operator, old, new, text, key)


def known(root: Path, listed: Path = FOLDER / "known.toml") -> Iterator[Fault]:
    """Every fault of the list; raises `LookupError` naming an entry whose old text is not in its file exactly once."""
    for entry in tomllib.loads(listed.read_text())["fault"]:
        path, before = str(entry["file"]), str(entry["old"])
        source = (root / path).read_text()
        if source.count(before) != 1:
            raise LookupError(
                f"known.toml, {entry['does']!r}: {path} has {source.count(before)} times, not once:\n{before}"
            )
        text = source.replace(before, str(entry["new"]))
        line, old, new = difference(source, text)
        yield Fault(path, line, str(entry["does"]), old, new, text, f"known: {entry['does']}")


class Equivalents:
    """Changes that make no difference: file, old lines, new lines."""

    def __init__(self, listed: Path = FOLDER / "equivalent.toml") -> None:
        entries: Sequence[dict[str, str]] = tomllib.loads(listed.read_text()).get("equivalent", [])
        self.reasons = {_texts(one["file"], one["old"], one["new"]): one["reason"] for one in entries}

    def __contains__(self, fault: Fault) -> bool:
        return _texts(fault.path, fault.old, fault.new) in self.reasons


def _texts(path: str, old: str, new: str) -> tuple[str, ...]:
    return path, *("\n".join(line.strip() for line in text.strip().splitlines()) for text in (old, new))
