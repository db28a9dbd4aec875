"""The weights that a campaign has requested, the version under which they are in force, and the samples since.

Owns which samples count, and when enough is known of the weights in force.
"""

from __future__ import annotations

from collections.abc import Iterable

from tuner.campaign.options import CampaignOptions
from tuner.objective import RollingWindow, TunerSample


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
