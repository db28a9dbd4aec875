"""Boosted trees for the TTFT and for the time per output token, as in llm-d's latency predictor.

Theory of operation. Each time has a model of its own. Where rows with and without an engine's queue are both at least
`LEAST_ROWS` for both times, each time has two: one for replicas with a queue, and one without the columns of the queue.
Targets are multiplied by 1,000, which are llm-d's milliseconds, so that penalties on leaves have its size. One thread:
the trainer is a process beside a proxy, and the same rows make the same trees.

LightGBM is an extra, imported when a model is fitted or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.training.model import TargetKind, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import MissingExtra
from gorgo.learning.models.base import LEAST_TPOT_ROWS, FittedModel, capped_ttft_s, decode, encode, facts
from gorgo.learning.models.network import one_sided

#: Predictions and data set -> first and second derivative of the loss by each prediction.
Objective = Callable[[Floats, object], tuple[Floats, Floats]]

#: Rows of each time, with and without a queue, from which on they have models of their own.
LEAST_ROWS = 200
_QUEUE = "queued_requests"
#: Columns that are constant without a queue.
_QUEUE_COLUMNS = (_QUEUE, "is_queued")
#: Ordered classes, not amounts.
_CATEGORIES = ("hit_quarter",)
#: Names of the boosters of a model.
SPLIT_BOOSTERS = ("tpot_idle", "tpot_queued", "ttft_idle", "ttft_queued")
BOOSTERS = (("ttft",), ("tpot", "ttft"), SPLIT_BOOSTERS)
_TREES = 200
#: Rows from which on a tree is fitted to a share of them; LightGBM refuses a share without a row.
_LEAST_BAGGED = 10
_SCALE = 1000.0
_SETTINGS: Mapping[str, Any] = {
    "max_depth": 6,
    "num_leaves": 64,
    "learning_rate": 0.05,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "feature_fraction": 0.8,
    "min_sum_hessian_in_leaf": 5.0,
    "min_data_in_leaf": 5,
    "min_gain_to_split": 0.2,
    "lambda_l1": 0.01,
    "lambda_l2": 0.1,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}


def available() -> bool:
    """Return whether LightGBM is installed."""
    return find_spec("lightgbm") is not None


#: What to say without LightGBM.
MISSING = "boosted trees need the extra: pip install 'gorgo-router[learned]'"


def require_lightgbm() -> None:
    """Raise `MissingExtra` without LightGBM. Nothing of it is imported."""
    if not available():
        raise MissingExtra(MISSING)


def import_lightgbm() -> ModuleType:
    """Return the package. Raises `MissingExtra`."""
    try:
        import lightgbm
    except ImportError as error:
        raise MissingExtra(MISSING) from error
    module: ModuleType = lightgbm
    return module


class Trees:
    """One boosted model of a target.

    Parameters
    ----------
    text:
        The model in LightGBM's own format.
    columns:
        Columns of a table that it uses.
    """

    def __init__(self, text: str, columns: NDArray[np.intp]) -> None:
        self.text = text
        self.columns = columns
        self._booster = import_lightgbm().Booster(model_str=text)

    def __reduce__(self) -> tuple[type[Trees], tuple[str, NDArray[np.intp]]]:
        return Trees, (self.text, self.columns)

    @property
    def features(self) -> int:
        """Columns that the trees were fitted to."""
        count: int = self._booster.num_feature()
        return count

    def predict(self, table: NDArray[np.float32]) -> Floats:
        """Return the target of each row."""
        outputs: Floats = self._booster.predict(table[:, self.columns], num_threads=1)
        return outputs / _SCALE


@dataclass(frozen=True, slots=True, eq=False)
class TreesModel(FittedModel):
    """Boosted trees by time, and by queue where the rows sufficed.

    Parameters
    ----------
    boosters:
        `ttft` and perhaps `tpot`; or `ttft_idle`, `ttft_queued`, `tpot_idle` and `tpot_queued`.
    target:
        As in `TrainingSpec`.
    """

    boosters: Mapping[str, Trees]
    target: TargetKind = "seconds"
    kind: str = field(default="trees", init=False)

    def ttft_s(self, table: NDArray[np.float32]) -> Floats:
        """Return the predicted TTFT of each row."""
        return self._predict("ttft", table)

    def tpot_s(self, table: NDArray[np.float32]) -> Floats | None:
        """Return the predicted time per output token of each row, if it was fitted."""
        return self._predict("tpot", table) if any(name.startswith("tpot") for name in self.boosters) else None

    def _predict(self, time: str, table: NDArray[np.float32]) -> Floats:
        if time in self.boosters:
            return decode(self.boosters[time].predict(table), self.target)
        queued = table[:, self.names.index(_QUEUE)] > 0.0
        result = np.empty(len(table))
        for part, rows in ((f"{time}_idle", ~queued), (f"{time}_queued", queued)):
            if rows.any():
                result[rows] = self.boosters[part].predict(table[rows])
        return decode(result, self.target)

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return the text and columns of each booster."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, trees in sorted(self.boosters.items()):
            arrays[f"{name}_text"] = np.frombuffer(trees.text.encode(), dtype=np.uint8)
            arrays[f"{name}_columns"] = trees.columns.astype(np.int64)
        return arrays, {"boosters": sorted(self.boosters), "target": self.target}


def fit_trees(rows: TrainingRows, spec: TrainingSpec, *, seed: int, version: int) -> TreesModel:
    """Return boosted trees of all rows. Raises `MissingExtra`."""
    known = np.isfinite(rows.tpot_s)
    ttft = encode(capped_ttft_s(rows, spec.target_cap_s), spec.target)
    timed = {"ttft": (rows, ttft)} | (
        {"tpot": (rows.select(known), encode(rows.tpot_s[known], spec.target))}
        if known.sum() >= LEAST_TPOT_ROWS
        else {}
    )
    boosters = {}
    if _is_split(rows, known):
        for time, (part, target) in timed.items():
            queued = part.features[:, rows.names.index(_QUEUE)] > 0.0
            for name, chosen, left_out in (("idle", ~queued, _QUEUE_COLUMNS), ("queued", queued, ())):
                boosters[f"{time}_{name}"] = _fit(part.select(chosen), target[chosen], left_out, time, seed)
    else:
        boosters = {time: _fit(part, target, (), time, seed) for time, (part, target) in timed.items()}
    return TreesModel(**facts(rows, version), boosters=boosters, target=spec.target)


def _is_split(rows: TrainingRows, known: NDArray[np.bool_]) -> bool:
    """Return whether rows with and without a queue suffice for models of their own."""
    if _QUEUE not in rows.names:
        return False
    queued = rows.features[:, rows.names.index(_QUEUE)] > 0.0
    return min(int(np.sum(part)) for part in (queued, ~queued, queued & known, ~queued & known)) >= LEAST_ROWS


def _fit(rows: TrainingRows, target: Floats, left_out: tuple[str, ...], time: str, seed: int) -> Trees:
    """Return trees fitted to targets; of censored rows of the TTFT they are lower bounds."""
    package = import_lightgbm()
    columns = np.array([number for number, name in enumerate(rows.names) if name not in left_out], dtype=np.intp)
    categories = [at for at, number in enumerate(columns) if rows.names[number] in _CATEGORIES]
    table = rows.features[:, columns]
    settings = {**_SETTINGS, "seed": seed % 2**31}
    if len(target) < _LEAST_BAGGED:
        settings["bagging_fraction"] = 1.0
    bounds = rows.censored & (time == "ttft")
    objective = _one_sided_objective(target * _SCALE, bounds) if bounds.any() else "regression"
    data = package.Dataset(table, label=target * _SCALE, categorical_feature=categories, params=settings)
    booster = package.train({**settings, "objective": objective}, data, num_boost_round=_TREES)
    return Trees(booster.model_to_string(), columns)


def _one_sided_objective(target: Floats, censored: NDArray[np.bool_]) -> Objective:
    """Return half the squared error's two derivatives; a prediction above a censored row's bound has no error."""

    def derivatives(predicted: Floats, _: object) -> tuple[Floats, Floats]:
        # `one_sided` takes output minus reward, and a reward is minus a time.
        error = one_sided(target - predicted, censored).astype(np.float64)
        return -error, np.ones(len(target))

    return derivatives
