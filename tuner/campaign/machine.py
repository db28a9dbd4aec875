"""The campaign: one long experiment on a running proxy, as a state machine without input and output.

Owns the order of things: warm up, measure, propose, compare, decide, record, stop. What it stands on is `footing`,
what it compares with is a trial (`switchback`, `windows`), what it proposes an optimizer's, what it refuses the
guard's. The shell feeds events in, with `now`, and carries the returned actions out in their order.

Theory of operation.

- `warming`: the incumbent is in force until a window of samples routed under it is full. Everything returns to here:
  the start, a roll-back, too little traffic, a saturated fleet. No proposal leaves it while the fleet is saturated.
- `comparing`: a trial says which arm it wants in force. What it says at the end is told to the optimizer and recorded.
- `frozen`: somebody has pinned the weights; nothing is put until they are unfrozen.
- `stopped`: the incumbent is in force.

The inbox takes each sample once. `state()` holds what was decided and, of a switchback, the pairs that were scored;
what was being measured when the process ended is measured again.

`now` is seconds of one clock that outlives the process (Unix time): a restarted campaign goes on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gorgo.errors import WeightsError
from tuner.campaign.actions import Action, Freeze, PutWeights, RollBack, Stop, Wait
from tuner.campaign.applied_weights import AppliedWeights
from tuner.campaign.generation_log import GenerationLog
from tuner.campaign.options import CampaignOptions
from tuner.campaign.state import CampaignState, Phase, damage_as_error
from tuner.campaign.switchback import Switchback
from tuner.campaign.trial import Abandon, Outcome, Trial, Verdict
from tuner.campaign.windows import Paper
from tuner.objective import SampleCursor, TunerSample
from tuner.optimizers.base import Optimizer, generator_of, generator_state
from tuner.optimizers.registry import load_optimizer
from tuner.space import LogBox


class Campaign:
    """Tunes the weights of one proxy.

    Parameters
    ----------
    box:
        The weights that move (`tuner.space.tuned_box`). Its defaults are where a campaign returns to.
    optimizer:
        Proposes. It must begin at `start`.
    options:
        How to compare and when to stop.
    start:
        All weights of the policy as they are now; those outside the box stay so.
    rng:
        For the order of blocks. Its own, because its state is saved.

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
        """The policy's defaults for the weights that move."""
        return {spec.name: spec.default for spec in self.box.specs}

    # -- events

    def on_start(self, *, now: float) -> list[Action]:
        """First call of all, also after `from_state`: puts what has to be in force."""
        self.ledger.on_start(now)
        if self.phase == "stopped":
            self._out.append(Stop(self.stop_reason or "stopped"))
        elif self.phase == "comparing" and self.trial is not None:
            self._put_arm(f"goes on with generation {self.ledger.number}")
        else:
            self._warm_up("the start" if self.phase == "new" else "goes on")
        return self._actions()

    def on_weights_applied(self, version: int, *, ticket: int, now: float) -> list[Action]:
        """The proxy routes by what `ticket` asked for, under this version. Late answers to older orders are ignored."""
        if ticket != self._applied_weights.ticket or self.phase in ("frozen", "stopped"):
            return []
        self._applied_weights.on_applied(version, now=now)
        if self.phase == "comparing" and self.trial is not None:
            self.trial.on_applied(version, now=now)
        return self._actions()

    def on_samples(self, samples: Sequence[TunerSample], *, boot_id: str, now: float) -> list[Action]:
        """Finished requests, in any order and as often as they come. Another `boot_id` is another run of the proxy."""
        taken = self.cursor.read(boot_id, samples)
        if taken.restarted:
            self._restarted()
        elif taken.gap:
            self._lost()
        if self._applied_weights.known and self.phase in ("warming", "comparing"):
            self._measure(self._applied_weights.counted(taken.samples), now)
        return self._actions()

    def on_time(self, *, now: float) -> list[Action]:
        """Safe to call at any time."""
        if self.phase == "warming":
            self._try_to_propose(now)
        elif self.phase == "comparing" and self.trial is not None:
            self._after(self.trial.on_time(now=now), now)
        return self._actions()

    def on_frozen(self, *, now: float) -> list[Action]:
        """Somebody pinned the weights: a put was refused, or was not needed to find out."""
        if self.phase not in ("frozen", "stopped"):
            self.phase, self.trial = "frozen", None
        return self._actions()

    def on_unfrozen(self, *, now: float) -> list[Action]:
        """Goes on with the candidate that was under test, measured anew."""
        if self.phase == "frozen":
            self._warm_up("unfrozen")
        return self._actions()

    def on_foreign_weights(self, values: Mapping[str, float], *, now: float) -> list[Action]:
        """Somebody else has set weights: they are the incumbent now, for an operator knows why.

        Outside the box there is nothing to search from, and the campaign stops without putting anything.
        """
        if self.phase in ("frozen", "stopped"):
            return []
        try:
            self.box.to_log(values)
        except WeightsError as error:
            self._stop(f"somebody set weights outside the box: {error}")
            return self._actions()
        self.start = {**self.start, **values}
        self.incumbent = {spec.name: float(self.start.get(spec.name, spec.default)) for spec in self.box.specs}
        self.optimizer.recentre(self.incumbent)
        self.ledger.anchor = None
        self.trial, self.audited = None, True
        self._warm_up("weights that somebody else has set")
        return self._actions()

    def next_timer(self) -> float | None:
        """When `on_time` has something to do; None while only samples or answers are awaited."""
        if self.phase == "comparing" and self.trial is not None:
            return self.trial.next_time()
        return self._applied_weights.ready_s() if self.phase == "warming" and self.saturated_since is None else None

    # -- state

    def state(self) -> dict[str, Any]:
        """Return all that a restarted process needs, as JSON."""
        ledger = self.ledger
        return CampaignState(
            mode=self.options.mode,
            phase=self.phase,
            stop_reason=self.stop_reason,
            start=self.start,
            incumbent=self.incumbent,
            audited=self.audited,
            saturated_since=self.saturated_since,
            number=ledger.number,
            anchor=ledger.anchor,
            reference=ledger.reference,
            started_s=ledger.started_s,
            opened_s=ledger.opened_s,
            cursor=(self.cursor.boot_id, self.cursor.last_seq),
            rng=generator_state(self.rng),
            optimizer=self.optimizer.state(),
            trial=None if self.trial is None else self.trial.state(),
        ).as_json()

    @classmethod
    def from_state(cls, box: LogBox, options: CampaignOptions, state: Mapping[str, Any]) -> Campaign:
        """Return the campaign of a `state()`; `on_start` comes next. Raise `TunerError` for a damaged state."""
        with damage_as_error():
            saved = CampaignState.from_json(state, mode=options.mode)
            start = {**saved.start, **{spec.name: saved.start[spec.name] for spec in box.specs}}
            campaign = cls(box, load_optimizer(box, saved.optimizer), options, start=start, rng=generator_of(saved.rng))
            campaign._restore(saved)
        return campaign

    def _restore(self, saved: CampaignState) -> None:
        self.phase, self.stop_reason = saved.phase, saved.stop_reason
        self.incumbent = {spec.name: float(saved.incumbent[spec.name]) for spec in self.box.specs}
        self.audited, self.saturated_since = saved.audited, saved.saturated_since
        self.cursor = SampleCursor(*saved.cursor)
        self.ledger.number, self.ledger.anchor, self.ledger.reference = saved.number, saved.anchor, saved.reference
        self.ledger.started_s, self.ledger.opened_s = saved.started_s, saved.opened_s
        if saved.trial is not None:
            self.trial = self.make_trial()
            self.trial.load(saved.trial)

    # -- what is in force

    def _apply(self, weights: Mapping[str, float], reason: str, *, back: bool = False) -> None:
        values = {**self.start, **weights}
        self._out.append((RollBack if back else PutWeights)(values, reason, self._applied_weights.requested()))

    def _put_arm(self, reason: str) -> None:
        assert self.trial is not None, "a trial's arm"
        self._turn = self.trial.turn
        ours, theirs = self._arms()
        self._apply(ours if self.trial.arm == "offspring" else theirs, reason)

    def _arms(self) -> tuple[dict[str, float], dict[str, float]]:
        """Weights of the offspring and of the incumbent; in an audit the start is the one under suspicion."""
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
        """A fleet that is saturated while the suspect runs has it to thank; otherwise it is the traffic."""
        assert self.trial is not None, "called while comparing"
        if self.trial.arm == "offspring" and self.options.guarded:
            found = self._applied_weights.recent.stats()
            return Verdict(False, "the fleet is saturated", stats=found, refused=True, breach=True)
        return Abandon("the fleet is saturated")

    def _try_to_propose(self, now: float) -> None:
        """From a warm incumbent to the next generation, where nothing speaks against it."""
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
        """A trial as the mode has it, of the arms of this moment."""
        if self.options.mode == "paper":
            recent = self._applied_weights.recent
            return Paper(self.options, recent, self.ledger.reference or recent.stats())
        audit = not self.audited
        return Switchback(self.options, self.rng, None if audit else self.ledger.reference, audit=audit)

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
        if verdict.breach:  # first of all the weights
            self._warm_up(verdict.reason, back=True)
        self._out.append(row)
        if not verdict.breach:
            self._next(now)

    def _move(self, weights: dict[str, float]) -> None:
        """To an incumbent that the optimizer did not find."""
        self.incumbent = weights
        self.optimizer.recentre(weights)
        self.ledger.anchor = None

    def _enough(self, now: float) -> str | None:
        reason = self.optimizer.stop()
        return f"{self.optimizer.name}: {reason}" if reason else self.ledger.budget_spent(now)

    def _finish(self, reason: str) -> None:
        """The incumbent is put last, so that what is frozen is in force."""
        self._apply(self.incumbent, f"the end: {reason}")
        if self.options.freeze_at_end:
            self._out.append(Freeze({**self.start, **self.incumbent}, reason))
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        self.phase, self.trial, self.stop_reason = "stopped", None, reason
        self._out.append(Stop(reason))

    # -- what goes wrong

    def _restarted(self) -> None:
        """Another run of the proxy, with weights of its own."""
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
