"""Keys of regions.yaml that there were, and what became of each.

Owns the table. An error about an unknown key names what stands in its place, so that an old file can be put right from
the error alone; no old key is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.config.document import Document, Path, Problem
from gorgo.config.explain import keys_at

#: Old key -> its new key, both dotted and with places in lists left out (`regions.limits.connect_timeout_s`), or a few
#: words that say why it is gone.
RENAMED: dict[str, str] = {}


def renamed_keys(document: Document) -> Iterator[Problem]:
    """Each key of the table that the file has, also inside a section that was renamed itself."""
    for path, line in document.lines.items():
        became = RENAMED.get(_dotted(path))
        if became is None or path[-1] in keys_at(path[:-1]):
            continue
        if " " in became:
            yield Problem(path, line, f"unknown key (removed: {became})", "the file without it")
        else:
            yield Problem(path, line, "unknown key (renamed)", became)


def _dotted(path: Path) -> str:
    return ".".join(part for part in path if isinstance(part, str))
