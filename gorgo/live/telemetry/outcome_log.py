"""The outcome log: every ended attempt with all its candidates, as data for training and for `gorgo whatif`. No text.

Owns the form of a line. `live.logs` owns the queue and the files, and `gorgo.lab.decisions` reads them.

Theory of operation. A line has all columns of all candidates and the sizes of the request, so that any policy can
choose again, whichever policy routed, and any feature can be computed (`core.training.candidate_table`). A column with
one value for all candidates is that value, else a list; unknown is null, and infinite is "inf".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record
from gorgo.core.training.candidate_table import CANDIDATE_COLUMNS
from gorgo.core.training.learning import RecordedOutcome
from gorgo.live.logs import OUTCOME_LOG, LineFile, LineLog, LineOutput

#: Version 1 had features in the place of columns, and no probability.
SCHEMA = 2
#: A day of two requests a second over three replicas; an hour of ten over 64.
MAX_FILE_BYTES = 256 << 20
MAX_FILES = 5
#: Lines in memory at most: 16 MB with 64 candidates.
MAX_WAITING = 2000


@record
class OutcomeLine:
    """An ended attempt as a line."""

    outcome: RecordedOutcome

    def as_line(self) -> str:
        """Return the JSON line."""
        outcome, decision, row = self.outcome, self.outcome.decision, self.outcome.row
        table = outcome.candidates
        fields: dict[str, Any] = {
            "request_id": decision.request_id,
            "attempt": decision.attempt,
            "dispatched_s": _number(decision.decided_s, 4),
            "policy": decision.policy,
            "weights": dict(decision.weights),
            "model_version": decision.model_version,
            "fallback": decision.fallback,
            "predicted_ttft_s": _number(decision.predicted_ttft_s, 6),
            "candidates": list(decision.candidates),
            "chosen": decision.row,
            "probability": _number(outcome.probability, 6),
            "cost": None if decision.cost is None else [_number(cost, 6) for cost in decision.cost.tolist()],
            "columns": dict(zip(CANDIDATE_COLUMNS, map(_cells, table.cells), strict=True)),
            "body_bytes": table.body_bytes,
            "streamed": table.streamed,
            "waited_s": _number(table.waited_s, 6),
            "found_share": _number(table.found_share, 6),
            "shared": None if table.shared is None else [table.shared.depths, table.shared.worths],
            "slo_ttft_s": table.slo_ttft_s,
            "slo_tpot_s": table.slo_tpot_s,
            "estimated_prompt_tokens": table.prompt_tokens,
            "result": outcome.result.value,
            "e2e_s": _number(outcome.e2e_s, 6),
            # An answer in one piece has no first token: what is learned of it is `e2e_s`.
            "ttft_s": None if row is None or (row.unstreamed and not row.censored) else _number(row.ttft_s, 6),
            "censored": None if row is None else row.censored,
            "unstreamed": None if row is None else row.unstreamed,
            "tpot_s": None if row is None else _number(row.tpot_s, 6),
            "prompt_tokens": decision.prompt_tokens if row is None else row.prompt_tokens,
            "output_tokens": None if row is None else _number(row.output_tokens),
            "cached_tokens": None if row is None else _number(row.cached_tokens),
            "group": None if row is None else row.group,
        }
        return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


class OutcomeLog:
    """Records the outcomes of one Router.

    Parameters
    ----------
    add:
        Takes a line; never waits.
    """

    def __init__(self, add: Callable[[OutcomeLine], None]) -> None:
        self._add = add

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        """Queue the line of an ended attempt."""
        self._add(OutcomeLine(outcome))


def outcome_log_file(path: Path, *, boot_id: str, clock: Callable[[], float]) -> LineFile:
    """Return the log's file; opened, or else its first lines open it."""
    header: Mapping[str, Any] = {"gorgo_outcome_log": SCHEMA, "boot_id": boot_id, "started_s": round(clock(), 4)}
    return LineFile(path, header, kind="an outcome log", max_bytes=MAX_FILE_BYTES, max_files=MAX_FILES)


def outcome_log(file: LineOutput, *, count: Callable[[str, int], None]) -> LineLog:
    """Return the log's queue."""
    return LineLog(file, count=count, events=OUTCOME_LOG, max_waiting=MAX_WAITING)


def _cells(column: NDArray[np.float64]) -> Any:
    """Return a column's cells; one if all candidates have the same."""
    cells = [_cell(value) for value in column.tolist()]
    return cells[0] if cells.count(cells[0]) == len(cells) else cells


def _cell(value: float) -> float | str | None:
    if value != value:
        return None
    if value - value != 0.0:
        return "inf" if value > 0.0 else "-inf"
    return int(value) if value.is_integer() else float(f"{value:.9g}")


def _number(value: float | None, digits: int = 0) -> float | None:
    """JSON has no NaN: unknown is null."""
    return None if value is None or value != value else round(value, digits)
