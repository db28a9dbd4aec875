"""What a policy or a weight set would have done to the decisions of a log, and what came of it.

Owns the choice of the other policy for each logged decision, the outcomes that are compared, and the verdict. Leaves
the arithmetic to `gorgo.lab.whatif.estimate`, and the log to `gorgo.lab.decisions`.

Theory of operation. The other policy chooses again among the candidates as the log has them; its chance of the replica
that the request went to is the row's. This says what single decisions would have brought, made now and then by the
other policy in a fleet where the log's policy makes the rest. It does not say what the queues and caches would become
if all decisions were made so: that is a question for a simulation, or for live blocks.

A policy is judged by three outcomes: the share of requests that are later than the p95 TTFT of the log's policy, and
the means of TTFT and E2E, from the dispatch. A failed request is late, and counts in the means with the time until it
failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Policy, choice_chances
from gorgo.core.policy.weights import Weights
from gorgo.core.training.learning import Learner
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.decisions import LoggedDecision
from gorgo.lab.whatif.estimate import (
    USUAL,
    EstimatedChange,
    Estimator,
    Support,
    Weighted,
    binned_means,
    blocks_of,
    changes,
    support,
)
from gorgo.policies.gorgo_ms import predict_times

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
        found = late.changes.get("dr")
        if found is None or not self.support.is_enough or found.low <= 0.0:
            return None
        return (
            f"the log refutes it: {found.change:.1f} points more requests are later than {self.late_s * 1e3:.0f} ms "
            f"(+{found.low:.1f} to +{found.high:.1f})"
        )

    @property
    def unpromising(self) -> str | None:
        """Return why the policy would gain less than a fifth of the late requests, or make more late; `None` if not.

        Decisions by chance say whether it makes more late. Where there are too few, the router's own predictions do.
        """
        if self.refuted is not None:
            return self.refuted
        late = 100.0 * LATE_SHARE
        wanted, found = LEAST_GAIN * late, self.outcomes[0].changes.get("dr")
        if self.late_gain < wanted:
            return f"the log refutes it: {self.late_gain:.2f} of {late:g} points of late requests would be in time"
        if found is not None and found.low > -wanted:
            return f"the log refutes it: at most {-found.low:.2f} points fewer requests would be late, of {late:g}"
        if found is None and self.late_modelled > wanted:
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
        found = support(ours.own, self.probabilities, before)
        outcomes = []
        for name, unit, values in self._outcomes:
            known = ~np.isnan(values)
            estimates = self._changes(values, known, ours, reference) if found.is_enough and known.any() else {}
            logged = float(values[known].mean()) if known.any() else float("nan")
            outcomes.append(JudgedOutcome(name, unit, logged, estimates))
        gain, modelled = self._late(ours, reference)
        return Judgement(policy.name, found, tuple(outcomes), self.late_s, gain, modelled)

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
        known = ~np.isnan(values)
        if not known.any():
            return nan, nan
        model, late = self._model(values, known), values[known]
        expected, before = model.expected(ours), model.own if theirs is None else model.expected(theirs)
        changed = 1.0 - ours.own if theirs is None else (ours.own != theirs.own).astype(np.float64)
        gains = late * changed[known] * (1.0 - expected / 100.0)
        usual = self._usual[known]
        return float(gains[usual].mean()), float((expected - before)[usual].mean())

    def _changes(
        self, values: Floats, known: NDArray[np.bool_], ours: Chances, theirs: Chances | None
    ) -> Mapping[Estimator, EstimatedChange]:
        model = self._model(values, known)

        def weighted(chances: Chances) -> Weighted:
            return Weighted(chances.own[known] / self.probabilities[known], model.expected(chances))

        return changes(
            values[known],
            self.blocks[known],
            model.own,
            weighted(ours),
            None if theirs is None else weighted(theirs),
        )

    def _model(self, values: Floats, known: NDArray[np.bool_]) -> _Model:
        places: list[int] = np.flatnonzero(known).tolist()
        own = np.array([self._predicted_s[at][self.decisions[at].chosen] for at in places])
        edges, means = binned_means(own, values[known])
        rows = [means[np.searchsorted(edges, self._predicted_s[at])] for at in places]
        return _Model(means[np.searchsorted(edges, own)], places, rows)


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
    ttft_s = [one.ttft_s for one, own in zip(decisions, usual, strict=True) if own and one.ttft_s == one.ttft_s]
    return float(np.quantile(ttft_s, 1.0 - LATE_SHARE)) if ttft_s else float("nan")
