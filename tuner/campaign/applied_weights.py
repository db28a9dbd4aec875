"""What a campaign stands on: the weights it has asked for, the version they came under, and what is measured since.

Owns which samples count and when the weights in force are known well enough to go on. What is done then is `machine`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from tuner.campaign.options import CampaignOptions
from tuner.objective import RollingWindow, TunerSample


class AppliedWeights:
    """Only samples of versions that were put since the proxy started count for anything."""

    def __init__(self, options: CampaignOptions) -> None:
        self.recent = RollingWindow(options.window, options.hop)
        self.ticket = 0
        self.version: int | None = None
        self._options = options
        self._applied_s: float | None = None
        self._oldest_version: int | None = None

    @property
    def known(self) -> bool:
        """Whether anything that the campaign has put is or was in force since the proxy started."""
        return self._oldest_version is not None

    def requested(self) -> int:
        """Weights are asked for: the ticket under which the answer will come. Until then none are known in force."""
        self.ticket += 1
        self.version = self._applied_s = None
        return self.ticket

    def on_applied(self, version: int, *, now: float) -> None:
        """What was asked for last is in force."""
        self.version, self._applied_s = version, now
        if self._oldest_version is None:
            self._oldest_version = version

    def counted(self, samples: Iterable[TunerSample]) -> list[TunerSample]:
        """Those of the campaign's own versions."""
        oldest = self._oldest_version
        return [] if oldest is None else [sample for sample in samples if sample.weights_version >= oldest]

    def warm(self, samples: Iterable[TunerSample]) -> None:
        """Measure what is in force, and nothing that was routed before it."""
        for sample in samples:
            if sample.weights_version == self.version:
                self.recent.add(sample)

    def restarted(self) -> None:
        """Another run of the proxy: no version means what it meant."""
        self._oldest_version = None
        self.recent.clear()

    def ready(self, now: float) -> bool:
        """Whether what is in force has been so for the warm-up, and a window of it is full."""
        return self._applied_s is not None and now >= self._applied_s + self._options.warm_up_s and self.recent.full

    def ready_s(self) -> float | None:
        """When the warm-up is over; None while only samples or an answer are awaited."""
        if self._applied_s is None or not self.recent.full:
            return None
        return self._applied_s + self._options.warm_up_s

    def saturated(self) -> bool:
        """Whether too many of a full window were slow."""
        slow = self.recent.share_slower_than(self._options.saturated_ttft_ms)
        return self.recent.full and slow > self._options.saturated_share
