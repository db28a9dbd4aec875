"""A Containerfile as instructions, and which image has which.

Owns the little of its grammar that ours uses: comments, continued lines, exec form as JSON.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

#: Options of an instruction that stand before what it is about.
_OPTION = re.compile(r"--([a-z-]+)=(\S+)\s+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its word, its `--options`, and the rest."""

    word: str
    options: dict[str, str]
    rest: str

    @property
    def words(self) -> list[str]:
        """In exec form as given, else as a shell would split it."""
        return list(json.loads(self.rest)) if self.rest.startswith("[") else shlex.split(self.rest)


def stages(text: str) -> list[list[Instruction]]:
    """The instructions of each image, FROM first; ARG before the first belongs to none."""
    found: list[list[Instruction]] = []
    for instruction in _instructions(text):
        if instruction.word == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for joined in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = joined.strip().partition(" ")
        options = {}
        rest = rest.strip()
        while option := _OPTION.match(rest):
            options[option[1]] = option[2]
            rest = rest[option.end() :]
        yield Instruction(word, options, rest)
