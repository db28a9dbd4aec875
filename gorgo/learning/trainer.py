"""Rounds of training: rows come in, and a model comes out when enough of them are new.

Owns one fit (`fit`), and the rounds with their buffers and errors (`Trainer`). Leaves which rows are retained to
`buffers`, and the mathematics to `models`. A simulation's controller and the worker beside a proxy use the same object.
It measures no time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import COLUMNS, TrainingRows
from gorgo.errors import ConfigError
from gorgo.learning import trees
from gorgo.learning.linear import fit_linear, fit_rls
from gorgo.learning.network import fit_mlp
from gorgo.learning.residual import fit_residual

# The rows that a training uses: the newest ones, and older ones by a rule.
#
# Owns the stores of rows. Leaves when a round takes place to `trainer`.
#
# - `k_centre` chooses the rows that differ most in what they would teach.
# - `RowRing` is a queue of the newest rows.
# - `FifoReplay` has the newest rows, and a replay buffer of older ones that a rule admits when they leave the first.
# - `StratifiedStore` has the newest rows of each class of load.
#
# The paragraph below is the theory of `FifoReplay`.
#
# Theory of operation. Rows enter a FIFO. One that leaves it waits for the next round, which decides on all that wait:
# while the replay buffer has space they are admitted; from then on a pool of them and of stored rows, chosen by
# chance, is reduced by as many rows as there are too many. The coreset rule leaves those whose gradients differ most.


# Which rows differ most in what they would teach a model: greedy k-centre over gradients.
#
# Gradients are not normalised: the length is the size of the error, and its sign a part of the direction. A row that
# the model predicts well has a gradient near 0, so that one such row covers all others.
#
# References
# ----------
# O. Sener, S. Savarese: Active learning for convolutional neural networks: a core-set approach, 2018, algorithm 1.


Floats32 = NDArray[np.float32]


def k_centre(points: Floats32, count: int) -> NDArray[np.intp]:
    """Return `count` rows of a table, in the order picked.

    The first is the longest; each next one is farthest, in Euclidean distance, from its nearest picked row. The lower
    row wins a tie.

    >>> k_centre(np.array([[1.0], [2.0], [5.0], [9.0]], dtype=np.float32), 3).tolist()
    [3, 0, 2]
    """
    picked = np.empty(min(count, len(points)), dtype=np.intp)
    if not len(picked):
        return picked
    lengths = np.einsum("ij,ij->i", points, points)
    next_row = int(lengths.argmax())
    nearest = np.full(len(points), np.inf, dtype=np.float32)
    distances = np.empty_like(lengths)
    for number in range(len(picked)):
        picked[number] = next_row
        # |p - c|^2 = |p|^2 - 2 p.c + |c|^2: one product of a matrix and a vector per pick.
        np.matmul(points, points[next_row], out=distances)
        distances *= -2.0
        distances += lengths
        distances += lengths[next_row]
        np.minimum(nearest, distances, out=nearest)
        nearest[next_row] = -np.inf
        next_row = int(nearest.argmax())
    return picked


# The newest rows of training, in ring arrays that grow to a capacity.


#: Rows of the first allocation: most rings of a stratified store stay small.
_FIRST_ROWS = 64


class RowRing:
    """A queue of rows; the oldest leave when it is full.

    Parameters
    ----------
    names:
        Features of a row.
    capacity:
        Most rows stored. Memory doubles up to it as rows come.
    """

    def __init__(self, names: tuple[str, ...], capacity: int) -> None:
        self.names = names
        self.capacity = capacity
        self._cells = TrainingRows.empty(names)
        self._first = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def allocated(self) -> int:
        """Rows that there is memory for."""
        return len(self._cells)

    def append(self, rows: TrainingRows) -> TrainingRows:
        """Add rows, and return those that left for them, oldest first."""
        passing = max(0, len(rows) - self.capacity)
        leaving = max(0, min(self._count, self._count + len(rows) - self.capacity))
        left = TrainingRows.concat([self._oldest(leaving), rows.select(slice(0, passing))])
        self._first += leaving
        self._count -= leaving
        added = len(rows) - passing
        self._reserve(self._count + added)
        if added:
            cells = self._positions(self._count, self._count + added)
            for name in COLUMNS:
                getattr(self._cells, name)[cells] = getattr(rows, name)[passing:]
            self._count += added
        return left

    def stored(self) -> TrainingRows:
        """Return copies of all rows, oldest first."""
        return self._oldest(self._count)

    def _oldest(self, count: int) -> TrainingRows:
        return self._cells.select(self._positions(0, count))

    def _positions(self, start: int, end: int) -> NDArray[np.intp]:
        """Return the cells of rows by their rank, the oldest being 0."""
        return (self._first + np.arange(start, end)) % max(1, len(self._cells))

    def _reserve(self, count: int) -> None:
        """Make memory for `count` rows."""
        if count > len(self._cells):
            rows = self.stored()
            size = min(self.capacity, max(_FIRST_ROWS, 2 * count))
            self._cells = TrainingRows.concat([rows, TrainingRows.empty(self.names, size - len(rows))])
            self._first = 0


#: Rows among which a round chooses: a pick compares all, and 3,000 picks of 4,000 take about a second.
POOL = 4000
#: Rows that wait for a round, half of the pool so that stored rows compete; beyond it some are dropped by chance.
WAITING = POOL // 2
#: Older rows of rule `all`: more than the traces of the experiments have; a round takes some ten seconds then.
ALL_ROWS = 50_000


@runtime_checkable
class HasGradients(Protocol):
    """A model that the coreset rule can use."""

    def gradients(self, rows: TrainingRows, cap_s: float) -> NDArray[np.float32]:
        """Return a vector per row."""


class FifoReplay:
    """The rows of a round: FIFO and replay buffer.

    Parameters
    ----------
    spec:
        Sizes and rule.
    rng:
        Chance of the rule `random`, and of the pools.
    """

    def __init__(self, spec: TrainingSpec, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._fifo = RowRing(spec.names, spec.fifo)
        self._waiting = TrainingRows.empty(spec.names)
        self._replay = TrainingRows.empty(spec.names)
        self._all = RowRing(spec.names, ALL_ROWS)
        self._left = 0

    def __len__(self) -> int:
        return len(self._fifo) + len(self._replay) + len(self._all)

    def add(self, rows: TrainingRows) -> None:
        """Put rows into the FIFO; those that leave it wait for `fill_replay`."""
        left = self._fifo.append(rows)
        match self._spec.replay_rule:
            case "all":
                self._all.append(left)
            case "random":
                self._sample(left)
            case "coreset":
                waiting = TrainingRows.concat([self._waiting, left])
                self._waiting = waiting.select(self._some(len(waiting), WAITING))

    def fill_replay(self, model: object) -> None:
        """Decide on the rows that wait, by the model of the last round; by chance if it has no gradients."""
        replay, waiting = self._replay, self._waiting
        surplus = max(0, len(replay) + len(waiting) - self._spec.replay)
        if not surplus:
            self._replay = TrainingRows.concat([replay, waiting])
        else:
            in_pool = np.zeros(len(replay), dtype=np.bool_)
            in_pool[self._some(len(replay), POOL - len(waiting))] = True
            pool = TrainingRows.concat([replay.select(in_pool), waiting])
            stays = self._choose(pool, len(pool) - surplus, model)
            self._replay = TrainingRows.concat([replay.select(~in_pool), pool.select(stays)])
        self._waiting = TrainingRows.empty(self._spec.names)

    def stored(self) -> TrainingRows:
        """Return the rows of a round, older ones first."""
        return TrainingRows.concat([self._all.stored(), self._replay, self._fifo.stored()])

    def _choose(self, pool: TrainingRows, count: int, model: object) -> NDArray[np.intp]:
        if isinstance(model, HasGradients):
            return np.sort(k_centre(model.gradients(pool, self._spec.target_cap_s), count))
        return self._some(len(pool), count)

    def _some(self, rows: int, count: int) -> NDArray[np.intp]:
        """Return `count` of so many rows by chance, in their order; all of them if there are no more."""
        return np.sort(self._rng.choice(rows, count, replace=False)) if count < rows else np.arange(rows)

    def _sample(self, left: TrainingRows) -> None:
        """Reservoir sampling: each row that ever left is stored with the same probability."""
        capacity = self._spec.replay
        space = max(0, min(len(left), capacity - self._left))
        self._replay = TrainingRows.concat([self._replay, left.select(slice(0, space))])
        numbers = self._left + np.arange(space, len(left))
        self._left += len(left)
        if not len(numbers) or not capacity:
            return
        cells = self._rng.integers(0, numbers + 1)
        source = np.arange(capacity + len(left))[: len(self._replay)]
        for row, cell in zip(range(space, len(left)), cells.tolist(), strict=True):
            if cell < capacity:
                source[cell] = capacity + row
        both = TrainingRows.concat([self._replay, left])
        self._replay = both.select(source)


# Rows by how loaded the replica was: rare states are not displaced by the common idle one.
#
# A ring per class of queue, KV usage and cached share, as in llm-d's training server.


#: Least engine queue of each class but the first: 0, 1-2, 3-5, 6-10, 11 and more.
_QUEUES = (1.0, 3.0, 6.0, 11.0)
_KV_CLASSES = 20
_PREFIX_CLASSES = 4
STRATA = (len(_QUEUES) + 1) * _KV_CLASSES * _PREFIX_CLASSES
#: Rows of a ring; 200,000 in all, which is 40 MB with 20 features.
RING_ROWS = 500


class StratifiedStore:
    """The newest rows of each class.

    Parameters
    ----------
    names:
        Features of a row. `queued_requests`, `kv_usage` and `hit_share` make the classes; one that is not among them
        is one class.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._rings: dict[int, RowRing] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rings.values()))

    @property
    def allocated(self) -> int:
        """Rows that there is memory for."""
        return sum(ring.allocated for ring in self._rings.values())

    def add(self, rows: TrainingRows) -> None:
        """Put each row into the ring of its class."""
        classes = strata(rows)
        for number in np.unique(classes).tolist():
            ring = self._rings.setdefault(number, RowRing(self._names, RING_ROWS))
            ring.append(rows.select(np.flatnonzero(classes == number)))

    def stored(self) -> TrainingRows:
        """Return all rows, by the time of their dispatch."""
        rings = [self._rings[number].stored() for number in sorted(self._rings)]
        rows = TrainingRows.concat([TrainingRows.empty(self._names), *rings])
        return rows.select(np.argsort(rows.dispatched_s, kind="stable"))


def strata(rows: TrainingRows) -> NDArray[np.intp]:
    """Return the class of each row, from 0 to `STRATA` - 1."""
    queue = np.searchsorted(_QUEUES, _column(rows, "queued_requests"), side="right")
    kv = _steps(_column(rows, "kv_usage"), _KV_CLASSES)
    prefix = _steps(_column(rows, "hit_share"), _PREFIX_CLASSES)
    classes: NDArray[np.intp] = (queue * _KV_CLASSES + kv) * _PREFIX_CLASSES + prefix
    return classes


def _column(rows: TrainingRows, name: str) -> NDArray[np.float64]:
    """A feature of each row, or zeros if it is not among them."""
    if name not in rows.names:
        return np.zeros(len(rows))
    return rows.features[:, rows.names.index(name)].astype(np.float64)


def _steps(share: NDArray[np.float64], steps: int) -> NDArray[np.intp]:
    """Return the step of a share from 0 to 1; a share outside belongs to the nearest step."""
    return np.clip(np.floor(share * steps), 0, steps - 1).astype(np.intp)


# One training: rows, settings and a seed make a model.


def fit(rows: TrainingRows, spec: TrainingSpec, seed: int, version: int) -> Model:
    """Return the model of a round.

    Parameters
    ----------
    rows:
        All that the round trains on, with the features of `spec.names`.
    spec:
        Kind and settings.
    seed, version:
        Chance of the round, and the number that the model gets. The same arguments make the same model.

    Raises `ConfigError` for other features or without a row, and `MissingExtra` for kind `trees` without LightGBM.
    """
    if rows.names != spec.names:
        raise ConfigError(f"training: rows of features {', '.join(rows.names)}; expected {', '.join(spec.names)}")
    if not len(rows):
        raise ConfigError("training: no rows; expected at least one")
    rng = np.random.default_rng((seed, version))
    match spec.kind:
        case "mlp":
            return fit_mlp(rows, spec, rng=rng, version=version)
        case "residual":
            return fit_residual(rows, spec, rng=rng, version=version)
        case "linear":
            return fit_linear(rows, spec, version=version)
        case "trees":
            return trees.fit_trees(rows, spec, seed=int(rng.integers(2**31)), version=version)
        case _:
            return fit_rls(rows, spec, version=version)


#: Share of the rows that no round trains on, and how many of the newest are stored to measure errors by.
TEST_SHARE = 0.1
TEST_ROWS = 1000
#: Spreads numbers in sequence over 64 bits: 2^64 over the golden ratio.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@record
class TrainingReport:
    """A round.

    Parameters
    ----------
    version, kind:
        Of the model; version 0 and no kind before the first round.
    added, rejected:
        Rows received so far, and those among them with a number that is not finite.
    samples, censored:
        Rows that the round trained on, and those among them without an answer.
    whole_answers:
        Rows that the round trained on whose time is that of an answer in one piece.
    tested:
        Rows that errors were measured by; no round trains on them.
    ttft_mape, tpot_mape, e2e_mape:
        Mean of the error's share of the measured time, of first tokens, of output tokens, and of answers in one piece;
        `None` without such a row or prediction.
    refused:
        Rounds so far whose model was not adopted: the one in use predicts the same held-out rows better.
    verdict:
        Why the round's model was not adopted; `None` if it was.
    """

    version: int = 0
    kind: str | None = None
    added: int = 0
    rejected: int = 0
    samples: int = 0
    censored: int = 0
    whole_answers: int = 0
    tested: int = 0
    ttft_mape: float | None = None
    tpot_mape: float | None = None
    e2e_mape: float | None = None
    refused: int = 0
    verdict: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return asdict(self)


class Trainer:
    """The buffers of one policy's training, and its rounds.

    Theory of operation. A model replaces the one in use only if it predicts the same held-out rows as well: a round of
    few rows, as the first one after a restart, or of a bad hour would else replace a model of thousands. The newest
    held-out rows are compared, so that a change of the traffic tells. Where they are few, the model of more samples is
    the better one.

    Parameters
    ----------
    spec:
        Kind of model, buffers, and when a round is due.
    seed:
        Of all chance.
    incumbent:
        The model in use, of a former training: the first round here has the next version.

    Example
    -------
    >>> trainer = Trainer(TrainingSpec("linear", ("prompt_tokens",), first_samples=2), seed=0)
    >>> trainer.due(), trainer.report().version
    (False, 0)
    """

    def __init__(self, spec: TrainingSpec, seed: int, incumbent: Model | None = None) -> None:
        self.spec = spec
        self._seed = seed
        self._incumbent = incumbent
        self._version = version = 0 if incumbent is None else incumbent.version
        self._store: FifoReplay | StratifiedStore = (
            FifoReplay(spec, np.random.default_rng((seed, version)))
            if spec.store == "fifo"
            else StratifiedStore(spec.names)
        )
        self._test = RowRing(spec.names, TEST_ROWS)
        self._added = 0
        self._rejected = 0
        self._since_round = 0
        #: Rows so far that rounds train on: a policy refuses a model of fewer than `first_samples`.
        self._trainable = 0
        self._model: Model | None = None
        self._report = TrainingReport()

    def add(self, rows: TrainingRows) -> None:
        """Take outcomes; the number of a row decides whether it is trained on or tested by."""
        usable = np.isfinite(rows.features).all(axis=1) & np.isfinite(rows.ttft_s)
        tested = is_tested(rows)
        self._added += len(rows)
        self._rejected += int(np.sum(~usable))
        self._since_round += int(np.sum(usable))
        self._trainable += int(np.sum(usable & ~tested))
        self._store.add(rows.select(np.flatnonzero(usable & ~tested)))
        self._test.append(rows.select(np.flatnonzero(usable & tested)))

    def due(self) -> bool:
        """Return whether enough rows came since the last round; before the first one, enough to train on."""
        if self._model is None:
            return self._trainable >= max(self.spec.first_samples, 1)
        return self._since_round >= max(self.spec.round_samples, self.spec.round_growth * len(self._store))

    def train(self) -> Model | None:
        """Return the next model; `None` if the one in use is better. Raises `ConfigError` without a row."""
        if isinstance(self._store, FifoReplay):
            self._store.fill_replay(self._model)
        rows = self._store.stored()
        self._model = model = fit(rows, self.spec, self._seed, self._version + 1)
        self._version += 1
        self._since_round = 0
        test = self._test.stored()
        ttft, tpot = errors(model, test)
        verdict = None
        if self.spec.judged and self._incumbent is not None:
            verdict = why_worse(model, self._incumbent, test)
        self._report = TrainingReport(
            version=model.version,
            kind=model.kind,
            samples=len(rows),
            censored=int(np.sum(rows.censored)),
            whole_answers=int(np.sum(rows.unstreamed & ~rows.censored)),
            tested=len(test),
            ttft_mape=ttft,
            tpot_mape=tpot,
            e2e_mape=answer_error(model, test),
            refused=self._report.refused + (verdict is not None),
            verdict=verdict,
        )
        if verdict is not None:
            return None
        self._incumbent = model
        return model

    def report(self) -> TrainingReport:
        """Return the last round and the rows so far."""
        fields = self._report.as_dict() | {"added": self._added, "rejected": self._rejected}
        return TrainingReport(**fields)


def is_tested(rows: TrainingRows) -> NDArray[np.bool_]:
    """Return which rows are left out of training, by a hash of their numbers."""
    numbers = np.uint64(rows.first_seq) + np.arange(len(rows), dtype=np.uint64)
    spread = (numbers * _SPREAD) >> np.uint64(32)
    return spread < np.uint64(TEST_SHARE * 2**32)


def errors(model: Model, rows: TrainingRows) -> tuple[float | None, float | None]:
    """Return the mean absolute percentage errors of TTFT and time per token, as shares of 1."""
    measured = ~rows.censored & ~rows.unstreamed & (rows.ttft_s > 0.0)
    ttft = _mape(model.ttft_s(rows.features[measured]), rows.ttft_s[measured]) if measured.any() else None
    timed = rows.tpot_s > 0.0
    tpot = model.tpot_s(rows.features[timed]) if timed.any() else None
    return ttft, None if tpot is None else _mape(tpot, rows.tpot_s[timed])


def answer_error(model: Model, rows: TrainingRows) -> float | None:
    """Return the mean absolute percentage error of answers in one piece, as a share of 1; `None` without one."""
    whole = ~rows.censored & rows.unstreamed & (rows.ttft_s > 0.0)
    return _mape(model.ttft_s(rows.features[whole]), rows.ttft_s[whole]) if whole.any() else None


#: The newest held-out rows that two models are compared by: a tenth of as many outcomes is held out.
COMPARED_ROWS = 200
#: With fewer of them the model of more samples is the better one: the error of so few is chance.
LEAST_COMPARED = 20


def why_worse(model: Model, incumbent: Model, tested: TrainingRows) -> str | None:
    """Return why `model` may not replace `incumbent`, by the newest rows that were held out; `None` if it may.

    The error is the mean of those of both times where both models predict both.
    """
    newest = tested.select(slice(max(0, len(tested) - COMPARED_ROWS), len(tested)))
    measured = newest.select(np.flatnonzero(~newest.censored & (newest.ttft_s > 0.0)))
    if len(measured) < LEAST_COMPARED:
        if model.samples >= incumbent.samples:
            return None
        return f"{model.samples:,} samples, and version {incumbent.version} has {incumbent.samples:,}"
    mapes = [_mape(each.ttft_s(measured.features), measured.ttft_s) for each in (model, incumbent)]
    timed = measured.select(np.flatnonzero(measured.tpot_s > 0.0))
    per_token = [each.tpot_s(timed.features) if len(timed) else None for each in (model, incumbent)]
    if per_token[0] is not None and per_token[1] is not None:
        mapes = [
            0.5 * (error + _mape(each, timed.tpot_s))
            for error, each in zip(mapes, per_token, strict=True)
            if each is not None
        ]
    if mapes[0] <= mapes[1]:
        return None
    return (
        f"error {mapes[0]:.1%} on {len(measured)} held-out rows, where version {incumbent.version} has {mapes[1]:.1%}"
    )


def _mape(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.mean(np.abs(predicted - measured) / measured))
