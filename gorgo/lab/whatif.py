"""`gorgo whatif`: what a policy or a weight set would have done to the decisions of a log, and what came of it.

Owns the choice of the other policy for each logged decision, the outcomes that are compared, the off-policy estimates
of their change with intervals, the verdict, its picture beside the twin's estimate, and the tuner's first filter.
Leaves the log to `gorgo.lab.decisions`. Its parts, in the order of the file:

- `support`, `changes`: the estimators;
- `JudgedLog`: the choices and the verdict;
- `LogFilter`: a candidate of the tuner that a log refutes touches no traffic;
- `Twin`: the log's time simulated again, under the log's policy and under the other one.

Theory of operation. The other policy chooses again among the candidates as the log has them; its chance of the replica
that the request went to is the row's. This says what single decisions would have brought, made now and then by the
other policy in a fleet where the log's policy makes the rest. It does not say what the queues and caches would become
if all decisions were made so: that is a question for a simulation, or for live blocks.

A policy is judged by three outcomes: the share of requests that are later than the p95 TTFT of the log's policy, and
the means of TTFT and E2E, from the dispatch. A failed request is late, and counts in the means with the time until it
failed.

A row of an estimate has the outcome r of a decision, the chance p that its replica had, and the chance pi that
the other policy gives it. The weight is w = pi / p: where one in a hundred decisions goes to any of four replicas, one
that the other policy would have made there stands for four hundred. Three estimates of the mean outcome under the other
policy are made of them:

- `ips`, inverse propensity scoring: the mean of w r (Horvitz and Thompson), unbiased and noisy;
- `snips`, self-normalised: the same over the mean of w, which cancels most of the noise of the weights;
- `dr`, doubly robust: the mean of q(pi) + w (r - q), q the outcome that a model predicts (Dudik, Langford and Li,
  arXiv 1103.4601). It is unbiased whatever the model predicts, as p is known; the noise left is that of the model's
  error.

What counts is the change from the log's own mean, since both have the noise of the traffic. A decision changes the
queues and caches of the next ones, so outcomes of one minute are alike: the interval comes from the sums of blocks of
minutes, as if these were independent. Few decisions by chance carry most of the variance, and the fewer blocks they
fall into, the wider the interval: its Student's t has as many degrees of freedom as a variance with the spread of the
blocks' squares would have (Satterthwaite).

References
----------
D. G. Horvitz and D. J. Thompson, "A Generalization of Sampling Without Replacement from a Finite Universe", JASA
47(260), 1952. A. Swaminathan and T. Joachims, "The Self-Normalized Estimator for Counterfactual Learning", NIPS 2015.
M. Dudik, J. Langford and L. Li, "Doubly Robust Policy Evaluation and Learning", ICML 2011. F. E. Satterthwaite, "An
Approximate Distribution of Estimates of Variance Components", Biometrics Bulletin 2(6), 1946.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import inf, nan, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.config.load import load_config
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Policy, choice_chances
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import Learner
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.decisions import LoggedDecision, newest_decisions
from gorgo.lab.report import require_extra
from gorgo.lab.results import ResultRow
from gorgo.policies.gorgo_ms import predict_times
from gorgo.policies.registry import make_policy

Estimator = Literal["ips", "snips", "dr"]

#: Blocks are of a minute, and longer in a long log, so that each has its part of slower changes too.
BLOCK_S = 60.0
MOST_BLOCKS = 120
#: A decision counts as one by chance where the other policy gives it so many times the chance that it had.
BY_CHANCE = 1.5
#: From this chance on a decision was the log's policy's own.
USUAL = 0.5
#: Fewer decisions by chance, in effect, are no support for an estimate: below, intervals missed the truth more often.
LEAST_SUPPORT = 30.0
#: Quantile of the normal distribution for intervals of 95 %.
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class EstimatedChange:
    """The change of a mean outcome, with its interval of 95 %."""

    change: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Weighted:
    """A policy's weight of each row, and the outcome that a model predicts for its choice there."""

    weights: Floats
    predicted: Floats


@dataclass(frozen=True, slots=True)
class Support:
    """How far a log carries.

    Parameters
    ----------
    decisions:
        Of the log.
    changed:
        Share of them that another policy would have made otherwise.
    effective:
        Effective number of decisions that went, by chance, where only the other policy would have sent them
        (Kish: the square of the sum of their weights over the sum of squares).
    """

    decisions: int
    changed: float
    effective: float

    @property
    def is_enough(self) -> bool:
        """Return whether there are enough of them for an estimate."""
        return self.effective >= LEAST_SUPPORT

    @property
    def needed(self) -> float:
        """Return how many times as many decisions would be enough."""
        return LEAST_SUPPORT / self.effective if self.effective else inf


def support(chances: Floats, probabilities: Floats, reference: Floats | None = None) -> Support:
    """Return the support for a policy that gives each row's replica so much chance, where it had such a probability.

    `reference` has the chances of the weights that it is compared with, if these are not the log's.
    """
    usual = probabilities >= USUAL
    rows = usual if usual.any() else np.ones(len(chances), dtype=np.bool_)
    if reference is None:
        return Support(len(chances), float(1.0 - chances[rows].mean()), _effective(chances / probabilities))
    differs = chances != reference
    sizes = [_effective(np.where(differs, each / probabilities, 0.0)) for each in (chances, reference)]
    # Where the reference is what the log did, nothing of it went by chance alone.
    return Support(len(chances), float(differs[rows].mean()), min(sizes) if min(sizes) > 0.0 else max(sizes))


def changes(
    outcomes: Floats,
    blocks: NDArray[np.intp],
    predicted: Floats,
    other: Weighted,
    reference: Weighted | None = None,
) -> Mapping[Estimator, EstimatedChange]:
    """Return the change of the mean outcome by each estimator.

    Parameters
    ----------
    outcomes:
        Of each row.
    blocks:
        Number of its block.
    predicted:
        The outcome that a model predicts for the replica of the row.
    other, reference:
        What is compared; without a reference the log itself.
    """
    ours = _values(outcomes, predicted, other)
    theirs = None if reference is None else _values(outcomes, predicted, reference)
    estimates: dict[Estimator, EstimatedChange] = {}
    for name, (value, parts) in ours.items():
        before, less = (outcomes.mean(), outcomes) if theirs is None else theirs[name]
        estimates[name] = _estimate(float(value - before), parts - less, blocks)
    return estimates


def _values(outcomes: Floats, predicted: Floats, other: Weighted) -> Mapping[Estimator, tuple[float, Floats]]:
    """Return the mean outcome by each estimator, and each row's part of it; of a ratio by its first derivative."""
    weights = other.weights
    weighted = weights * outcomes
    mean_weight = float(weights.mean()) or 1.0
    normalised = float(weighted.mean()) / mean_weight
    robust = other.predicted + weights * (outcomes - predicted)
    return {
        "ips": (float(weighted.mean()), weighted),
        "snips": (normalised, normalised + weights * (outcomes - normalised) / mean_weight),
        "dr": (float(robust.mean()), robust),
    }


def _effective(weights: Floats) -> float:
    """Return the effective number of rows that stand for more than themselves."""
    off = weights[weights > BY_CHANCE]
    squares = float(np.sum(off**2))
    return float(np.sum(off)) ** 2 / squares if squares else 0.0


def blocks_of(times_s: Floats) -> NDArray[np.intp]:
    """Return the number of the block of each row.

    Example
    -------
    >>> blocks_of(np.array([0.0, 59.0, 61.0])).tolist(), len(set(blocks_of(np.arange(86_400.0)).tolist()))
    ([0, 0, 1], 120)
    """
    since_s = times_s - times_s.min()
    block_s = max(BLOCK_S, float(since_s.max()) / (MOST_BLOCKS - 1e-6))
    blocks: NDArray[np.intp] = np.floor(since_s / block_s).astype(np.intp)
    return blocks


def binned_means(values: Floats, outcomes: Floats, *, bins: int = 20) -> tuple[Floats, Floats]:
    """Return a model of outcomes: the upper edges of bins of a value with as many rows each, and the mean in each."""
    edges = np.unique(np.quantile(values, np.linspace(0.0, 1.0, bins + 1)[1:-1]))
    places = np.searchsorted(edges, values)
    counts = np.bincount(places, minlength=len(edges) + 1)
    sums = np.bincount(places, weights=outcomes, minlength=len(edges) + 1)
    return edges, np.where(counts > 0, sums / np.maximum(counts, 1), outcomes.mean())


def _estimate(change: float, parts: Floats, blocks: NDArray[np.intp]) -> EstimatedChange:
    """Return the interval by the sums of the blocks' deviations."""
    sums = np.bincount(blocks, weights=parts - parts.mean()) / len(parts)
    squares = sums**2
    total = float(squares.sum())
    if not total:
        return EstimatedChange(change, change, change)
    count = len(np.unique(blocks))
    if count < 2:
        return EstimatedChange(change, -inf, inf)
    spread = float(np.sum(squares**2)) - total**2 / count
    freedom = min(count - 1.0, 2.0 * total**2 / spread) if spread > 0.0 else count - 1.0
    reach = _student(max(freedom, 1.0)) * sqrt(total * count / (count - 1))
    return EstimatedChange(change, change - reach, change + reach)


def _student(freedom: float) -> float:
    """Return the quantile of Student's t for intervals of 95 % (Cornish and Fisher's expansion)."""
    z = _Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


#: Share of the log's first tokens that are late: the tuner's objective is the p95.
LATE_SHARE = 0.05
#: A candidate for the tuner gains at least this share of the late requests: less is not worth hours of its blocks. In
#: simulation those that blocks accepted for more than a tenth of the p95 TTFT gained a quarter or more.
LEAST_GAIN = 0.2
#: Fewer decisions have no p95 and too few blocks.
LEAST_DECISIONS = 200
#: A seed of the ties among which a policy chooses; they are chances here, and decide nothing.
_SEED = 0


@dataclass(frozen=True, slots=True)
class JudgedOutcome:
    """A mean outcome of the log, and what the other policy would have made of it.

    Parameters
    ----------
    name, unit:
        What it is.
    logged:
        The log's own mean.
    changes:
        By estimator; empty where the log does not support one.
    """

    name: str
    unit: str
    logged: float
    changes: Mapping[Estimator, EstimatedChange]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a log says of a policy.

    Parameters
    ----------
    policy:
        Its name.
    support:
        How far the log carries.
    outcomes:
        Late first tokens, mean TTFT, mean E2E.
    late_s:
        What counts as late: the p95 TTFT of the decisions that were not made by chance.
    late_gain:
        Points of late requests whose decision would be another one, of which the router's predictions expect that they
        are in time: no more can be gained by single decisions.
    late_modelled:
        Change of the late requests by these predictions alone, points: it needs no decision by chance.
    """

    policy: str
    support: Support
    outcomes: Sequence[JudgedOutcome]
    late_s: float
    late_gain: float
    late_modelled: float

    @property
    def refuted(self) -> str | None:
        """Return why the log refutes the policy: it makes more requests late beyond the interval; `None` if not."""
        late = self.outcomes[0]
        change = late.changes.get("dr")
        if change is None or not self.support.is_enough or change.low <= 0.0:
            return None
        return (
            f"the log refutes it: {change.change:.1f} points more requests are later than {self.late_s * 1e3:.0f} ms "
            f"(+{change.low:.1f} to +{change.high:.1f})"
        )

    @property
    def unpromising(self) -> str | None:
        """Return why the policy would gain less than a fifth of the late requests, or make more late; `None` if not.

        Decisions by chance say whether it makes more late. Where there are too few, the router's own predictions do.
        """
        if self.refuted is not None:
            return self.refuted
        late = 100.0 * LATE_SHARE
        wanted, change = LEAST_GAIN * late, self.outcomes[0].changes.get("dr")
        if self.late_gain < wanted:
            return f"the log refutes it: {self.late_gain:.2f} of {late:g} points of late requests would be in time"
        if change is not None and change.low > -wanted:
            return f"the log refutes it: at most {-change.low:.2f} points fewer requests would be late, of {late:g}"
        if change is None and self.late_modelled > wanted:
            return (
                f"the log refutes it: {self.late_modelled:.1f} points more requests are predicted to be later than "
                f"{self.late_s * 1e3:.0f} ms"
            )
        return None


@dataclass(frozen=True, slots=True)
class Chances:
    """A policy's chance of each row's replica, and of all candidates of each row."""

    own: Floats
    rows: Sequence[Floats]


@dataclass(frozen=True, slots=True)
class _Model:
    """The outcome that predicted times say, where it is known: of the replica taken, and of each candidate."""

    own: Floats
    places: Sequence[int]
    rows: Sequence[Floats]

    def expected(self, chances: Chances) -> Floats:
        """Return the mean over each row's candidates."""
        return np.array([float(chances.rows[at] @ row) for at, row in zip(self.places, self.rows, strict=True)])


class JudgedLog:
    """The decisions of a log, ready to be judged for any weights.

    Parameters
    ----------
    decisions:
        First attempts, oldest first.

    Raises `TraceError` for too few, and for decisions whose chances are not known.
    """

    def __init__(self, decisions: Iterable[LoggedDecision]) -> None:
        self.decisions = tuple(decisions)
        if len(self.decisions) < LEAST_DECISIONS:
            raise TraceError(f"the log has {len(self.decisions)} decisions; expected {LEAST_DECISIONS} at least")
        unknown = sorted({one.policy for one in self.decisions if one.probability is None})
        if unknown:
            raise TraceError(
                f"the log has decisions of {', '.join(unknown)} whose chances are not known; expected those of a "
                "policy that decides by its cost alone, or of random"
            )
        self.probabilities = np.array([one.probability for one in self.decisions], dtype=np.float64)
        self.blocks = blocks_of(np.array([one.decided_s for one in self.decisions]))
        #: A model's only feature of a candidate: the predicted time from the dispatch to the first token.
        self._predicted_s = [_predicted_s(one) for one in self.decisions]
        usual = self.probabilities >= USUAL
        #: Decisions that were not made by chance; all where there are none.
        self._usual = usual if usual.any() else np.ones(len(usual), dtype=np.bool_)
        #: What counts as late, s.
        self.late_s = _late_s(self.decisions, self._usual)
        self._outcomes = _outcomes(self.decisions, self.late_s)

    @property
    def explored(self) -> bool:
        """Whether any decision was made by chance."""
        return bool((self.probabilities < 1.0).any())

    def judge(self, policy: Policy, weights: Mapping[str, float], *, reference: Chances | None = None) -> Judgement:
        """Return what the log says of a policy under these weights, compared with `reference` or with the log itself.

        Raises `ConfigError` for a policy that no log of another one can answer for.
        """
        ours = self.chances(policy, weights)
        before = None if reference is None else reference.own
        support_of_policy = support(ours.own, self.probabilities, before)
        outcomes = []
        for name, unit, values in self._outcomes:
            measured = ~np.isnan(values)
            estimates = (
                self._changes(values, measured, ours, reference)
                if support_of_policy.is_enough and measured.any()
                else {}
            )
            logged = float(values[measured].mean()) if measured.any() else float("nan")
            outcomes.append(JudgedOutcome(name, unit, logged, estimates))
        gain, modelled = self._late(ours, reference)
        return Judgement(policy.name, support_of_policy, tuple(outcomes), self.late_s, gain, modelled)

    def chances(self, policy: Policy, weights: Mapping[str, float]) -> Chances:
        """Return the chances of each row's candidates under a policy. Raises as `judge` does."""
        check_replayable(policy)
        made = Weights.of(policy.weight_specs, weights, allow_out_of_range=True)
        rng = np.random.default_rng(_SEED)
        rows: list[Floats] = []
        for one in self.decisions:
            candidates = one.table.candidates(one.names)
            choice = policy.choose(one.table.request(""), candidates, made, rng)
            chances = choice_chances(choice, candidates.in_flight_requests)
            if chances is None:
                raise not_replayable(policy)
            rows.append(chances)
        return Chances(np.array([row[one.chosen] for row, one in zip(rows, self.decisions, strict=True)]), rows)

    def _late(self, ours: Chances, theirs: Chances | None) -> tuple[float, float]:
        """Return `Judgement.late_gain` and `late_modelled`, of the decisions that were not made by chance."""
        _, _, values = self._outcomes[0]
        measured = ~np.isnan(values)
        if not measured.any():
            return nan, nan
        model, late = self._model(values, measured), values[measured]
        expected, before = model.expected(ours), model.own if theirs is None else model.expected(theirs)
        changed = 1.0 - ours.own if theirs is None else (ours.own != theirs.own).astype(np.float64)
        gains = late * changed[measured] * (1.0 - expected / 100.0)
        usual = self._usual[measured]
        return float(gains[usual].mean()), float((expected - before)[usual].mean())

    def _changes(
        self, values: Floats, measured: NDArray[np.bool_], ours: Chances, theirs: Chances | None
    ) -> Mapping[Estimator, EstimatedChange]:
        model = self._model(values, measured)

        def weighted(chances: Chances) -> Weighted:
            return Weighted(chances.own[measured] / self.probabilities[measured], model.expected(chances))

        return changes(
            values[measured],
            self.blocks[measured],
            model.own,
            weighted(ours),
            None if theirs is None else weighted(theirs),
        )

    def _model(self, values: Floats, measured: NDArray[np.bool_]) -> _Model:
        places: list[int] = np.flatnonzero(measured).tolist()
        predicted = np.array([self._predicted_s[at][self.decisions[at].chosen] for at in places])
        edges, means = binned_means(predicted, values[measured])
        rows = [means[np.searchsorted(edges, self._predicted_s[at])] for at in places]
        return _Model(means[np.searchsorted(edges, predicted)], places, rows)


def check_replayable(policy: Policy) -> None:
    """Raise `ConfigError` for a policy that cannot choose again from a log."""
    if isinstance(policy, Learner) or getattr(policy, "draws", False) or not (policy.unit or policy.name == "random"):
        raise not_replayable(policy)


def not_replayable(policy: Policy) -> ConfigError:
    return ConfigError(
        f"policy {policy.name!r} cannot choose again from a log: it has no cost of a candidate's columns alone, or "
        "draws in its guards; expected one that has, as gorgo-ms, or gorgo simulate on a request log"
    )


def _predicted_s(one: LoggedDecision) -> Floats:
    prediction = predict_times(one.table.request(""), one.table.candidates(one.names)).prediction()
    return prediction.idle_s + prediction.backlog_s


def _outcomes(decisions: Sequence[LoggedDecision], late_s: float) -> Sequence[tuple[str, str, Floats]]:
    ttft_s = np.array([one.ttft_s for one in decisions])
    failed = np.array([one.failed for one in decisions])
    late = np.where(np.isnan(ttft_s) & ~failed, np.nan, ((ttft_s > late_s) | failed).astype(np.float64))
    return (
        ("late first tokens", "%", 100.0 * late),
        ("mean TTFT", "ms", 1e3 * ttft_s),
        ("mean E2E", "ms", 1e3 * np.array([one.e2e_s for one in decisions])),
    )


def _late_s(decisions: Sequence[LoggedDecision], usual: NDArray[np.bool_]) -> float:
    ttft_s = [
        one.ttft_s for one, is_usual in zip(decisions, usual, strict=True) if is_usual and one.ttft_s == one.ttft_s
    ]
    return float(np.quantile(ttft_s, 1.0 - LATE_SHARE)) if ttft_s else float("nan")


#: Newest decisions that are judged: more take seconds per candidate, in which the tuner does nothing else.
MOST_DECISIONS = 20_000


class LogFilter:
    """Says of a candidate why a log refutes it.

    A candidate is judged by the decisions that its incumbent made: how late requests are under other weights is known
    of few decisions. The log is read again for each incumbent, and while it has too few decisions of one.

    Parameters
    ----------
    read:
        Returns the newest decisions of the log, oldest first.
    policy:
        The tuned one.

    Raises `ConfigError` for a policy that cannot choose again from a log. A log that cannot be read any longer, or
    whose chances are not known, refutes nothing: a campaign does without.
    """

    def __init__(self, read: Callable[[], Iterable[LoggedDecision]], policy: Policy) -> None:
        check_replayable(policy)
        self._read, self._policy = read, policy
        self._incumbent: dict[str, float] | None = None
        #: The incumbent's decisions, and its own chances in them.
        self._log: tuple[JudgedLog, Chances] | None = None

    @classmethod
    def of(cls, path: Path, policy: str) -> LogFilter:
        """Return the filter of a log, which is read once; raises `TraceError` for a wrong one, too."""
        newest_decisions(path, most=1)
        return cls(lambda: newest_decisions(path, most=MOST_DECISIONS), make_policy(policy))

    def __call__(self, offspring: Mapping[str, float], incumbent: Mapping[str, float]) -> str | None:
        """Return why the log refutes the offspring against the incumbent; `None` if it does not."""
        before = dict(incumbent)
        if self._log is None or self._incumbent != before:
            self._incumbent, self._log = before, self._logged(before)
        if self._log is None:
            return None
        log, reference = self._log
        return log.judge(self._policy, offspring, reference=reference).unpromising

    def _logged(self, incumbent: Mapping[str, float]) -> tuple[JudgedLog, Chances] | None:
        """Return the decisions of an incumbent; `None` for too few."""
        name = self._policy.name
        try:
            made = [one for one in self._read() if one.policy == name and dict(one.weights) == incumbent]
            if len(made) < LEAST_DECISIONS:
                return None
            log = JudgedLog(made)
        except TraceError:
            return None
        return log, log.chances(self._policy, incumbent)


@dataclass(frozen=True, slots=True)
class Twin:
    """Two simulated runs of the same requests on the same fleet: all decisions by the log's policy, or by the other."""

    logged: ResultRow
    other: ResultRow

    def times_ms(self) -> Mapping[str, tuple[float | None, float | None]]:
        """Return the times of both, ms."""
        logged, other = _times_ms(self.logged), _times_ms(self.other)
        return {name: (logged[name], other[name]) for name in logged}

    def as_json(self) -> dict[str, Any]:
        """Return the times by name."""
        return {name: {"logged": before, "other": after} for name, (before, after) in self.times_ms().items()}


def simulate_twin(
    requests: str | Path,
    *,
    logged: tuple[str, Mapping[str, float]],
    other: tuple[str, Mapping[str, float]],
    config: Path,
    fleet: str | None,
) -> Twin:
    """Return both runs. `logged` and `other` are policies with their weights; raises what `gorgo simulate` does."""
    from gorgo.lab.simulate.simulate import run_policies  # the tuner's filter needs no simulator

    loaded = load_config(config)
    rows = []
    for policy, weights in (logged, other):
        rows += run_policies(
            requests,
            [policy],
            weights={policy: dict(weights)},
            config=loaded,
            fleet=fleet,
            baselines=(),
            n_jobs=1,
        )
    return Twin(*rows)


def _times_ms(row: ResultRow) -> dict[str, float | None]:
    e2e_ms = None if row.e2e_s.mean is None else 1e3 * row.e2e_s.mean
    return {"mean TTFT": row.ttft_ms.mean, "p95 TTFT": row.ttft_ms.p95, "mean E2E": e2e_ms}


#: Colours of the estimators, in the order from below.
_COLOURS = {"ips": "#767676", "snips": "#0072B2", "dr": "#D55E00"}


def write_judgement_plot(path: Path, judgement: Judgement, twin: Twin | None = None) -> None:
    """Write the picture as SVG. Raises `MissingExtra` without the extra `report`."""
    require_extra("a plot")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from gorgo.lab.report.style import RC

    image = BytesIO()
    with mpl.rc_context(RC):
        # Outcomes have units of their own, so that no axis is shared but that of the estimators.
        figure = Figure(figsize=(9.0, 2.6), layout="constrained")
        axes = figure.subplots(1, len(judgement.outcomes), sharey=True, squeeze=False).ravel().tolist()
        for panel, outcome in zip(axes, judgement.outcomes, strict=True):
            for level, (name, colour) in enumerate(_COLOURS.items()):
                change = outcome.changes.get(name)  # type: ignore[call-overload] # a name of the table
                if change is None:
                    continue
                panel.plot([change.low, change.high], [level, level], color=colour, linewidth=2)
                panel.plot([change.change], [level], "o", color=colour, markersize=6)
            before, after = (twin.times_ms() if twin else {}).get(outcome.name, (None, None))
            if before is not None and after is not None:
                panel.plot([after - before], [len(_COLOURS)], "D", color="#009E73", markersize=6)
            panel.axvline(0.0, color="#000000", linewidth=0.8)
            panel.set_ylim(-0.6, len(_COLOURS) + 0.6)
            panel.set_yticks(range(len(_COLOURS) + 1), [*_COLOURS, "twin"])
            panel.set_title(f"{outcome.name}, {outcome.logged:.3g} {outcome.unit} in the log")
            panel.set_xlabel(f"change, {'points' if outcome.unit == '%' else outcome.unit}")
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)
