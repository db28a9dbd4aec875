"""Training from an outcome log: a model of all rows, its error on later rows, and what each feature adds.

Owns the evaluation, and the rows that an outcome log is to a training. Leaves models and training to `gorgo.learning`.

Theory of operation. The newest fifth is held out: a model in use predicts what comes after its training. A feature adds
what the error grows by when its column is constant, in the training and in the test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.core.fleet.replica import accelerator_name
from gorgo.core.record import record
from gorgo.core.training.candidate_table import ACCELERATOR, feature_table
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import TraceError
from gorgo.lab.decisions import SCHEMAS, OutcomeLines, candidates_of, chosen_at, fail_at, flag_at, number_at
from gorgo.learning.residual import PRIOR
from gorgo.learning.trainer import errors, fit
from gorgo.policies.learned.gorgo_residual import GorgoResidual

#: Share of the rows that is held out.
HELD_OUT = 0.2
#: Fewer rows fit by chance alone.
LEAST_ROWS = 50
#: Newest rows of a training without one feature: as many as a round of Lodestar has.
ABLATION_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class FeatureShare:
    """A feature, and the held-out errors of a model without it."""

    name: str
    ttft_error: float | None
    tpot_error: float | None


@dataclass(frozen=True, slots=True)
class LearnedModel:
    """A model of all rows, and errors of one without the newest fifth on that fifth.

    Errors are means of absolute errors as shares of the measured time; `None` without a measured or predicted one.
    """

    model: Model
    trained: int
    tested: int
    ttft_error: float | None
    tpot_error: float | None
    #: The same with the newest `ABLATION_ROWS` alone, beside which `features` stand.
    ablation_ttft_error: float | None
    ablation_tpot_error: float | None
    features: tuple[FeatureShare, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "kind": self.model.kind,
            "samples": self.model.samples,
            "trained": self.trained,
            "tested": self.tested,
            "error_ttft": self.ttft_error,
            "error_tpot": self.tpot_error,
            "ablation": {
                "all": {"error_ttft": self.ablation_ttft_error, "error_tpot": self.ablation_tpot_error},
                "without": {
                    one.name: {"error_ttft": one.ttft_error, "error_tpot": one.tpot_error} for one in self.features
                },
            },
        }


def learn(
    rows: TrainingRows,
    spec: TrainingSpec,
    *,
    seed: int,
    ablation: bool = True,
    trained: Callable[[], None] | None = None,
) -> LearnedModel:
    """Train on `rows`, oldest first; `trained` is called after each of `trainings` rounds.

    Raises `TraceError` for too few rows.
    """
    if len(rows) < LEAST_ROWS:
        raise TraceError(f"the log has {len(rows)} outcomes of streams; expected {LEAST_ROWS} at least")

    def train(part: TrainingRows) -> Model:
        model = fit(part, spec, seed, 1)
        if trained is not None:
            trained()
        return model

    split = len(rows) - int(HELD_OUT * len(rows))
    before, after = rows.select(slice(0, split)), rows.select(slice(split, len(rows)))
    ttft, tpot = errors(train(before), after)
    recent = before.select(slice(max(0, split - ABLATION_ROWS), split))
    short_errors: tuple[float | None, float | None] = (ttft, tpot)
    if ablation and len(recent) < len(before):
        short_errors = errors(train(recent), after)
    shares = []
    for name in _ablated(spec) if ablation else ():
        column = spec.names.index(name)
        mean = float(np.mean(recent.features[:, column]))
        errors_without = errors(train(_constant(recent, column, mean)), _constant(after, column, mean))
        shares.append(FeatureShare(name, *errors_without))
    shares.sort(key=lambda one: -(one.ttft_error or 0.0))
    return LearnedModel(train(rows), len(before), len(after), ttft, tpot, *short_errors, tuple(shares))


def trainings(spec: TrainingSpec, rows: int, *, ablation: bool) -> int:
    """Return how many rounds `learn` trains."""
    return 2 + (len(_ablated(spec)) + (rows - int(HELD_OUT * rows) > ABLATION_ROWS) if ablation else 0)


def _ablated(spec: TrainingSpec) -> tuple[str, ...]:
    """Return all features but the prediction that a residual is added to."""
    return tuple(name for name in spec.names if name != PRIOR)


def _constant(rows: TrainingRows, column: int, value: float) -> TrainingRows:
    """Return the rows with one feature that says nothing."""
    features = rows.features.copy()
    features[:, column] = value
    return replace(rows, features=features)


# The proxy's outcome log as rows for a training: its lines as `gorgo.lab.decisions` reads them.


#: Newest rows that are read: ten rounds of the largest buffers of Lodestar.
MAX_ROWS = 100_000


@record
class _Row:
    """An `OutcomeRow` of a log: it has the features of the chosen replica in the place of its slot."""

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
    unstreamed: bool


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
    lines, row_of = OutcomeLines(SCHEMAS), _Rows(names)
    rows: deque[_Row] = deque(maxlen=MAX_ROWS)
    read = 0
    for entry, where in lines.read(path):
        read += 1
        row = row_of(entry, where)
        if row is not None:
            rows.append(row)
    if not rows:
        raise TraceError(f"{path}: the outcome log has no attempt with an answer or a failure")
    return LoggedOutcomes(_columns(names, list(rows)), read - len(rows), lines.cut_lines)


class _Rows:
    """Makes a row of a line, `None` of one that a training cannot use."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._plain = tuple(name for name in names if name != PRIOR)
        self._residual = GorgoResidual() if PRIOR in names else None

    def __call__(self, entry: Mapping[str, Any], where: str) -> _Row | None:
        unstreamed = entry.get("unstreamed", False)  # a log of earlier versions has streams alone
        if unstreamed is None or (entry.get("ttft_s") is None and unstreamed is False):
            return None
        censored = flag_at(entry, "censored", where)
        unstreamed = flag_at({"unstreamed": unstreamed}, "unstreamed", where)
        group = entry.get("group")
        if not isinstance(group, int) or not -(2**63) <= group < 2**63:
            fail_at(where, "group", group, "a whole number of 64 bits")
        return _Row(
            features=self._features(entry, chosen_at(entry, where), where),
            dispatched_s=number_at(entry, "dispatched_s", where),
            # Of an answer in one piece the time to its end is learned.
            ttft_s=number_at(entry, "e2e_s" if unstreamed and not censored else "ttft_s", where),
            tpot_s=_number_or_nan(entry, "tpot_s", where),
            e2e_s=number_at(entry, "e2e_s", where),
            output_tokens=_number_or_nan(entry, "output_tokens", where),
            cached_tokens=_number_or_nan(entry, "cached_tokens", where),
            prompt_tokens=number_at(entry, "prompt_tokens", where),
            censored=censored,
            group=group,
            unstreamed=unstreamed,
        )

    def _features(self, entry: Mapping[str, Any], chosen: int, where: str) -> tuple[float, ...]:
        """Return the features of the candidate chosen; a log of earlier versions has them as they are."""
        if "columns" not in entry:
            return tuple(_feature(entry.get("features"), name, chosen, where) for name in self._names)
        names, table = candidates_of(entry, where)
        if chosen >= len(names):
            fail_at(where, "chosen", chosen, f"less than the number of candidates, which is {len(names)}")
        request, candidates = table.request(str(entry.get("request_id"))), table.candidates(names)
        values = dict(zip(self._plain, feature_table(self._plain, request, candidates)[chosen].tolist(), strict=True))
        if self._residual is not None:
            values[PRIOR] = float(self._residual.features(request, candidates)[chosen, -1])
        return tuple(values[name] for name in self._names)


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
        unstreamed=np.array([row.unstreamed for row in rows], dtype=np.bool_),
    )


def _feature(features: object, name: str, chosen: int, where: str) -> float:
    cells = features.get(name) if isinstance(features, dict) else None
    if cells is None and name.startswith(ACCELERATOR) and isinstance(features, dict):
        wanted = accelerator_name(name.removeprefix(ACCELERATOR))
        same = (key for key in features if key.startswith(ACCELERATOR) and _accelerator(key) == wanted)
        same_name = next(same, None)
        if same_name is None:
            return 0.0  # no replica of the log's fleet has it
        cells = features[same_name]
    if cells is None and name == "streamed":
        return 1.0  # a log of earlier versions has streams alone
    value = cells[chosen] if isinstance(cells, list) and chosen < len(cells) else cells
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        fail_at(where, f"features.{name}", value, "a number, or one per candidate")
    return float(value)


def _accelerator(key: str) -> str:
    return accelerator_name(key.removeprefix(ACCELERATOR))


def _number_or_nan(entry: Mapping[str, Any], key: str, where: str) -> float:
    return nan if entry.get(key) is None else number_at(entry, key, where)
