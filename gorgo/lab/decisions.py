"""The proxy's outcome log as decisions: each with its candidates, so that a policy can choose again, and its outcome.

Owns the form of `gorgo.live.telemetry.outcome_log` for readers: its header, its lines, and their candidates. Leaves the
rows of a training to `gorgo.lab.learn`, and the judgement to `gorgo.lab.whatif`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gorgo.core.numeric import Floats
from gorgo.core.prefix.residency import SharedRuns
from gorgo.core.record import record
from gorgo.core.training.candidate_table import CANDIDATE_COLUMNS, CandidateTable
from gorgo.core.training.learning import RecordedOutcome
from gorgo.errors import TraceError
from gorgo.lab.request_log import json_object, read_lines, rotated_files
from gorgo.live.telemetry.outcome_log import SCHEMA

#: Versions of the log that a training reads; the first has features in the place of columns.
SCHEMAS = (1, SCHEMA)
#: Newest decisions that are read: some hundred megabytes, a day of one a second.
MAX_DECISIONS = 100_000
#: Of a log that is read again and again: thirty thousand decisions among three candidates, in two seconds.
TAIL_BYTES = 64 << 20
#: Candidates of a line at most: more than any fleet whose decisions are logged whole.
MAX_CANDIDATES = 4096
#: Times beyond this are a damaged line, s.
_MAX_S = 1e12


@record
class LoggedDecision:
    """One first attempt, with what the policy saw, what it chose, and what came of it.

    Parameters
    ----------
    decided_s:
        By the proxy's clock.
    policy, weights:
        That chose.
    names:
        Of the candidates.
    chosen:
        Row of the replica that the request went to.
    probability:
        The chance that it had; `None` where the policy's own chances are not known.
    table:
        The candidates and the request's sizes.
    ttft_s:
        From the dispatch to the first token; without one the time elapsed; NaN of an answer in one piece.
    e2e_s:
        From the dispatch to the end.
    failed:
        Whether it ended without an answer, other than by its client.
    """

    decided_s: float
    policy: str
    weights: Mapping[str, float]
    names: tuple[str, ...]
    chosen: int
    probability: float | None
    table: CandidateTable
    ttft_s: float
    e2e_s: float
    failed: bool


@dataclass(frozen=True, slots=True)
class DecisionLog:
    """The newest decisions of a log, oldest first.

    `left_out` counts later attempts of a request, ends that say nothing of a time, and older decisions beyond the
    bound; `cut_lines` those that a killed process or a full disk left unfinished.
    """

    decisions: Sequence[LoggedDecision]
    left_out: int
    cut_lines: int


def read_decisions(path: Path, *, most: int = MAX_DECISIONS) -> DecisionLog:
    """Return the decisions of `path` and of the files that it was rotated to.

    Raises `TraceError`, which names file and line, for lines that are not the proxy's, and for a log without one.
    """
    lines = OutcomeLines((SCHEMA,))
    decisions: deque[LoggedDecision] = deque(maxlen=most)
    read = 0
    for entry, where in lines.read(path):
        read += 1
        decision = _decision(entry, where)
        if decision is not None:
            decisions.append(decision)
    if not decisions:
        raise TraceError(f"{path}: the outcome log has no first attempt with an answer or a failure")
    return DecisionLog(tuple(decisions), read - len(decisions), lines.cut_lines)


def newest_decisions(path: Path, *, most: int) -> Sequence[LoggedDecision]:
    """Return the last decisions of a log that its proxy writes to, from its last `TAIL_BYTES` alone.

    Raises as `read_decisions`, but a log without a decision is none yet.
    """
    decisions: deque[LoggedDecision] = deque(maxlen=most)
    for entry, where in OutcomeLines((SCHEMA,)).read_tail(path):
        decision = _decision(entry, where)
        if decision is not None:
            decisions.append(decision)
    return tuple(decisions)


def decision_of(outcome: RecordedOutcome) -> LoggedDecision | None:
    """Return the decision of an outcome that a Router has just left; `None` where a log has none."""
    decision, row = outcome.decision, outcome.row
    if decision.attempt != 1 or row is None:
        return None
    return LoggedDecision(
        decided_s=decision.decided_s,
        policy=decision.policy,
        weights=decision.weights,
        names=tuple(decision.candidates),
        chosen=decision.row,
        probability=outcome.probability,
        table=outcome.candidates,
        ttft_s=nan if row.unstreamed else row.ttft_s,
        e2e_s=outcome.e2e_s,
        failed=outcome.result.failed,
    )


class OutcomeLines:
    """Reads the objects of a log's lines.

    Parameters
    ----------
    schemas:
        Versions of the log that the reader takes.
    """

    def __init__(self, schemas: Sequence[int]) -> None:
        self._schemas = schemas
        self._has_header = False
        self.cut_lines = 0

    def read(self, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield each attempt of a log and of the files that it was rotated to, with its place for errors."""
        for file in rotated_files(path):
            yield from self._read(file)

    def read_tail(self, path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the attempts in the last `TAIL_BYTES` of a log and of the file that it was rotated to last."""
        left, parts = TAIL_BYTES, list[tuple[Path, int]]()
        for file in reversed(rotated_files(path)[-2:]):
            try:
                size = file.stat().st_size
            except OSError as error:
                raise TraceError(f"{file}: {error.strerror or error}; expected an outcome log") from None
            parts.append((file, max(0, size - left)))
            left = max(0, left - size)
        for file, skipped in reversed(parts):
            yield from self._read(file, skipped=skipped)

    def _read(self, path: Path, *, skipped: int = 0) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the attempts of a file; `skipped` bytes after its header are not parsed."""
        passed = 0
        for number, line in enumerate(read_lines(path, "an outcome log"), start=1):
            where = f"{path}, line {number}"
            passed += len(line)
            if number > 1 and passed <= skipped:
                continue
            entry = json_object(line)
            if entry is not None and "gorgo_outcome_log" in entry:
                schema = entry["gorgo_outcome_log"]
                if schema not in self._schemas:
                    expected = " or ".join(map(str, self._schemas))
                    fail_at(where, "gorgo_outcome_log", schema, f"{expected}, which this GORGO reads")
                self._has_header = True
            elif entry is None and (self._has_header or number == 1):
                self.cut_lines += 1  # by a full disk or a killed process; the first line may be a cut header
            elif entry is None or not self._has_header:
                raise TraceError(f"{where}: expected the header of an outcome log, gorgo_outcome_log")
            else:
                yield entry, where


def candidates_of(entry: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], CandidateTable]:
    """Return the names of a line's candidates and what the policy saw of them."""
    names = entry.get("candidates")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_CANDIDATES or not all(map(_is_text, names)):
        fail_at(where, "candidates", names, "names of replicas")
    columns = entry.get("columns")
    if not isinstance(columns, dict):
        fail_at(where, "columns", columns, "a column by name")
    cells = np.empty((len(CANDIDATE_COLUMNS), len(names)))
    for row, name in enumerate(CANDIDATE_COLUMNS):
        # A log of an earlier version lacks later columns: they are unknown.
        cells[row] = _column(columns.get(name), len(names), f"columns.{name}", where)
    return tuple(names), CandidateTable(
        cells,
        int(number_at(entry, "estimated_prompt_tokens", where)),
        int(number_at(entry, "body_bytes", where)),
        flag_at(entry, "streamed", where),
        number_at(entry, "waited_s", where),
        number_at(entry, "found_share", where),
        _shared(entry.get("shared"), where),
        None if entry.get("slo_ttft_s") is None else number_at(entry, "slo_ttft_s", where),
        None if entry.get("slo_tpot_s") is None else number_at(entry, "slo_tpot_s", where),
    )


def chosen_at(entry: Mapping[str, Any], where: str) -> int:
    """Return the row of the candidate chosen."""
    chosen = entry.get("chosen")
    if not isinstance(chosen, int) or isinstance(chosen, bool) or chosen < 0:
        fail_at(where, "chosen", chosen, "the place of the chosen candidate")
    return chosen


def number_at(entry: Mapping[str, Any], key: str, where: str) -> float:
    """Return a number of at least 0."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_S:
        fail_at(where, key, value, "a number of at least 0")
    return float(value)


def flag_at(entry: Mapping[str, Any], key: str, where: str) -> bool:
    """Return a flag."""
    value = entry.get(key)
    if not isinstance(value, bool):
        fail_at(where, key, value, "true or false")
    return value


def fail_at(where: str, key: str, value: object, expected: str) -> NoReturn:
    """Raise `TraceError` for a value of a line."""
    raise TraceError(f"{where}: {key} is {json.dumps(value, default=str)[:60]}; expected {expected}")


def _decision(entry: Mapping[str, Any], where: str) -> LoggedDecision | None:
    """Return the decision of a line; `None` for a later attempt, and for an end that says nothing of a time."""
    if entry.get("attempt") != 1 or entry.get("unstreamed") is None:
        return None
    names, table = candidates_of(entry, where)
    chosen = chosen_at(entry, where)
    if chosen >= len(names):
        fail_at(where, "chosen", chosen, f"less than the number of candidates, which is {len(names)}")
    probability = entry.get("probability")
    if probability is not None and not 0 < number_at(entry, "probability", where) <= 1:
        fail_at(where, "probability", probability, "above 0 and at most 1")
    weights = entry.get("weights")
    if not isinstance(weights, dict) or not all(_is_number(value) for value in weights.values()):
        fail_at(where, "weights", weights, "a number by name")
    policy = entry.get("policy")
    if not isinstance(policy, str) or not _is_text(policy):
        fail_at(where, "policy", policy, "the name of a policy")
    return LoggedDecision(
        decided_s=number_at(entry, "dispatched_s", where),
        policy=policy,
        weights=weights,
        names=names,
        chosen=chosen,
        probability=probability,
        table=table,
        ttft_s=nan if entry.get("ttft_s") is None else number_at(entry, "ttft_s", where),
        e2e_s=number_at(entry, "e2e_s", where),
        failed=entry.get("result") in ("failed_before_content", "failed_after_content"),
    )


def _column(value: object, rows: int, key: str, where: str) -> Floats:
    values = value if isinstance(value, list) else [value] * rows
    if len(values) != rows:
        fail_at(where, key, value, f"one cell, or one for each of {rows} candidates")
    return np.array([_cell(each, key, where) for each in values])


def _cell(value: object, key: str, where: str) -> float:
    if value is None:
        return nan
    if value in ("inf", "-inf"):
        return float(str(value))
    if not _is_number(value):
        fail_at(where, key, value, 'numbers, null or "inf"')
    return float(value)  # type: ignore[arg-type] # a number, as just checked


def _shared(value: object, where: str) -> SharedRuns | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        depths, worths = value
        if isinstance(depths, list) and isinstance(worths, list) and len(depths) == len(worths) > 1:
            return SharedRuns(
                [_cell(each, "shared", where) for each in depths], [_cell(each, "shared", where) for each in worths]
            )
    fail_at(where, "shared", value, "two lists of numbers of one length")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1000


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
