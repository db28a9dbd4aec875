"""The outcome log: every ended attempt with all its candidates, as a data set for the training of policies. No text.

Owns the form of a line and the features in it. `live.logs` owns the queue, `live.logs` the files, and `gorgo.lab.learn`
reads them.

Theory of operation. A line has the features of all candidates, not those of one policy: a policy is trained on any of
them, whichever policy routed. A feature with one value for all candidates is that number, else a list. `prior_s` is the
prediction of `gorgo-ms` from dispatch to first token, as `gorgo-residual` has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Candidates
from gorgo.core.record import record
from gorgo.core.training.features import ACCELERATOR, FEATURES, feature_table
from gorgo.core.training.learning import RecordedOutcome
from gorgo.live.logs import OUTCOME_LOG, LineFile, LineLog, LineOutput
from gorgo.policies.learned.gorgo_residual import PRIOR, GorgoResidual

SCHEMA = 1
#: A day of two requests a second over three replicas; an hour of ten over 64.
MAX_FILE_BYTES = 256 << 20
MAX_FILES = 5
#: Lines in memory at most: 16 MB with 64 candidates.
MAX_WAITING = 2000


@record
class OutcomeLine:
    """An ended attempt as a line. `names` are those of the columns of its features."""

    outcome: RecordedOutcome
    names: tuple[str, ...]

    def as_line(self) -> str:
        """Return the JSON line."""
        outcome, decision, row = self.outcome, self.outcome.decision, self.outcome.row
        fields: dict[str, Any] = {
            "request_id": decision.request_id,
            "attempt": decision.attempt,
            "dispatched_s": _number(decision.decided_s, 4),
            "policy": decision.policy,
            "model_version": decision.model_version,
            "fallback": decision.fallback,
            "predicted_ttft_s": _number(decision.predicted_ttft_s, 6),
            "candidates": list(decision.candidates),
            "chosen": decision.row,
            "cost": None if decision.cost is None else [_number(cost, 6) for cost in decision.cost.tolist()],
            "features": dict(zip(self.names, map(_cells, outcome.features.T), strict=True)),
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
    accelerators:
        Those of the fleet; each is a feature.
    """

    def __init__(self, add: Callable[[OutcomeLine], None], accelerators: Iterable[str]) -> None:
        self._add = add
        self._plain = (*FEATURES, *(f"{ACCELERATOR}{name}" for name in sorted(set(accelerators))))
        self._residual = GorgoResidual()
        self.names = (*self._plain, PRIOR)

    def candidate_features(self, request: RouteRequest, candidates: Candidates) -> NDArray[np.float32]:
        """Return a row per candidate."""
        prior = self._residual.features(request, candidates)[:, -1:]
        return np.hstack([feature_table(self._plain, request, candidates), prior])

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        """Queue the line of an ended attempt."""
        self._add(OutcomeLine(outcome, self.names))


def outcome_log_file(path: Path, *, boot_id: str, clock: Callable[[], float]) -> LineFile:
    """Return the log's file, open. Raises `ConfigError` for a wrong path."""
    header: Mapping[str, Any] = {"gorgo_outcome_log": SCHEMA, "boot_id": boot_id, "started_s": round(clock(), 4)}
    file = LineFile(path, header, kind="an outcome log", max_bytes=MAX_FILE_BYTES, max_files=MAX_FILES)
    file.open()
    return file


def outcome_log(file: LineOutput, *, count: Callable[[str, int], None]) -> LineLog:
    """Return the log's queue."""
    return LineLog(file, count=count, events=OUTCOME_LOG, max_waiting=MAX_WAITING)


def _cells(column: NDArray[np.float32]) -> float | list[float]:
    """Return a feature's values; one number if all candidates have the same."""
    values = [float(f"{value:.7g}") for value in column.tolist()]
    return values[0] if values.count(values[0]) == len(values) else values


def _number(value: float | None, digits: int = 0) -> float | None:
    """JSON has no NaN: unknown is null."""
    return None if value is None or value != value else round(value, digits)
