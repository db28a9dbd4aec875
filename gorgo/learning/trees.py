"""Boosted trees for the TTFT and for the time per output token, as in llm-d's latency predictor.

Theory of operation. Each time has a model of its own. Where rows with and without an engine's queue are both at least
`LEAST_ROWS` for both times, each time has two: one for replicas with a queue, and one without the columns of the queue.
Targets are multiplied by 1,000, which are llm-d's milliseconds, so that penalties on leaves have its size. One thread:
the trainer is a process beside a proxy, and the same rows make the same trees.

LightGBM is an extra, imported when a model is fitted or loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.training.learning import TargetKind, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import MissingExtra
from gorgo.learning.base import LEAST_TPOT_ROWS, FittedModel, capped_ttft_s, decode, encode, facts
from gorgo.learning.network import one_sided

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


# LightGBM reads a text of its own as it is: a number that is missing or wrong is a place in the memory, at which it
# aborts, or a branch that it follows for ever.

_HEAD_KEYS = frozenset(
    (
        *("version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective"),
        *("feature_names", "feature_infos", "tree_sizes"),
    )
)
#: Numbers of a tree by how many there are of them: one for each node, for each leaf, or in all.
_OF_NODES = ["split_feature", "split_gain", "threshold", "decision_type", "left_child", "right_child"]
_OF_NODES += ["internal_value", "internal_weight", "internal_count"]
_OF_LEAVES = ["leaf_value", "leaf_weight", "leaf_count"]
_IN_ALL = ["num_leaves", "num_cat", "is_linear", "shrinkage"]
_OF_CATEGORIES = ["cat_boundaries", "cat_threshold"]
#: Lists that it reads without a look at whether there is one.
_REQUIRED = frozenset(
    ("num_leaves", "num_cat", "split_feature", "threshold", "left_child", "right_child", "leaf_value")
)
#: Of a decision: whether it is one of categories, and the value that counts as missing (0 to 2), behind one bit more.
_CATEGORICAL, _MISSING_SHIFT, _MOST_MISSING = 1, 2, 2


def check_text(text: str, features: int) -> None:
    """Check that the trees of LightGBM's format lead over `features` columns to their leaves.

    Raises `ValueError` for a text that LightGBM does not write for the settings of this module.
    """
    if "\r" in text or "\0" in text or not text.startswith("tree\n"):
        raise ValueError("another format")
    start = text.find("\nTree=") + 1
    head = _assignments(text[len("tree\n") : start], _HEAD_KEYS)
    wanted = {"num_class": "1", "num_tree_per_iteration": "1", "max_feature_idx": str(features - 1)}
    for key, value in wanted.items():
        if head.get(key) != value:
            raise ValueError(f"{key} {head.get(key)!r}; expected {value}")
    if head.get("objective", "regression") != "regression":
        raise ValueError(f"objective {head['objective']!r}; expected regression")
    sizes = _integers(head, "tree_sizes")
    if not start or not sizes or min(sizes) < 1:
        raise ValueError("no trees")
    data = text[start:].encode()
    for number, size in enumerate(sizes):
        first = b"Tree=%d\n" % number
        if not data.startswith(first) or size > len(data):
            raise ValueError(f"no tree {number} where it begins by tree_sizes")
        try:
            _check_tree(data[len(first) : size].decode(), features)
        except ValueError as error:
            raise ValueError(f"tree {number}: {error}") from None
        data = data[size:]
    if not data.startswith(b"end of trees\n"):
        raise ValueError("no end of the trees where it is by tree_sizes")


def _check_tree(text: str, features: int) -> None:
    body = text.rstrip("\n")
    if len(text) - len(body) < 2 or "\n\n" in body:
        raise ValueError("no end")
    fields = _assignments(body, {*_OF_NODES, *_OF_LEAVES, *_IN_ALL, *_OF_CATEGORIES})
    if not fields.keys() >= _REQUIRED:
        raise ValueError(f"no {', '.join(sorted(_REQUIRED - fields.keys()))}")
    (leaves,), (categories,) = _integers(fields, "num_leaves", 1), _integers(fields, "num_cat", 1)
    if leaves < 1 or categories < 0 or fields.get("is_linear", "0") != "0":
        raise ValueError("leaves, categories or linear leaves that there are not")
    nodes = leaves - 1
    for keys, count in ((_OF_NODES, nodes), (_OF_LEAVES, leaves), (["shrinkage"], 1)):
        for key in keys:
            # LightGBM writes no weight of a leaf that is the whole tree, and reads none.
            if key in fields and not (leaves == 1 and key != "leaf_value" and not fields[key]):
                _numbers(fields, key, count)
    if not all(map(math.isfinite, _numbers(fields, "leaf_value", leaves))):
        raise ValueError("a leaf_value that is not finite")
    if not all(0 <= column < features for column in _integers(fields, "split_feature", nodes)):
        raise ValueError(f"a split_feature that is not 0 to {features - 1}")
    for key in ("left_child", "right_child"):
        # A node is made after its parent; leaves are negative.
        children = _integers(fields, key, nodes)
        if not all(node < child < nodes or -leaves <= child < 0 for node, child in enumerate(children)):
            raise ValueError(f"a {key} that is neither a later node nor a leaf")
    _check_categories(fields, nodes, categories)


def _check_categories(fields: Mapping[str, str], nodes: int, categories: int) -> None:
    decisions = _integers(fields, "decision_type", nodes) if "decision_type" in fields else [0] * nodes
    if not all(0 <= each >> _MISSING_SHIFT <= _MOST_MISSING for each in decisions):
        raise ValueError("a decision_type that there is not")
    places = [
        threshold
        for threshold, decision in zip(_numbers(fields, "threshold", nodes), decisions, strict=True)
        if decision & _CATEGORICAL
    ]
    if not all(threshold.is_integer() and 0 <= threshold < categories for threshold in places):
        raise ValueError(f"a threshold of categories that is not 0 to {categories - 1}")
    if categories:
        bounds = _integers(fields, "cat_boundaries", categories + 1)
        if bounds[0] != 0 or any(after <= before for before, after in pairwise(bounds)):
            raise ValueError("cat_boundaries that do not ascend from 0")
        words = _integers(fields, "cat_threshold", bounds[-1])
        if not all(0 <= word < 1 << 32 for word in words):
            raise ValueError("a cat_threshold of more than 32 bits")


def _assignments(text: str, keys: Set[str]) -> dict[str, str]:
    """Return the lines `key=value`, each key once."""
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        key, _, value = line.partition("=")
        if line and (key not in keys or key in fields or "=" not in line):
            raise ValueError(f"the line {line[:40]!r}")
        fields[key] = value
    return fields


def _numbers(fields: Mapping[str, str], key: str, count: int) -> list[float]:
    words = _words(fields, key, count)
    return [float(word) for word in words]


def _integers(fields: Mapping[str, str], key: str, count: int | None = None) -> list[int]:
    return [int(word) for word in _words(fields, key, count)]


def _words(fields: Mapping[str, str], key: str, count: int | None) -> Sequence[str]:
    value = fields.get(key, "")
    words = value.split(" ") if value else []
    if (count is not None and len(words) != count) or not value.isascii() or "_" in value:
        raise ValueError(f"{len(words)} numbers of {key}; expected {count}")
    return words


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
    has_tpot = np.isfinite(rows.tpot_s)
    ttft = encode(capped_ttft_s(rows, spec.target_cap_s), spec.target)
    timed = {"ttft": (rows, ttft)} | (
        {"tpot": (rows.select(has_tpot), encode(rows.tpot_s[has_tpot], spec.target))}
        if has_tpot.sum() >= LEAST_TPOT_ROWS
        else {}
    )
    boosters = {}
    if _is_split(rows, has_tpot):
        for time, (part, target) in timed.items():
            queued = part.features[:, rows.names.index(_QUEUE)] > 0.0
            for name, chosen, left_out in (("idle", ~queued, _QUEUE_COLUMNS), ("queued", queued, ())):
                boosters[f"{time}_{name}"] = _fit(part.select(chosen), target[chosen], left_out, time, seed)
    else:
        boosters = {time: _fit(part, target, (), time, seed) for time, (part, target) in timed.items()}
    return TreesModel(**facts(rows, version), boosters=boosters, target=spec.target)


def _is_split(rows: TrainingRows, has_tpot: NDArray[np.bool_]) -> bool:
    """Return whether rows with and without a queue suffice for models of their own."""
    if _QUEUE not in rows.names:
        return False
    queued = rows.features[:, rows.names.index(_QUEUE)] > 0.0
    return min(int(np.sum(part)) for part in (queued, ~queued, queued & has_tpot, ~queued & has_tpot)) >= LEAST_ROWS


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
