"""Comparing windows of samples: `guarded`, one honest window against another, and `paper`, the published protocol.

Owns the two simpler ways to measure. Neither has an error rate: a window's p95 varies by a tenth to a half from chance,
and comparing two of them accepts nearly every second candidate that makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tuner.campaign.guard import Watch, worse
from tuner.campaign.options import CampaignOptions
from tuner.campaign.trial import Abandon, Arm, Outcome, Verdict
from tuner.objective import Figures, RollingWindow, Sample


class Guarded:
    """The incumbent measured again, then the offspring, each on a window of samples routed under its own version.

    The first `discard_s` of each are left out; the guard compares the same two windows. An audit keeps a start whose
    TTFT and guard figures are within the margin of the defaults'.
    """

    def __init__(self, options: CampaignOptions, reference: Figures | None, *, audit: bool = False) -> None:
        self._options, self._audit = options, audit
        self._watch = Watch(options, reference) if options.guarded else None
        self._window = RollingWindow(options.window, options.hop)
        self._incumbent: Figures | None = None
        self.offspring_version: int | None = None
        self._version: int | None = None
        self._began_s: float | None = None
        self._first_arrival_s: float | None = None
        self.turn = 0
        self.arm: Arm
        self._restart("incumbent")

    def began(self, version: int, *, now: float) -> None:
        self._version, self._began_s = version, now
        if self.arm == "offspring":
            self.offspring_version = version

    def on_samples(self, samples: Iterable[Sample], *, now: float) -> Outcome:
        for sample in samples:
            if sample.weights_version == self._version:
                outcome = self._take(sample)
                if outcome is not None:
                    return outcome
        return self.on_time(now=now)

    def on_time(self, *, now: float) -> Outcome:
        until = self.next_time()
        if until is not None and now >= until:
            return Abandon(f"{len(self._window)} samples in {self._options.window_timeout_s:g} s")
        return None

    def void(self) -> None:
        if self._watch:
            self._watch.clear()
        self._restart(self.arm)

    def next_time(self) -> float | None:
        return None if self._began_s is None else self._began_s + self._options.window_timeout_s

    def state(self) -> dict[str, Any]:
        return {}  # two windows are measured again sooner than it is worth to keep one

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing was kept."""

    def _restart(self, arm: Arm) -> None:
        self.arm, self.turn = arm, self.turn + 1
        self._version = self._began_s = self._first_arrival_s = None
        self._window.clear()

    def _take(self, sample: Sample) -> Outcome:
        if self._watch and self.arm == "offspring" and (reason := self._watch.add(sample)):
            return Verdict(False, reason, figures=self._window.figures(), refused=True, breach=True)
        if self._first_arrival_s is None:
            self._first_arrival_s = sample.arrived_s
        if sample.arrived_s < self._first_arrival_s + self._options.discard_s or not self._window.add(sample):
            return None
        found = self._window.figures()
        if self.arm == "offspring" and self._incumbent is not None:
            return self._verdict(found, self._incumbent)
        self._incumbent = found
        if self._watch:
            self._watch.reference = found
        self._restart("offspring")
        return None

    def _verdict(self, ours: Figures, theirs: Figures) -> Verdict:
        refused = worse(ours, theirs, self._options) if self._options.guarded else None
        better, found = compared(ours, theirs, margin=self._options.margin if self._audit else 0.0)
        accepted = better and refused is None
        reason = f"{found}; {refused}" if refused else found
        return Verdict(accepted, reason, ours.ttft_ms_p95, theirs.ttft_ms_p95, ours, theirs, refused is not None)


class Paper:
    """The published protocol: one rolling window over whatever was routed how, scored every hop, compared as it is.

    The window is not emptied between candidates, so that its 128 samples are of up to four weight sets; the incumbent
    keeps the score with which it won.

    Parameters
    ----------
    window:
        The campaign's rolling window, shared by all trials.
    reference:
        The incumbent's score.
    """

    def __init__(self, options: CampaignOptions, window: RollingWindow, reference: Figures) -> None:
        self._options, self._window, self._reference = options, window, reference
        self.arm: Arm = "offspring"
        self.turn = 1
        self.offspring_version: int | None = None
        self._to_come = options.hop

    def began(self, version: int, *, now: float) -> None:
        self.offspring_version = version
        self._to_come = self._options.hop

    def on_samples(self, samples: Iterable[Sample], *, now: float) -> Outcome:
        if self.offspring_version is None:
            return None
        for _ in samples:  # the campaign has put them into the window
            self._to_come -= 1
        if self._to_come > 0 or not self._window.full:
            return None
        ours = self._window.figures()
        better, found = compared(ours, self._reference)
        refused = worse(ours, self._reference, self._options) if self._options.guarded else None
        reason = f"{found}; {refused}" if refused else found
        theirs = self._reference
        accepted = better and refused is None
        return Verdict(accepted, reason, ours.ttft_ms_p95, theirs.ttft_ms_p95, ours, theirs, refused is not None)

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
        """Nothing was kept."""


def compared(ours: Figures, theirs: Figures, margin: float = 0.0) -> tuple[bool, str]:
    """Whether our p95 TTFT is lower, or within `margin` above; and the words for it."""
    if not ours.ttft_ms_p95 or not theirs.ttft_ms_p95:
        return False, "no first tokens in a window"
    ratio = ours.ttft_ms_p95 / theirs.ttft_ms_p95
    return ratio < 1 + margin, f"p95 TTFT {abs(ratio - 1):.1%} {'lower' if ratio < 1 else 'higher'} in one window"
