"""What the history hands out: frozen rows, with times as seconds since 1970 (UTC) and latencies as measured.

Owns the records but a generation's, which is the campaign's own, and that a row is one: SQLite holds anything in any
column, and a damaged file does. How rows are stored is `models` and `store`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from sqlalchemy import RowMapping

from gorgo.core.numeric import is_number

EventKind = Literal["freeze", "unfreeze", "rollback", "foreign", "restart", "stop"]
Row = TypeVar("Row")

#: Seconds since 1970 at the end of the year 9999; nothing that counts time by calendars goes beyond.
MAX_TIME_S = 253_402_300_799.0
#: Of a text: ten times the longest reason that the proxy takes.
MAX_CHARACTERS = 10_000
_TIMES = ("started_s", "finished_s", "at_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRow:
    """One run of the tuner from its start to its end; a restarted sidecar continues the same one.

    `options` are those it was started with. `finished_s` and `outcome` are None while it runs.
    """

    id: int
    started_s: float
    finished_s: float | None
    outcome: str | None
    target: str
    policy: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event beside the generations: a freeze, unfreeze, roll-back, foreign weights, restart or stop."""

    at_s: float
    kind: EventKind
    weights: Mapping[str, float] | None
    reason: str


def row_of(kind: type[Row], values: Mapping[str, Any] | RowMapping) -> Row:
    """The record of a row. Raises `ValueError` for a value that its field cannot have."""
    named = {column.name: str(column.type) for column in fields(kind)}  # type: ignore[arg-type]
    for name, wanted in named.items():
        value = values[name]
        bare = wanted.removesuffix(" | None")
        if not (_is(bare, value) or (value is None and bare != wanted)):
            raise ValueError(f"{name} is {_short(value)}; expected {wanted}")
        if name in _TIMES and value is not None and not 0 <= value <= MAX_TIME_S:
            raise ValueError(f"{name} is {_short(value)}; expected seconds since 1970")
    return kind(**{name: values[name] for name in named})


def weights_in(value: object) -> dict[str, float]:
    """Weights by name as a column holds them. Raises `ValueError` for anything else."""
    if not _is("Mapping[str, float]", value):
        raise ValueError(f"weights are {_short(value)}; expected numbers by name")
    assert isinstance(value, Mapping)
    return dict(value)


def _is(wanted: str, value: object) -> bool:
    match wanted:
        case "float":
            return is_number(value)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "Mapping[str, float]":
            # A name that cannot be printed is half a surrogate pair, or worse.
            return isinstance(value, Mapping) and all(name.isprintable() and is_number(value[name]) for name in value)
        case "Mapping[str, Any]":
            json.dumps(value, allow_nan=False)  # numbers that JSON does not have are a ValueError
            return isinstance(value, Mapping)
        case _:
            return isinstance(value, str) and len(value) <= MAX_CHARACTERS


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
