"""The proxy's outcome log as rows for a training: the form of `gorgo.live.telemetry.outcome_log`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gorgo.apps.log_files import json_object, read_lines
from gorgo.apps.request_log import rotated_files
from gorgo.core.record import record
from gorgo.core.training.features import ACCELERATOR
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import TraceError
from gorgo.live.telemetry.outcome_log import SCHEMA

#: Newest rows that are read: ten rounds of the largest buffers of Lodestar.
MAX_ROWS = 100_000


@record
class _Row:
    features: tuple[float, ...]
    dispatched_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    output_tokens: float
    cached_tokens: float
    prompt_tokens: float
    censored: bool
    group: int


@dataclass(frozen=True, slots=True)
class LoggedOutcomes:
    """The contents of a log.

    Parameters
    ----------
    rows:
        Outcomes that a training can use, oldest first, at most `MAX_ROWS`.
    left_out:
        Attempts whose end says nothing of the time to a first token, and older ones beyond the bound.
    cut_lines:
        Lines that a killed process or a full disk left unfinished.
    """

    rows: TrainingRows
    left_out: int
    cut_lines: int


def read_outcomes(path: Path, names: tuple[str, ...]) -> LoggedOutcomes:
    """Return the outcomes of `path` and of the files that it was rotated to, with the features `names`.

    Raises `TraceError`, which names file and line, for lines that are not the proxy's, and for a log without a row.
    """
    reader = _Reader(names)
    rows: deque[_Row] = deque(maxlen=MAX_ROWS)
    count = 0
    for file in rotated_files(path):
        for row in reader.read(file):
            rows.append(row)
            count += 1
    if not rows:
        raise TraceError(f"{path}: the outcome log has no streamed attempt with a first token or a failure")
    return LoggedOutcomes(_columns(names, list(rows)), reader.left_out + count - len(rows), reader.cut_lines)


class _Reader:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._has_header = False
        self.left_out = 0
        self.cut_lines = 0

    def read(self, path: Path) -> Iterator[_Row]:
        unfinished: str | None = None
        for number, line in enumerate(read_lines(path, "an outcome log"), start=1):
            where = f"{path}, line {number}"
            entry = json_object(line)
            if entry is not None and "gorgo_outcome_log" in entry:
                if entry["gorgo_outcome_log"] != SCHEMA:
                    _fail(where, "gorgo_outcome_log", entry["gorgo_outcome_log"], f"{SCHEMA}, which this GORGO reads")
                self._has_header = True
                self.cut_lines += unfinished is not None
                unfinished = None
                continue
            # Only a header, or nothing, follows a line that was cut.
            if unfinished is not None or not self._has_header:
                raise TraceError(unfinished or f"{where}: expected the header of an outcome log, gorgo_outcome_log")
            if entry is None:
                unfinished = f"{where}: no JSON object; expected a line of an outcome log"
                continue
            row = self._row(entry, where)
            if row is None:
                self.left_out += 1
            else:
                yield row
        self.cut_lines += unfinished is not None

    def _row(self, entry: Mapping[str, Any], where: str) -> _Row | None:
        if entry.get("ttft_s") is None:
            return None
        censored, group, chosen = entry.get("censored"), entry.get("group"), entry.get("chosen")
        if not isinstance(censored, bool):
            _fail(where, "censored", censored, "true or false")
        if not isinstance(group, int) or not -(2**63) <= group < 2**63:
            _fail(where, "group", group, "a whole number of 64 bits")
        if not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 0:
            _fail(where, "chosen", chosen, "the place of the chosen candidate")
        return _Row(
            features=tuple(_feature(entry.get("features"), name, chosen, where) for name in self._names),
            dispatched_s=_number(entry, "dispatched_s", where),
            ttft_s=_number(entry, "ttft_s", where),
            tpot_s=_number_or_nan(entry, "tpot_s", where),
            e2e_s=_number(entry, "e2e_s", where),
            output_tokens=_number_or_nan(entry, "output_tokens", where),
            cached_tokens=_number_or_nan(entry, "cached_tokens", where),
            prompt_tokens=_number(entry, "prompt_tokens", where),
            censored=censored,
            group=group,
        )


def _columns(names: tuple[str, ...], rows: list[_Row]) -> TrainingRows:
    def column(name: str) -> Any:
        return np.array([getattr(row, name) for row in rows], dtype=np.float64)

    return TrainingRows(
        names,
        np.array([row.features for row in rows], dtype=np.float32).reshape(len(rows), len(names)),
        column("dispatched_s"),
        column("ttft_s"),
        column("tpot_s"),
        column("e2e_s"),
        column("output_tokens"),
        column("cached_tokens"),
        column("prompt_tokens"),
        censored=np.array([row.censored for row in rows], dtype=np.bool_),
        slots=np.zeros(len(rows), dtype=np.intp),
        groups=np.array([row.group for row in rows], dtype=np.int64),
    )


def _feature(features: object, name: str, chosen: int, where: str) -> float:
    cells = features.get(name) if isinstance(features, dict) else None
    if cells is None and name.startswith(ACCELERATOR):
        return 0.0  # no replica of the log's fleet has it
    value = cells[chosen] if isinstance(cells, list) and chosen < len(cells) else cells
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        _fail(where, f"features.{name}", value, "a number, or one per candidate")
    return float(value)


def _number(entry: Mapping[str, Any], key: str, where: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        _fail(where, key, value, "a number of at least 0")
    return float(value)


def _number_or_nan(entry: Mapping[str, Any], key: str, where: str) -> float:
    return nan if entry.get(key) is None else _number(entry, key, where)


def _fail(where: str, key: str, value: object, expected: str) -> NoReturn:
    raise TraceError(f"{where}: {key} is {json.dumps(value, default=str)[:60]}; expected {expected}")
