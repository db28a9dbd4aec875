"""The campaign: one long experiment on a running proxy, as a state machine without input and output.

Owns the order of events (warm up, measure, propose, compare, decide, record, stop), the weights in force
(`AppliedWeights`), the published protocol of comparison (`Paper`), and the state that a restarted process needs
(`CampaignState`). Leaves the switchback to `tuner.campaign.switchback`, its verdict and the guardrail to
`tuner.campaign.comparison`, and proposals to an optimizer. The shell passes events with `now`, and executes the
returned actions in their order.

Theory of operation.

- `warming`: the incumbent is in force until a window of samples routed under it is full. The campaign returns to here
  after a roll-back, too little traffic, or saturation. No candidate is proposed while the fleet is saturated.
- `comparing`: a trial names the arm in force. Its result is given to the optimizer and recorded.
- `frozen`: the weights are pinned; nothing is put until they are unfrozen.
- `stopped`: the incumbent is in force.

A log of decisions may say of a candidate that it is worse (`Campaign.refutes`). Then it is rejected before any of its
blocks, while the incumbent is in force.

Each sample counts once. The saved state has the decisions and, of a switchback, the scored pairs; a measurement that
the end of the process interrupted is repeated.

`now` is Unix time: a resumed campaign continues with the same clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from gorgo.errors import GorgoError, TunerError, WeightsError
from tuner.campaign.comparison import Abandon, Arm, Outcome, Trial, Verdict
from tuner.campaign.generation import Action, Freeze, GenerationLog, PutWeights, RollBack, Stop, Wait
from tuner.campaign.options import CampaignOptions
from tuner.campaign.switchback import Switchback
from tuner.objective import RollingWindow, SampleCursor, TunerSample, WindowStats
from tuner.optimizers.base import Optimizer, generator_of, generator_state
from tuner.optimizers.registry import load_optimizer
from tuner.saved_fields import MAX_TIME_S, SavedFields
from tuner.space import LogBox

# The weights that a campaign has requested, the version under which they are in force, and the samples since. Here it
# is decided which samples count, and when enough is known of the weights in force.


class AppliedWeights:
    """Counts only samples of versions that the campaign has put since the proxy started."""

    def __init__(self, options: CampaignOptions) -> None:
        self.recent = RollingWindow(options.window, options.hop)
        self.ticket = 0
        self.version: int | None = None
        self._options = options
        self._applied_s: float | None = None
        self._oldest_version: int | None = None

    @property
    def known(self) -> bool:
        """Whether any weights of the campaign were in force since the proxy started."""
        return self._oldest_version is not None

    def requested(self) -> int:
        """Record a put and return its ticket; until the answer no version is known to be in force."""
        self.ticket += 1
        self.version = self._applied_s = None
        return self.ticket

    def on_applied(self, version: int, *, now: float) -> None:
        """Record that the last put is in force."""
        self.version, self._applied_s = version, now
        if self._oldest_version is None:
            self._oldest_version = version

    def counted(self, samples: Iterable[TunerSample]) -> list[TunerSample]:
        """Return samples of the campaign's own versions."""
        oldest = self._oldest_version
        return [] if oldest is None else [sample for sample in samples if sample.weights_version >= oldest]

    def warm(self, samples: Iterable[TunerSample]) -> None:
        """Add samples of the version in force."""
        for sample in samples:
            if sample.weights_version == self.version:
                self.recent.add(sample)

    def restarted(self) -> None:
        """Forget all versions: a restarted proxy counts anew."""
        self._oldest_version = None
        self.recent.clear()

    def ready(self, now: float) -> bool:
        """Return whether the warm-up is over and a window of samples is full."""
        return self._applied_s is not None and now >= self._applied_s + self._options.warm_up_s and self.recent.full

    def ready_s(self) -> float | None:
        """Return when the warm-up ends; None while samples or an answer are missing."""
        if self._applied_s is None or not self.recent.full:
            return None
        return self._applied_s + self._options.warm_up_s

    def saturated(self) -> bool:
        """Return whether too many requests of a full window were slow."""
        slow = self.recent.share_slower_than(self._options.saturated_ttft_ms)
        return self.recent.full and slow > self._options.saturated_share


# Comparison of windows of samples: `paper`, the published protocol, for reproduction.
#
# It has no error rate and no guard: the p95 of a window varies by a tenth to a half from chance, and 19 % of
# candidates that made no difference were accepted in simulation.


class Paper:
    """The published protocol: one rolling window over all samples, scored every hop, compared as it is.

    The window is not emptied between candidates, so its 128 samples are of up to four weight sets; the incumbent
    keeps the score with which it won.

    Parameters
    ----------
    window:
        The campaign's rolling window, shared by all trials.
    reference:
        The incumbent's score.
    tolerance:
        As of the optimizer.
    """

    def __init__(
        self, options: CampaignOptions, window: RollingWindow, reference: WindowStats, *, tolerance: float = 0.0
    ) -> None:
        self._options, self._window, self._reference, self._tolerance = options, window, reference, tolerance
        self.arm: Arm = "offspring"
        self.turn = 1
        self.offspring_version: int | None = None
        self._to_come = options.hop

    def on_applied(self, version: int, *, now: float) -> None:
        self.offspring_version = version
        self._to_come = self._options.hop

    def on_samples(self, samples: Iterable[TunerSample], *, now: float) -> Outcome:
        if self.offspring_version is None:
            return None
        for _ in samples:  # the campaign has put them into the window
            self._to_come -= 1
        if self._to_come > 0 or not self._window.full:
            return None
        ours = self._window.stats()
        theirs = self._reference
        better, reason = compared(ours, theirs, tolerance=self._tolerance)
        return Verdict(better, reason, ours.ttft_ms_p95, theirs.ttft_ms_p95, ours, theirs)

    def on_time(self, *, now: float) -> Outcome:
        return None

    def void(self) -> None:
        self.offspring_version = None
        self.turn += 1

    def next_time(self) -> float | None:
        return None

    def state(self) -> dict[str, Any]:
        return {}  # the window is filled anew

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore nothing: the window fills anew."""


def compared(ours: WindowStats, theirs: WindowStats, *, tolerance: float = 0.0) -> tuple[bool, str]:
    """Return whether the p95 TTFT is lower, or higher by less than `tolerance`; and by how much, in words."""
    if not ours.ttft_ms_p95 or not theirs.ttft_ms_p95:
        return False, "no first tokens in a window"
    ratio = ours.ttft_ms_p95 / theirs.ttft_ms_p95
    accepted = ours.ttft_ms_p95 < theirs.ttft_ms_p95 * (1 + tolerance)
    return accepted, f"p95 TTFT {abs(ratio - 1):.1%} {'lower' if ratio < 1 else 'higher'} in one window"


# A campaign's state as a record, and as JSON.
#
# Left out on purpose: windows, unfinished blocks, versions of weights, puts without an answer. A resumed campaign puts
# its arm again under a new version, so that no earlier request counts twice.


Phase = Literal["new", "warming", "comparing", "frozen", "stopped"]

FORMAT = 1
#: Of p95 E2E in a saved state, a logarithm; states of versions without it have lost nothing yet.
MAX_LOSS = 10.0
_CURSOR = ("boot_id", "last_seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignState:
    """What a restarted process needs; `cursor` is the proxy's boot id and the last sample's number."""

    mode: str
    phase: Phase
    stop_reason: str | None
    start: Mapping[str, float]
    incumbent: Mapping[str, float]
    audited: bool
    saturated_since: float | None
    number: int
    anchor: float | None
    e2e_lost: float
    reference: WindowStats | None
    started_s: float | None
    opened_s: float | None
    cursor: tuple[str | None, int]
    rng: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    trial: Mapping[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self) | {"cursor": list(self.cursor)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], *, mode: str) -> CampaignState:
        """Return the state; raise `TunerError` for another format or mode, and for a wrong value."""
        if state.get("format") != FORMAT or state.get("mode") != mode:
            saved = f"format {state.get('format')!r}, mode {state.get('mode')!r}"
            raise TunerError(f"saved campaign has {saved}; expected format {FORMAT}, mode {mode!r}")
        if state["phase"] not in get_args(Phase):
            raise TunerError(
                f"saved campaign is in phase {state['phase']!r}; expected one of {', '.join(get_args(Phase))}"
            )
        fields = SavedFields(state, "saved campaign")
        return cls(
            mode=mode,
            phase=state["phase"],
            stop_reason=fields.short_text("stop_reason"),
            start=fields.numbers("start"),
            incumbent=fields.numbers("incumbent"),
            audited=fields.flag("audited"),
            saturated_since=fields.optional("saturated_since", least=0, most=MAX_TIME_S),
            number=fields.count("number"),
            anchor=fields.optional("anchor", least=0),
            e2e_lost=fields.number("e2e_lost", least=0, most=MAX_LOSS) if "e2e_lost" in state else 0.0,
            reference=None if state["reference"] is None else WindowStats.of(fields.inner("reference")),
            started_s=fields.optional("started_s", least=0, most=MAX_TIME_S),
            opened_s=fields.optional("opened_s", least=0, most=MAX_TIME_S),
            cursor=_cursor(fields),
            rng=_rng(fields),
            optimizer=state["optimizer"],
            trial=state["trial"],
        )


def _cursor(fields: SavedFields) -> tuple[str | None, int]:
    values = fields.items("cursor", most=2)
    if len(values) != len(_CURSOR):
        raise fields.wrong("cursor", "a boot id and a number")
    cursor = SavedFields(dict(zip(_CURSOR, values, strict=True)), "saved campaign.cursor")
    return cursor.short_text(_CURSOR[0]), cursor.count(_CURSOR[1], most=2**63)


def _rng(fields: SavedFields) -> Mapping[str, Any]:
    fields.inner("rng")  # an object; `generator_of` reads it
    return fields.value("rng")  # type: ignore[return-value] # as just checked


@contextmanager
def damage_as_error() -> Iterator[None]:
    """Raise `TunerError` for any failure on a damaged state."""
    try:
        yield
    except GorgoError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TunerError(f"saved campaign is damaged: {error!r}") from error


Refutes = Callable[[Mapping[str, float], Mapping[str, float]], str | None]


class Campaign:
    """Tunes the weights of one proxy.

    Parameters
    ----------
    box:
        The tuned weights (`tuner.space.tuned_box`). The campaign returns to its defaults.
    optimizer:
        Proposes, from `start` on.
    options:
        How to compare, and when to stop.
    start:
        All weights of the policy at the start; those outside the box stay.
    rng:
        For the order of blocks; its state is saved.

    Raises `WeightsError` for a start outside the box.
    """

    def __init__(
        self,
        box: LogBox,
        optimizer: Optimizer,
        options: CampaignOptions,
        *,
        start: Mapping[str, float],
        rng: np.random.Generator,
    ) -> None:
        box.to_log(start)
        self.box, self.optimizer, self.options, self.rng = box, optimizer, options, rng
        self.phase: Phase = "new"
        self.incumbent = {spec.name: float(start.get(spec.name, spec.default)) for spec in box.specs}
        self.start = {**start, **self.incumbent}
        self.ledger = GenerationLog(options, optimizer)
        self.cursor = SampleCursor()
        self.audited = not (options.guarded and options.audit) or self.incumbent == self.safe
        self.trial: Trial | None = None
        self.saturated_since: float | None = None
        self.stop_reason: str | None = None
        #: Returns why a log of decisions refutes an offspring against an incumbent, all their weights given; `None` if
        #: it does not. Set by the shell.
        self.refutes: Refutes | None = None
        self._applied_weights = AppliedWeights(options)
        self._turn = 0
        self._waiting: float | None = None
        self._out: list[Action] = []

    @property
    def safe(self) -> dict[str, float]:
        """Return the policy's defaults of the tuned weights."""
        return {spec.name: spec.default for spec in self.box.specs}

    # -- events

    def on_start(self, *, now: float) -> list[Action]:
        """Put the weights that have to be in force: the first call, also after `load_campaign`."""
        self.ledger.on_start(now)
        if self.phase == "stopped":
            self._out.append(Stop(self.stop_reason or "stopped"))
        elif self.phase == "comparing" and self.trial is not None:
            self._put_arm(f"resumes generation {self.ledger.number}")
        else:
            self._warm_up("the start" if self.phase == "new" else "resumed")
        return self._actions()

    def on_weights_applied(self, version: int, *, ticket: int, now: float) -> list[Action]:
        """Record the version of the weights put with `ticket`; late answers to older puts are ignored."""
        if ticket != self._applied_weights.ticket or self.phase in ("frozen", "stopped"):
            return []
        self._applied_weights.on_applied(version, now=now)
        if self.phase == "comparing" and self.trial is not None:
            self.trial.on_applied(version, now=now)
        return self._actions()

    def on_samples(self, samples: Sequence[TunerSample], *, boot_id: str, now: float) -> list[Action]:
        """Take finished requests, in any order, repeated or not. Another `boot_id` means that the proxy restarted."""
        taken = self.cursor.read(boot_id, samples)
        if taken.restarted:
            self._restarted()
        elif taken.gap:
            self._lost()
        if self._applied_weights.known and self.phase in ("warming", "comparing"):
            self._measure(self._applied_weights.counted(taken.samples), now)
        return self._actions()

    def on_time(self, *, now: float) -> list[Action]:
        """Advance the clock; safe at any time."""
        if self.phase == "warming":
            self._try_to_propose(now)
        elif self.phase == "comparing" and self.trial is not None:
            self._after(self.trial.on_time(now=now), now)
        return self._actions()

    def on_frozen(self, *, now: float) -> list[Action]:
        """Pause: the weights are pinned."""
        if self.phase not in ("frozen", "stopped"):
            self.phase, self.trial = "frozen", None
        return self._actions()

    def on_unfrozen(self, *, now: float) -> list[Action]:
        """Resume with the same candidate, measured anew."""
        if self.phase == "frozen":
            self._warm_up("unfrozen")
        return self._actions()

    def on_foreign_weights(self, values: Mapping[str, float], *, now: float) -> list[Action]:
        """Take weights that another client has set as the incumbent.

        Outside the box the campaign stops, and puts nothing.
        """
        if self.phase in ("frozen", "stopped"):
            return []
        try:
            self.box.to_log(values)
        except WeightsError as error:
            self._stop(f"weights outside the box were set: {error}")
            return self._actions()
        self.start = {**self.start, **values}
        self.incumbent = {spec.name: float(self.start.get(spec.name, spec.default)) for spec in self.box.specs}
        self.optimizer.recentre(self.incumbent)
        self.ledger.forget()
        self.trial, self.audited = None, True
        self._warm_up("weights set by another client")
        return self._actions()

    def next_timer(self) -> float | None:
        """Return when `on_time` has something to do; None while samples or answers are missing."""
        if self.phase == "comparing" and self.trial is not None:
            return self.trial.next_time()
        return self._applied_weights.ready_s() if self.phase == "warming" and self.saturated_since is None else None

    # -- weights in force

    def _apply(self, weights: Mapping[str, float], reason: str, *, back: bool = False) -> None:
        values = {**self.start, **weights}
        self._out.append((RollBack if back else PutWeights)(values, reason, self._applied_weights.requested()))

    def _put_arm(self, reason: str) -> None:
        assert self.trial is not None, "a trial's arm"
        self._turn = self.trial.turn
        ours, theirs = self._arms()
        self._apply(ours if self.trial.arm == "offspring" else theirs, reason)

    def _arms(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the weights of offspring and incumbent; in an audit the start and the defaults."""
        return (self.optimizer.ask(), self.incumbent) if self.audited else (self.incumbent, self.safe)

    def _warm_up(self, reason: str, *, back: bool = False) -> None:
        self.phase, self.trial = "warming", None
        self._applied_weights.recent.clear()
        self._apply(self.incumbent, reason, back=back)

    # -- measuring

    def _measure(self, samples: list[TunerSample], now: float) -> None:
        if self.phase == "warming":
            self._applied_weights.warm(samples)
            self._try_to_propose(now)
            return
        for sample in samples:
            self._applied_weights.recent.add(sample)
        assert self.trial is not None, "comparing is what a trial does"
        outcome = self.trial.on_samples(samples, now=now)
        if outcome is None and self.options.mode != "paper" and self._applied_weights.saturated():
            outcome = self._attribute_saturation()
        self._after(outcome, now)

    def _attribute_saturation(self) -> Outcome:
        """Blame the candidate for saturation during its block; otherwise the traffic."""
        assert self.trial is not None, "called while comparing"
        if self.trial.arm == "offspring" and self.options.guarded:
            stats = self._applied_weights.recent.stats()
            return Verdict(False, "the fleet is saturated", stats=stats, refused=True, breach=True)
        return Abandon("the fleet is saturated")

    def _try_to_propose(self, now: float) -> None:
        """Propose the next generation if the incumbent is warm and the fleet is not saturated."""
        if (spent := self.ledger.budget_spent(now)) is not None:
            self._finish(spent)
            return
        if not self._applied_weights.ready(now):
            return
        if self.options.mode != "paper" and self._applied_weights.saturated():
            self._wait_out(now)
            return
        self.saturated_since = None
        stats = self._applied_weights.recent.stats()
        if stats.ttft_ms_p95 is None:
            self._applied_weights.recent.clear()
            return
        self.ledger.measured(stats)
        if self.ledger.number == 0:
            self._out.append(self.ledger.started(self.incumbent, self._applied_weights.version, now))
        self._next(now)

    def _wait_out(self, now: float) -> None:
        if self.saturated_since is None:
            self.saturated_since = now
        if now < self.saturated_since + self.options.patience_s:
            return
        self.saturated_since = None
        if self.options.guarded and self.incumbent != self.safe:
            reason = "the fleet stays saturated: back to the defaults"
            self._move(self.safe)
            self.audited = True
            self._warm_up(reason, back=True)
        else:
            self._finish("the fleet stays saturated")

    # -- generations

    def _next(self, now: float) -> None:
        reason = self._enough(now)
        if reason is not None:
            self._finish(reason)
            return
        if self._refuted(now):  # one at a time: the shell has other work, and the next is proposed at the next event
            if self.phase != "warming":
                self._warm_up("a log refuted the candidate")
            return
        self.trial = self.make_trial()
        self.phase = "comparing"
        self.ledger.opened(now)
        what = f"generation {self.ledger.number}" if self.audited else "the start against the defaults"
        self._put_arm(f"{what}, {self.trial.arm}")

    def _refuted(self, now: float) -> bool:
        """Reject the candidate without a block if a log refutes it. An audit is of what is in force: it is measured."""
        if self.refutes is None or not self.audited:
            return False
        ours, theirs = self._arms()
        why = self.refutes({**self.start, **ours}, {**self.start, **theirs})
        if why is None:
            return False
        verdict = Verdict(False, why)
        self.ledger.opened(now)
        self.ledger.on_verdict(ours, verdict)
        self._out.append(self.ledger.closed(ours, verdict, None, now))
        return True

    def make_trial(self) -> Trial:
        """Return a trial of the campaign's mode with the current arms."""
        if self.options.mode == "paper":
            recent = self._applied_weights.recent
            reference = self.ledger.reference or recent.stats()
            return Paper(self.options, recent, reference, tolerance=self.optimizer.tolerance)
        audit = not self.audited
        usual = None if audit else self.ledger.reference
        return Switchback(self.options, self.rng, usual, audit=audit, e2e_lost=self.ledger.e2e_lost)

    def _after(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Verdict):
            self._decided(outcome, now)
        elif isinstance(outcome, Abandon):
            self._warm_up(f"{outcome.reason}: generation {self.ledger.number} is measured later")
        elif self.trial is not None and self.trial.turn != self._turn:
            self._put_arm(f"generation {self.ledger.number}, {self.trial.arm}")

    def _decided(self, verdict: Verdict, now: float) -> None:
        assert self.trial is not None, "a verdict is a trial's"
        ours, theirs = self._arms()
        if self.audited:
            self.ledger.on_verdict(ours, verdict)
            self.incumbent = ours if verdict.accepted else theirs
        elif not verdict.accepted:
            self._move(theirs)
        generation = self.ledger.closed(ours, verdict, self.trial.offspring_version, now)
        self.audited = True
        if verdict.breach:  # weights before the row
            self._warm_up(verdict.reason, back=True)
        self._out.append(generation)
        if not verdict.breach:
            self._next(now)

    def _move(self, weights: dict[str, float]) -> None:
        """Set an incumbent that the optimizer did not propose."""
        self.incumbent = weights
        self.optimizer.recentre(weights)
        self.ledger.forget()

    def _enough(self, now: float) -> str | None:
        reason = self.optimizer.stop()
        return f"{self.optimizer.name}: {reason}" if reason else self.ledger.budget_spent(now)

    def _finish(self, reason: str) -> None:
        """Put the incumbent last, so that a freeze pins the weights in force."""
        self._apply(self.incumbent, f"the end: {reason}")
        if self.options.freeze_at_end:
            self._out.append(Freeze({**self.start, **self.incumbent}, reason))
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.phase, self.trial, self.stop_reason = "stopped", None, reason
        self._out.append(Stop(reason))

    # -- failures

    def _restarted(self) -> None:
        """Put weights again after a restart of the proxy."""
        self._applied_weights.restarted()
        if self.phase == "warming":
            self._apply(self.incumbent, "the proxy has restarted")
        elif self.phase == "comparing" and self.trial is not None:
            self.trial.void()
            self._put_arm("the proxy has restarted")

    def _lost(self) -> None:
        self._applied_weights.recent.clear()
        if self.phase == "comparing" and self.trial is not None:
            self.trial.void()
            self._put_arm("samples were lost")

    def _actions(self) -> list[Action]:
        until = self.next_timer()
        if until is not None and until != self._waiting:
            self._out.append(Wait(until))
        self._waiting = until
        out, self._out = self._out, []
        return out


# A campaign to its saved state and back.


def campaign_state(campaign: Campaign) -> dict[str, Any]:
    """Return all that a restarted process needs, as JSON."""
    ledger = campaign.ledger
    return CampaignState(
        mode=campaign.options.mode,
        phase=campaign.phase,
        stop_reason=campaign.stop_reason,
        start=campaign.start,
        incumbent=campaign.incumbent,
        audited=campaign.audited,
        saturated_since=campaign.saturated_since,
        number=ledger.number,
        anchor=ledger.anchor,
        e2e_lost=ledger.e2e_lost,
        reference=ledger.reference,
        started_s=ledger.started_s,
        opened_s=ledger.opened_s,
        cursor=(campaign.cursor.boot_id, campaign.cursor.last_seq),
        rng=generator_state(campaign.rng),
        optimizer=campaign.optimizer.state(),
        trial=None if campaign.trial is None else campaign.trial.state(),
    ).as_json()


def load_campaign(box: LogBox, options: CampaignOptions, state: Mapping[str, Any]) -> Campaign:
    """Return the campaign of a `campaign_state`; `on_start` comes next. Raises `TunerError` for a damaged state."""
    with damage_as_error():
        saved = CampaignState.from_json(state, mode=options.mode)
        start = {**saved.start, **{spec.name: saved.start[spec.name] for spec in box.specs}}
        campaign = Campaign(
            box, load_optimizer(box, saved.optimizer), options, start=start, rng=generator_of(saved.rng)
        )
        _restore(campaign, saved)
    return campaign


def _restore(campaign: Campaign, saved: CampaignState) -> None:
    campaign.phase, campaign.stop_reason = saved.phase, saved.stop_reason
    campaign.incumbent = {spec.name: saved.incumbent[spec.name] for spec in campaign.box.specs}
    campaign.box.to_log(campaign.incumbent)  # raises `WeightsError` outside the box
    campaign.audited, campaign.saturated_since = saved.audited, saved.saturated_since
    campaign.cursor = SampleCursor(*saved.cursor)
    ledger = campaign.ledger
    ledger.number, ledger.anchor, ledger.reference = saved.number, saved.anchor, saved.reference
    ledger.e2e_lost = saved.e2e_lost
    ledger.started_s, ledger.opened_s = saved.started_s, saved.opened_s
    if saved.trial is not None:
        campaign.trial = campaign.make_trial()
        campaign.trial.load(saved.trial)
