"""What is told of a campaign beside its proxy: lines for a person, metrics, events for the history, and what failed.

Owns the words, the window for the eye, and how long to wait after calls that fail. What happens is `loop`'s, how a line
looks `progress`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gorgo.errors import ProxyRefused, ProxyUnreachable
from tuner.campaign.generation import Generation
from tuner.campaign.machine import Campaign
from tuner.campaign.switchback import Switchback
from tuner.history import EventRow
from tuner.history.rows import EventKind
from tuner.objective import RollingWindow
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.history_buffer import HistoryBuffer
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Progress, Reporter, verdict
from tuner.sidecar.reader import SampleBatchResult

#: After calls that fail: from half a second, doubled up to half a minute, for ever. The proxy does not need us.
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0


class CampaignObserver:
    """Tells of one campaign; `trouble` is why the step of this moment cannot go on."""

    def __init__(
        self,
        campaign: Campaign,
        orders: CommandQueue,
        journal: HistoryBuffer,
        reporter: Reporter,
        metrics: TunerMetrics,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.trouble: str | None = None
        self._campaign, self._orders, self._journal = campaign, orders, journal
        self._reporter, self._metrics, self._now = reporter, metrics, clock
        self._failures = 0
        self._window = RollingWindow(campaign.options.window, campaign.options.hop)
        self._routed = 0
        self.say, self.complain = reporter.say, reporter.complain

    # -- what happened

    def log_event(self, kind: EventKind, reason: str, weights: Mapping[str, float] | None = None) -> None:
        """An event: a line now, a row in the history."""
        self.say(f"{kind}: {reason}")
        row = EventRow(at_s=self._now(), kind=kind, weights=None if weights is None else dict(weights), reason=reason)
        self._journal.add(row)

    def restarted(self) -> None:
        """The proxy is another run: what the weights did before says nothing."""
        self._window.clear()
        self._metrics.count("gorgo_tuner_proxy_restarts_total")
        self.log_event("restart", "the proxy is another run than before: what was being measured starts anew")

    def delivered(self, delivery: SampleBatchResult) -> None:
        """Samples came, and how many are missing; the window is for the eye: what the weights in force do."""
        missing = delivery.lost + len(delivery.unreadable)
        if missing:
            first = f"; {delivery.unreadable[0]}" if delivery.unreadable else ""
            self.complain(f"{missing} samples are missing: what was being measured starts anew{first}")
            self._metrics.count("gorgo_tuner_lost_samples_total", by=missing)
        self._metrics.count("gorgo_tuner_samples_total", by=len(delivery.samples))
        for sample in delivery.samples:
            if sample.weights_version == self._orders.version:
                self._window.add(sample)
                self._routed += 1

    def applied(self) -> None:
        """Other weights are in force: the window begins anew."""
        self._window.clear()
        self._routed = 0

    def decided(self, row: Generation) -> None:
        """A finished generation, with the weights that are not moved: what `gorgo freeze` is to pin."""
        self._metrics.generation(row)
        self.say(verdict(row))
        self._journal.add(replace(row, weights={**self._campaign.start, **row.weights}))

    def rolled_back(self, reason: str, weights: Mapping[str, float]) -> None:
        self._metrics.count("gorgo_tuner_rollbacks_total")
        self.log_event("rollback", reason, weights)

    # -- what failed

    def failed(self, error: ProxyUnreachable | ProxyRefused) -> None:
        """Said at first and whenever the words change; then the progress line tells."""
        self._failures += 1
        if self._failures == 1:
            self.complain(f"{error}; routing goes on, the tuner tries again")
        self.trouble = str(error)

    def back_off_s(self) -> float | None:
        """How long to wait after a step that failed; `None` after one that did not, which ends the waiting."""
        if self.trouble is not None:
            return min(FIRST_BACK_OFF_S * 2.0 ** min(self._failures - 1, 10), MAX_BACK_OFF_S)
        if self._failures:
            self._failures = 0
            self.say("the proxy answers again")
        return None

    # -- where it is

    def stepped(self, paused: str | None) -> None:
        """The end of a step."""
        self._metrics.count("gorgo_tuner_polls_total", "ok" if self.trouble is None else "failed")
        progress = self.progress(paused)
        self._metrics.progress(progress, waiting=self._journal.waiting)
        self._reporter.show(progress, now=self._now())

    def progress(self, paused: str | None) -> Progress:
        """Where the campaign is."""
        campaign, trial = self._campaign, self._campaign.trial
        by_time = isinstance(trial, Switchback)
        needed = campaign.options.hop if trial is not None and campaign.options.mode == "paper" else self._window.size
        pairs = f"{len(trial.pairs)} of {campaign.options.pairs} pairs" if isinstance(trial, Switchback) else ""
        return Progress(
            phase=campaign.phase,
            generation=campaign.ledger.number,
            arm="" if trial is None else trial.arm,
            weights=self._orders.in_force,
            incumbent=campaign.incumbent,
            ttft_ms_p95=self._window.stats().ttft_ms_p95,
            samples=self._routed,
            needed=0 if by_time else needed,
            detail=pairs,
            trouble=self.trouble or paused,
        )
