"""One replica in the core: what is known of it beforehand, and its state while it is in the fleet.

Owns the record of identity, models and priors (`ReplicaSpec`), the detection of restarts (`RestartDetector`), and
health, prefill queue and learned speeds (`Replica`). Leaves cells and slots to `fleet.fleet`.

Attempts reference a `Replica` until they end. Its cells are in the fleet's columns at its slot. A replica that has left
has slot -1, so an attempt that ends late releases nothing, even when another replica has its slot by then. The prefill
queue writes its cells after each change.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan

from gorgo.core.fleet.columns import Columns, accelerator_code
from gorgo.core.fleet.outlier import HealthState, OutlierDetector
from gorgo.core.latency.decode import AnswerLength, ConcurrencyLimit, TokenGap
from gorgo.core.latency.prefill import PrefillPrior, ReportedSpeed
from gorgo.core.latency.prefill_queue import PrefillQueue
from gorgo.core.latency.tcp import connect_round_trips
from gorgo.core.limits import OutlierLimits
from gorgo.core.messages.request import EngineSample

# Restarts of an engine, detected by its counters: its cache is then empty.
#
# Theory of operation. A restart between two probes leaves no other trace: probes succeed, broken connections are
# retried, and the prefix index would be wrong for hours. Counters only grow while a process runs, so a counter that
# went back is another process. A process that has served as much as its predecessor had at the last scrape is not
# detected; the index had little of that one. A partition moves no counter, and the index stays.


#: Counters since the engine's start; an engine reports some of them.
_COUNTERS = ("prompt_tokens_total", "prefill_tokens_total")


class RestartDetector:
    """The counters of one engine as scraped last.

    Example
    -------
    >>> restarts = RestartDetector()
    >>> [restarts.observe(EngineSample(prompt_tokens_total=total)) for total in (900.0, 900.0, None, 20.0)]
    [False, False, False, True]
    >>> restarts.count
    1
    """

    __slots__ = ("_last", "count")

    def __init__(self) -> None:
        #: Since the replica joined the fleet.
        self.count = 0
        self._last: dict[str, float] = {}

    def observe(self, sample: EngineSample) -> bool:
        """Return whether the process is another one than at the last scrape."""
        reported = {name: value for name in _COUNTERS if (value := getattr(sample, name)) is not None}
        restarted = any(value < self._last.get(name, 0.0) for name, value in reported.items())
        self._last |= reported
        self.count += restarted
        return restarted


# What the core knows of a replica: identity, what it serves, priors of its size. No URL, no key.


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One engine process, by name.

    Parameters
    ----------
    name:
        Unique in the fleet; identity is the name, never the URL.
    region:
        Where it is.
    models:
        Models that it serves; empty means any.
    kv_capacity_tokens, max_running_requests:
        Priors from regions.yaml; an engine's own report replaces them.
    prefill_base_s, prefill_tokens_per_s, prefill_kappa_s:
        Priors of the time of a prefill (`core.latency.prefill`); `None` is the default.
    tls:
        Whether connections to it are: a new one then takes a round trip more.
    accelerator:
        Name of its accelerator from regions.yaml; `None` is unknown.
    """

    name: str
    region: str
    models: tuple[str, ...] = ()
    kv_capacity_tokens: int | None = None
    max_running_requests: int | None = None
    prefill_base_s: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_kappa_s: float | None = None
    tls: bool = False
    accelerator: str | None = None


#: Priors from regions.yaml that an engine's report replaces.
_CAPACITY_FIELDS = ("kv_capacity_tokens", "max_running_requests")


#: Doubtful answers in a row (a 4xx, or one token) after which they may be the replica's fault.
SUSPECT_AFTER = 3


@dataclass(slots=True, eq=False)
class Replica:
    """One replica while it is in the fleet."""

    spec: ReplicaSpec
    slot: int
    columns: Columns
    health: OutlierDetector
    prior: PrefillPrior
    prefill_queue: PrefillQueue
    reported_speed: ReportedSpeed
    #: Most requests in flight if answers are to end in time.
    concurrency: ConcurrencyLimit = field(default_factory=ConcurrencyLimit)
    #: Requests that decode and their time per output token; `None` while nothing counts them.
    token_gap: TokenGap | None = None
    #: Of its whole answers.
    answer_length: AnswerLength = field(default_factory=AnswerLength)
    restarts: RestartDetector = field(default_factory=RestartDetector)
    #: Models that the engine itself lists; empty while unknown.
    listed_models: tuple[str, ...] = ()
    draining: bool = False
    #: State in the last `HealthChanged`.
    reported_state: HealthState = HealthState.HEALTHY
    drained_s: float | None = None
    probed_s: float | None = None
    #: Whether the last probe was answered; `None` before the first.
    answers: bool | None = None
    scraped_s: float | None = None
    #: Attempts dispatched there, and those that failed (before or after content), since it joined.
    attempts: int = 0
    failures: int = 0
    #: Status by which it refused a request that another replica answered; `None` after an answer of its own.
    refusal: int | None = None
    #: Status of 4xx by which it refused its last probe; `None` if it did not.
    probe_refusal: int | None = None
    #: 4xx in a row, and when the first of them was: only an answer to a later request ends the count.
    client_errors: int = 0
    client_errors_s: float = float("-inf")
    #: Doubtfully short answers in a row; negative after other replicas have answered as shortly.
    short_answers: int = 0
    #: End of the first of them: only a longer answer to a later request ends the count.
    short_answers_s: float = float("-inf")
    #: Objectives per output token of the requests in flight there that have one, ascending, s.
    tpot_objectives: list[float] = field(default_factory=list)

    @classmethod
    def create(cls, spec: ReplicaSpec, slot: int, columns: Columns, ejection: OutlierLimits) -> Replica:
        """Return a new replica and write its priors to its empty cells."""
        prior = _prefill_prior(spec)
        replica = cls(spec, slot, columns, OutlierDetector(ejection), prior, PrefillQueue(), ReportedSpeed(prior))
        columns.salt[slot] = _salt(spec.name)
        for name in _CAPACITY_FIELDS:
            getattr(columns, name)[slot] = _known(getattr(spec, name))
        replica._publish_spec()
        replica._publish_prior()
        replica.prefill_queue.on_change = replica._publish_queue
        return replica

    @property
    def models(self) -> tuple[str, ...]:
        """Models of the configuration, then others that the engine lists; empty means any."""
        return tuple(dict.fromkeys((*self.spec.models, *self.listed_models)))

    @property
    def doubtful(self) -> bool:
        """Return whether its last answers broke off or were short."""
        return self.short_answers >= SUSPECT_AFTER or self.health.breaks_answers

    def add_tpot_objective(self, slo_tpot_s: float) -> None:
        """Count a request in flight with an objective per output token."""
        insort(self.tpot_objectives, slo_tpot_s)
        self._publish_tpot_objective()

    def remove_tpot_objective(self, slo_tpot_s: float) -> None:
        """Count the end of that request."""
        self.tpot_objectives.remove(slo_tpot_s)
        self._publish_tpot_objective()

    def _publish_tpot_objective(self) -> None:
        if self.slot >= 0:
            self.columns.slo_tpot_s[self.slot] = self.tpot_objectives[0] if self.tpot_objectives else nan

    def update(self, spec: ReplicaSpec) -> None:
        """Apply changed priors; an unchanged one must not undo what the engine has reported."""
        columns = self.columns
        for name in _CAPACITY_FIELDS:
            if getattr(spec, name) != getattr(self.spec, name):
                getattr(columns, name)[self.slot] = _known(getattr(spec, name))
        self.spec = spec
        self._publish_spec()
        prior = _prefill_prior(spec)
        if prior != self.prior:
            # What was learned was the error of the old one.
            self.prior = prior
            self.reported_speed = ReportedSpeed(prior)
            self._publish_prior()
            self.prefill_queue.reset_speed()

    def learn_answer(self, tokens: int) -> None:
        """Record the length of a whole answer."""
        if self.slot >= 0:
            self.answer_length.add(tokens)
            self.columns.answer_tokens[self.slot] = self.answer_length.mean_tokens

    def learn_gap(self, spent_s: float, *, tokens: int, mark: float) -> None:
        """Record a whole answer of two or more tokens, `spent_s` from its first to its last."""
        if self.token_gap is not None and self.slot >= 0:
            self.token_gap.on_answer(spent_s, tokens=tokens, mark=mark)
            self.columns.token_gap_s[self.slot] = self.token_gap.alone_s

    def _publish_queue(self) -> None:
        slot, columns, queue = self.slot, self.columns, self.prefill_queue
        if slot >= 0:
            columns.drained_at_s[slot] = queue.drained_at_s
            columns.head_due_s[slot] = queue.head_due_s
            columns.waiting_prefill_s[slot] = queue.backlog_s
            columns.slowdown[slot] = queue.speed.factor
            shared_s = queue.shared_s
            if shared_s or columns.shared_s.item(slot):
                columns.shared_s[slot] = shared_s
                columns.head_shared_s[slot] = queue.head_shared_s
                columns.head_began_s[slot] = queue.head_began_s

    def _publish_spec(self) -> None:
        slot, columns, accelerator = self.slot, self.columns, self.spec.accelerator
        columns.connect_round_trips[slot] = connect_round_trips(tls=self.spec.tls)
        columns.accelerator[slot] = nan if accelerator is None else accelerator_code(accelerator)

    def _publish_prior(self) -> None:
        slot, columns, prior = self.slot, self.columns, self.prior
        columns.prefill_base_s[slot] = prior.base_s
        columns.prefill_token_s[slot] = 1.0 / prior.tokens_per_s
        columns.prefill_kappa_s[slot] = prior.kappa_s


def _salt(name: str) -> int:
    """64 bits of the name, the same in every process and on every machine."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def _known(value: int | None) -> float:
    return nan if value is None else float(value)


def _prefill_prior(spec: ReplicaSpec) -> PrefillPrior:
    return PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
