"""The campaign: one long experiment on a running proxy, as a state machine without input and output.

Owns the order of events: warm up, measure, propose, compare, decide, record, stop. `applied_weights` knows the weights
in force, a trial (`switchback`, `windows`) compares, an optimizer proposes, the guardrail refuses. The shell passes
events with `now`, and executes the returned actions in their order.

Theory of operation.

- `warming`: the incumbent is in force until a window of samples routed under it is full. The campaign returns to here
  after a roll-back, too little traffic, or saturation. No candidate is proposed while the fleet is saturated.
- `comparing`: a trial names the arm in force. Its result is given to the optimizer and recorded.
- `frozen`: the weights are pinned; nothing is put until they are unfrozen.
- `stopped`: the incumbent is in force.

Each sample counts once. `saved` has the decisions and, of a switchback, the scored pairs; a measurement that the end
of the process interrupted is repeated.

`now` is Unix time: a resumed campaign continues with the same clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gorgo.errors import WeightsError
from tuner.campaign.actions import Action, Freeze, PutWeights, RollBack, Stop, Wait
from tuner.campaign.applied_weights import AppliedWeights
from tuner.campaign.generation_log import GenerationLog
from tuner.campaign.options import CampaignOptions
from tuner.campaign.state import Phase
from tuner.campaign.switchback import Switchback
from tuner.campaign.trial import Abandon, Outcome, Trial, Verdict
from tuner.campaign.windows import Paper
from tuner.objective import SampleCursor, TunerSample
from tuner.optimizers.base import Optimizer
from tuner.space import LogBox


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
            found = self._applied_weights.recent.stats()
            return Verdict(False, "the fleet is saturated", stats=found, refused=True, breach=True)
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
        found = self._applied_weights.recent.stats()
        if found.ttft_ms_p95 is None:
            self._applied_weights.recent.clear()
            return
        self.ledger.measured(found)
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
        self.trial = self.make_trial()
        self.phase = "comparing"
        self.ledger.opened(now)
        what = f"generation {self.ledger.number}" if self.audited else "the start against the defaults"
        self._put_arm(f"{what}, {self.trial.arm}")

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
        row = self.ledger.closed(ours, verdict, self.trial.offspring_version, now)
        self.audited = True
        if verdict.breach:  # weights before the row
            self._warm_up(verdict.reason, back=True)
        self._out.append(row)
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
