"""The policy interface: a name, a unit, weights, the kind of prefix index, and one plain function that chooses.

Owns the protocols, and the shadow policy that scores decisions without changing them (`Shadow`). Leaves the policies to
`gorgo.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Literal, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.replica import Columns
from gorgo.core.latency.decode import SHARE
from gorgo.core.messages.decision import ShadowScore
from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats, none_if_nan
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.residency import SharedRuns
from gorgo.core.record import mutable_record, record
from gorgo.errors import ConfigError

# The table that a policy sees: numpy columns over the eligible replicas, one row each.
#
# Theory of operation: the fleet state keeps its columns for ever and updates cells in place. `Candidates` holds a
# reference to them and the slots that passed the filter. When every replica is eligible a column is the fleet's array
# itself; otherwise it is gathered once, on first use. A policy reads and never writes.


#: Shortest time per output token, s: less than any engine's.
LEAST_GAP_S = 1e-6


class _EligibleColumns:
    """The fleet's columns over the eligible rows alone, each gathered on first use."""

    def __init__(self, columns: Columns, slots: NDArray[np.intp]) -> None:
        self._columns, self._slots = columns, slots

    def __getattr__(self, name: str) -> Floats:
        column: Floats = getattr(self._columns, name)[self._slots]
        setattr(self, name, column)
        return column


def _column(name: str) -> Floats:
    """Return a property that reads a column of the eligible rows."""
    return cast(Floats, property(attrgetter(f"table.{name}")))


@mutable_record
class Candidates:
    """Eligible replicas as columns.

    Parameters
    ----------
    slots:
        Slot of each row, ascending.
    names:
        Name of each row.
    columns:
        The fleet's columns.
    matched_tokens:
        Per slot: prompt tokens of this request that are cached there by the prefix index.
    prompt_tokens:
        Prompt length of this request.
    is_all:
        True when the rows are all slots in order, so that columns need no gathering.
    now:
        When the decision is made, for columns that hold times.
    shared:
        Runs of this prompt that others went on from; `None` without one.
    found_share:
        Share of recent prompt tokens that some replica had.
    kv_wait_of_slots_s:
        Per slot: how long this request would wait for KV memory there, s; `None` if nowhere.
    """

    slots: NDArray[np.intp]
    names: Sequence[str]
    columns: Columns
    matched_tokens: Floats
    prompt_tokens: int
    is_all: bool
    now: float = 0.0
    shared: SharedRuns | None = None
    found_share: float = 0.0
    kv_wait_of_slots_s: Floats | None = None
    #: The columns of the rows.
    table: Columns = field(init=False)
    _cached: Floats | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.table = self.columns if self.is_all else cast(Columns, _EligibleColumns(self.columns, self.slots))

    def __len__(self) -> int:
        return len(self.slots)

    rtt_s = _column("rtt_s")
    in_flight_requests = _column("in_flight_requests")
    in_flight_tokens = _column("in_flight_tokens")
    queued_prefill_tokens = _column("queued_prefill_tokens")
    uncached_prefill_tokens = _column("uncached_prefill_tokens")
    decoding_requests = _column("decoding_requests")
    first_tokens_s = _column("first_tokens_s")
    token_gap_s = _column("token_gap_s")
    running_requests = _column("running_requests")
    queued_requests = _column("queued_requests")
    used_tokens = _column("used_tokens")
    sampled_s = _column("sampled_s")
    kv_capacity_tokens = _column("kv_capacity_tokens")
    max_running_requests = _column("max_running_requests")
    drained_at_s = _column("drained_at_s")
    head_due_s = _column("head_due_s")
    waiting_prefill_s = _column("waiting_prefill_s")
    shared_s = _column("shared_s")
    head_shared_s = _column("head_shared_s")
    head_began_s = _column("head_began_s")
    prefill_share = _column("prefill_share")
    prefill_share_s = _column("prefill_share_s")
    slowdown = _column("slowdown")
    prefill_base_s = _column("prefill_base_s")
    prefill_token_s = _column("prefill_token_s")
    prefill_kappa_s = _column("prefill_kappa_s")
    cache_fill = _column("cache_fill")
    cwnd_bytes = _column("cwnd_bytes")
    rwnd_bytes = _column("rwnd_bytes")
    sent_s = _column("sent_s")
    connect_round_trips = _column("connect_round_trips")
    pace_bytes = _column("pace_bytes")
    burst_bytes = _column("burst_bytes")
    slo_tpot_s = _column("slo_tpot_s")
    accelerator = _column("accelerator")

    @property
    def salt(self) -> NDArray[np.uint64]:
        return self.columns.salt if self.is_all else self.columns.salt[self.slots]

    @property
    def cached_tokens(self) -> Floats:
        """Estimated cached prompt tokens of this request, per row."""
        if self.is_all:
            return self.matched_tokens
        if self._cached is None:
            self._cached = self.matched_tokens[self.slots]
        return self._cached

    @property
    def kv_wait_s(self) -> Floats | None:
        """How long this request would wait for KV memory, per row, s; `None` if nowhere."""
        waits_s = self.kv_wait_of_slots_s
        return waits_s if self.is_all or waits_s is None else waits_s[self.slots]

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens of this request to prefill, per row (U_i, docs/policies/gorgo.md)."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def discounts(self) -> Floats:
        """What a prefill leaves to other prompts, as a negative part of it, per row (`SharedRuns`)."""
        if self.shared is None:
            return np.zeros(len(self.slots))
        return self.shared.discounts(self.cached_tokens, self.prompt_tokens)

    @property
    def prefilling_requests(self) -> Floats:
        """Requests in flight before their first token, per row."""
        return self.in_flight_requests - self.decoding_requests

    @property
    def decode_tokens(self) -> Floats:
        """Estimated output tokens of the requests that decode, per row; NaN where the gap is unknown and some do.

        Each request has its first token and one more per learned gap since, which is longer the more decode.
        """
        decoding = self.decoding_requests
        since_s = np.maximum(decoding * self.now - self.first_tokens_s, 0.0)
        gap_s = np.maximum(self.token_gap_s, LEAST_GAP_S) * (1.0 + SHARE * decoding)
        return np.where(decoding == 0.0, 0.0, decoding + since_s / gap_s)

    @property
    def kv_usage(self) -> Floats:
        """Share of the KV pool in use, per row; NaN where unknown."""
        return self.used_tokens / np.maximum(self.kv_capacity_tokens, 1.0)

    @property
    def scrape_age_s(self) -> Floats:
        """Age of the scraped columns, per row; NaN where unknown."""
        return self.now - self.sampled_s


# A policy's choice among candidates, its prediction, the sum of its terms, and the tie-break that all policies share.
#
# Owns the records and this arithmetic (`choose_min_cost`). Leaves the terms to each policy. Costs are positive, lower
# is better, in the unit the policy states.


#: Costs this close count as equal (absolute, in the policy's own unit): near-ties in a burst herd.
TIE_EPSILON = 1e-9


@record
class Prediction:
    """A policy's prediction for each candidate, s: network and prefill on an idle replica, the work before this
    request, and its prefill alone.
    """

    idle_s: NDArray[np.float64]
    backlog_s: NDArray[np.float64]
    prefill_s: NDArray[np.float64]


class TermRows(Mapping[str, Floats]):
    """The terms of a few candidates, a row for each; a column is made when it is read, which few decisions are.

    Example
    -------
    >>> terms = TermRows(("rtt", "queue"), [(1.0, 2.0), (3.0, 4.0)])
    >>> terms["queue"].tolist(), terms.of_row(1)
    ([2.0, 4.0], {'rtt': 3.0, 'queue': 4.0})
    """

    __slots__ = ("_names", "_rows")

    def __init__(self, names: tuple[str, ...], rows: Sequence[tuple[float, ...]]) -> None:
        self._names, self._rows = names, rows

    def __getitem__(self, name: str) -> Floats:
        if name not in self._names:
            raise KeyError(name)
        index = self._names.index(name)
        return np.array([values[index] for values in self._rows])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def of_row(self, row: int) -> dict[str, float]:
        return dict(zip(self._names, self._rows[row], strict=True))


def terms_of_row(terms: Mapping[str, Floats], row: int) -> dict[str, float]:
    """Return the terms of one candidate."""
    if isinstance(terms, TermRows):
        return terms.of_row(row)
    return {name: column.item(row) for name, column in terms.items()}


@record
class Choice:
    """A policy's answer: the row picked among the candidates, and why.

    `terms` holds one column per named term of the cost, one entry per candidate; `cost` is their sum where the policy
    has a cost. `fallback` says in a word why the primary rule did not decide (`None` when it did). `predict` returns
    the predicted time to first token of any row, where the policy predicts, and `prediction` its parts. `features` is
    the table that a learned policy evaluated, one row per candidate. `learn` is called with the time when an attempt by
    this choice completes. `estimates` has columns beside the terms, s, one entry per candidate: what a policy predicted
    (`ttft`, `tpot`, of an answer in one piece `e2e`), and what is left of the objectives (`headroom_ttft`,
    `headroom_tpot`). `ties` is the column by which equal costs were told apart, by default the requests in flight, and
    `uniform` says that each row was as likely.
    """

    row: int
    terms: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    cost: NDArray[np.float64] | None = None
    predicted_ttft_s: float | None = None
    fallback: str | None = None
    predict: Callable[[int], float | None] | None = None
    prediction: Callable[[], Prediction] | None = None
    features: NDArray[np.float32] | None = None
    learn: Callable[[float], None] | None = None
    estimates: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    ties: Floats | None = None
    uniform: bool = False


def choice_chances(choice: Choice, in_flight: Floats) -> Floats | None:
    """Return the chance of each row in a choice by the least cost or by chance alone; `None` for any other.

    Example
    -------
    >>> choice_chances(Choice(0, cost=np.array([2.0, 2.0, 3.0])), np.zeros(3)).tolist()
    [0.5, 0.5, 0.0]
    """
    if choice.uniform:
        return np.full(len(in_flight), 1.0 / len(in_flight))
    cost = choice.cost
    if cost is None:
        return None
    tied = cost <= cost.min() + TIE_EPSILON
    load = in_flight if choice.ties is None else choice.ties
    tied &= load == load[tied].min()
    return tied / np.count_nonzero(tied) if tied[choice.row] else None


def explored_row(rows: int, share: float, rng: np.random.Generator) -> int | None:
    """Return any row for a share of decisions, which explore; `None` for the others."""
    return int(rng.integers(rows)) if rng.random() < share else None


def argmin_tiebreak(cost: NDArray[np.float64], in_flight: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return the row of the least cost; ties go to the fewest in flight, then to chance, against herding in a burst."""
    least = int(cost.argmin())
    tied = (cost <= cost.item(least) + TIE_EPSILON).nonzero()[0]
    if len(tied) == 1:
        return least
    load = in_flight[tied]
    tied = tied[load == load.min()]
    return int(tied[0] if len(tied) == 1 else tied[rng.integers(len(tied))])


def least_of_rows(cost: Sequence[float], least: float, in_flight: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Return the row that `argmin_tiebreak` returns for a few costs, in a third of its time; `least` is their least."""
    bound = least + TIE_EPSILON
    tied = [row for row, each in enumerate(cost) if each <= bound]
    if len(tied) <= 1:
        return cost.index(least)
    loads = in_flight.tolist()
    fewest = min([loads[row] for row in tied])
    tied = [row for row in tied if loads[row] == fewest]
    return tied[0] if len(tied) == 1 else tied[int(rng.integers(len(tied)))]


# Arithmetic that costs share: what an unknown signal is worth, and the sum of the terms.
#
# A policy states its cost as named columns, one entry per candidate, all in one unit; this module adds them up in one
# place, so that what `/admin/decisions` shows is what was compared.


def fill_unknown(column: Floats) -> Floats:
    """`column` with each unknown cell (NaN) taken as the worst known one, 0 where none is known.

    Unknown must never look free: a replica that has not answered a probe yet would attract all requests.
    """
    worst = column[column.argmax()]  # a fourth of the time of a reduction
    if worst == worst:  # NaN would have been the maximum: nothing is unknown
        return column
    worst = np.fmax.reduce(column)
    return np.where(np.isnan(column), worst if worst == worst else 0.0, column)


def choose_min_cost(
    terms: Mapping[str, Floats],
    candidates: Candidates,
    rng: np.random.Generator,
    *,
    fallback: str | None = None,
    predicted_ttft_s: Floats | Callable[[int], float | None] | None = None,
    forecast: Callable[[], Prediction] | None = None,
) -> Choice:
    """Return the candidate with the least sum of `terms`; ties go to the fewest in flight, then to chance.

    The decision retains the terms, so they must be the caller's own arrays, never the fleet's columns.
    `predicted_ttft_s` has an entry per candidate, NaN without a prediction, or is called for single rows.
    """
    columns = iter(terms.values())
    cost = next(columns)
    for column in columns:
        cost = cost + column
    row = argmin_tiebreak(cost, candidates.in_flight_requests, rng)
    predicts = _cell_of(predicted_ttft_s) if isinstance(predicted_ttft_s, np.ndarray) else predicted_ttft_s
    return Choice(row, terms, cost, None if predicts is None else predicts(row), fallback, predicts, forecast)


def _cell_of(column: Floats) -> Callable[[int], float | None]:
    def cell(row: int) -> float | None:
        return none_if_nan(column[row])

    return cell


#: `published`: no bound per replica and no correction by reports, as the papers have it (the global bound protects
#: memory only); failed attempts and restarts are forgotten, which the papers do not.
#: `bounded`: leaf-first LRU within each replica's KV capacity. `events`: `bounded`, and reports of the engine's cache
#: (KV events, pushes) in its place where a replica has them. `any`: the policy does not read the index.
IndexKind = Literal["published", "bounded", "events", "any"]


@runtime_checkable
class Policy(Protocol):
    """Scores and picks; never filters, reserves or waits.

    An instance belongs to one Router and may keep state of its own (a round-robin cursor). `candidates` has at least
    one row. `rng` is the only source of chance.
    """

    name: ClassVar[str]
    #: One line for the table of policies: source and rule.
    summary: ClassVar[str]
    #: Unit of the cost and its terms; "" for a policy without a cost.
    unit: ClassVar[str]
    weight_specs: ClassVar[tuple[WeightSpec, ...]]
    index: ClassVar[IndexKind]

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice: ...


@runtime_checkable
class HashesBlocks(Protocol):
    """A policy that reads `RouteRequest.kv_hashes` of one block size, also where no engine reports its cache."""

    hashed_block_tokens: ClassVar[int]


#: Interval of scrapes where no policy needs fresher signals, s.
USUAL_SCRAPE_S = 30.0


def signal_ages(*policies: object) -> dict[str, float]:
    """Return the signals that policies read of scrapes, with the age up to which each is worth reading, s.

    A policy declares them as `signal_ages`; of several the least age counts.
    """
    ages_s: dict[str, float] = {}
    for policy in policies:
        for name, age_s in getattr(policy, "signal_ages", {}).items():
            ages_s[name] = min(age_s, ages_s.get(name, age_s))
    return ages_s


def scrape_interval_s(configured: float | None, *policies: object) -> float:
    """Return the interval of scrapes: the configured one, else what the policies need, at most the usual one."""
    return configured or min(USUAL_SCRAPE_S, *signal_ages(*policies).values(), USUAL_SCRAPE_S)


def slow_signals(interval_s: float, *policies: object) -> dict[str, float]:
    """Return the signals that an interval of scrapes makes older than a policy needs, with the age it needs, s."""
    return {name: age_s for name, age_s in signal_ages(*policies).items() if interval_s > age_s}


@dataclass(frozen=True, slots=True)
class RouteStats:
    """The routes of a policy that learns them (`HasRoutes`), by origin: `local`, or other routers' (`remote`).

    Parameters
    ----------
    max_routes, ttl_s:
        Bound of all routes, and the time without use after which one is void, s.
    routes:
        Stored ones.
    unused_s:
        How long the longest unused one has not been used, s; without an origin that has none.
    evicted:
        Routes that had no place, so far.
    """

    max_routes: int
    ttl_s: float
    routes: Mapping[str, int]
    unused_s: Mapping[str, float]
    evicted: Mapping[str, int]


@runtime_checkable
class HasRoutes(Protocol):
    """A policy that stores routes of prefixes, within bounds of the Router's limits."""

    def set_route_limits(self, max_routes: int, ttl_s: float) -> None: ...

    def route_stats(self, *, now: float) -> RouteStats: ...


def takes_objectives(policy: object) -> bool:
    """Return whether a policy steers by `RouteRequest.slo_ttft_s`, which is then an objective and no deadline."""
    return getattr(policy, "takes_objectives", False) is True


def hashed_block_sizes(*policies: object) -> frozenset[int]:
    """Return the block sizes that policies read."""
    return frozenset(policy.hashed_block_tokens for policy in policies if isinstance(policy, HashesBlocks))


# The shadow policy: scores each decision and changes none, so that its ordering is measured on live traffic.
#
# Owns its scores, and which index two policies can share. See `lab.rank` for scores against measured first tokens.
#
# Theory of operation. Under a policy that routes at random, a shadow's rank of the chosen replica is independent of
# everything else, so the time to first token by rank says whether the shadow orders replicas rightly (the validation
# of the GORGO paper). The shadow sees the very candidates that were chosen from, and draws from a generator of its
# own, so that nothing is decided differently for its being there.


class Shadow:
    """A policy that scores and does not route, with its own default weights.

    Parameters
    ----------
    policy:
        A new instance, checked by `validate_shadow`.
    rng:
        Its own.
    """

    __slots__ = ("_rng", "_weights", "policy")

    def __init__(self, policy: Policy, rng: np.random.Generator) -> None:
        self.policy = policy
        self._weights = Weights.of(policy.weight_specs)
        self._rng = rng

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice:
        """Return the choice that it would have made."""
        return self.policy.choose(request, candidates, self._weights, self._rng)

    def score(self, choice: Choice, row: int) -> ShadowScore:
        """Return the score of the candidate in `row` by its own choice."""
        if choice.cost is None:
            return ShadowScore(self.policy.name, None, None, None)
        cost = float(choice.cost[row])
        rank = 1 + int(np.count_nonzero(choice.cost < cost - TIE_EPSILON)) if len(choice.cost) > 1 else None
        predicted_s = None if choice.predict is None else choice.predict(row)
        return ShadowScore(self.policy.name, rank, cost, predicted_s)


def validate_shadow(policy: Policy, shadow: Policy) -> None:
    """Raise `ConfigError` if `shadow` cannot score the decisions of `policy`."""
    if not shadow.unit:
        raise ConfigError(f"shadow policy {shadow.name!r} has no cost to rank replicas by; expected one that has")
    required_index(policy, shadow)


def required_index(policy: Policy, shadow: Policy | None) -> IndexKind:
    """Return the prefix index of both. Raise `ConfigError` if each reads another kind."""
    wanted = {other.index: other.name for other in (policy, shadow) if other is not None and other.index != "any"}
    if len(wanted) > 1:
        indexes = ", ".join(f"{name!r} the {kind} one" for kind, name in wanted.items())
        raise ConfigError(
            f"shadow policy and policy read different prefix indexes ({indexes}), and there is one; "
            "expected a pair of one kind, or a policy that reads none (random, round-robin)"
        )
    return next(iter(wanted), "published")
