"""How much of a system's runs is made, and what a system gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.pictures import Picture
from experiments.tables import TableSection
from experiments.windows import Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The part of the grid that is run.

    Parameters
    ----------
    seeds:
        Each run with each seed.
    scale:
        Multiple of the requests of each run.
    trace:
        File of Mooncake's conversation trace; None: rows of it are left out.
    counts:
        Numbers of routers.
    first_requests:
        Of whole windows only so many; None: all.
    pictures:
        Whether pictures are made.
    queue:
        Queue of the proxy under every policy or under none; None: as each row has it.
    """

    seeds: Sequence[int]
    scale: float = 1.0
    trace: str | None = None
    counts: Sequence[int] = (2, 4, 8)
    first_requests: int | None = None
    pictures: bool = False
    queue: Queue | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """Tables of a system, their last line, the pictures, and the rows for `--json`."""

    sections: Sequence[TableSection]
    end: str
    pictures: Sequence[Picture] = ()
    rows: Any = field(default_factory=list)
