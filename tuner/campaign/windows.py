"""Comparison of windows of samples: `paper`, the published protocol, for reproduction.

It has no error rate and no guard: the p95 of a window varies by a tenth to a half from chance, and 19 % of candidates
that made no difference were accepted in simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tuner.campaign.options import CampaignOptions
from tuner.campaign.trial import Arm, Outcome, Verdict
from tuner.objective import RollingWindow, TunerSample, WindowStats


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
        better, found = compared(ours, theirs, tolerance=self._tolerance)
        return Verdict(better, found, ours.ttft_ms_p95, theirs.ttft_ms_p95, ours, theirs)

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
