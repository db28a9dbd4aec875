"""Reports of a campaign beside its proxy: lines, metrics, events of the history, and failures.

Owns the words, the window of the progress line, and the back-off after failed calls. The layout of a line is
`progress`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from gorgo.core.backoff import backoff_s
from gorgo.errors import ProxyRefused, ProxyUnreachable
from tuner.campaign.generation import Generation
from tuner.campaign.machine import Campaign
from tuner.campaign.switchback import Switchback
from tuner.history import EventRow
from tuner.history.store import EventKind
from tuner.objective import RollingWindow
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.group import ProxyGroup
from tuner.sidecar.history_buffer import HistoryBuffer
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Progress, Reporter, verdict
from tuner.sidecar.reader import SampleBatchResult

#: Back-off after failed calls, doubled each time, without an end.
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0


class CampaignObserver:
    """Reports on one campaign; `trouble` is why the current step cannot go on."""

    def __init__(
        self,
        campaign: Campaign,
        orders: CommandQueue,
        journal: HistoryBuffer,
        reporter: Reporter,
        metrics: TunerMetrics,
        *,
        clock: Callable[[], float],
        group: ProxyGroup | None = None,
    ) -> None:
        self.trouble: str | None = None
        self._campaign, self._orders, self._journal = campaign, orders, journal
        self._reporter, self._metrics, self._now = reporter, metrics, clock
        self._group = group
        self._failures = 0
        self._window = RollingWindow(campaign.options.window, campaign.options.hop)
        self._routed = 0
        self.say, self.complain = reporter.say, reporter.complain

    # -- events

    def log_event(self, kind: EventKind, reason: str, weights: Mapping[str, float] | None = None) -> None:
        """Print an event, and add it to the history."""
        self.say(f"{kind}: {reason}")
        row = EventRow(at_s=self._now(), kind=kind, weights=None if weights is None else dict(weights), reason=reason)
        self._journal.add(row)

    def restarted(self, reason: str = "") -> None:
        """Report a restart of the proxy, or why the samples of a group do not count any more; empty the window."""
        self._window.clear()
        self._metrics.count("gorgo_tuner_out_of_step_total" if reason else "gorgo_tuner_proxy_restarts_total")
        self.log_event("restart", f"{reason or 'the proxy has restarted'}: the current measurement starts again")

    def delivered(self, delivery: SampleBatchResult) -> None:
        """Count new and missing samples; those of the weights in force go into the window."""
        missing = delivery.lost + len(delivery.unreadable)
        if missing:
            first = f"; {delivery.unreadable[0]}" if delivery.unreadable else ""
            self.complain(f"{missing} samples are missing: the current measurement starts again{first}")
            self._metrics.count("gorgo_tuner_lost_samples_total", by=missing)
        self._metrics.count("gorgo_tuner_samples_total", by=len(delivery.samples))
        for sample in delivery.samples:
            if sample.weights_version == self._orders.version:
                self._window.add(sample)
                self._routed += 1

    def applied(self) -> None:
        """Empty the window: other weights are in force."""
        self._window.clear()
        self._routed = 0

    def decided(self, row: Generation) -> None:
        """Report a finished generation, with the weights that are not tuned, for `gorgo freeze`."""
        self._metrics.generation(row)
        self.say(verdict(row))
        self._journal.add(replace(row, weights={**self._campaign.start, **row.weights}))

    def rolled_back(self, reason: str, weights: Mapping[str, float]) -> None:
        self._metrics.count("gorgo_tuner_rollbacks_total")
        self.log_event("rollback", reason, weights)

    # -- failures

    def failed(self, error: ProxyUnreachable | ProxyRefused) -> None:
        """Report a failed call; after the first one only the progress line changes."""
        self._failures += 1
        if self._failures == 1:
            self.complain(f"{error}; routing goes on, the tuner tries again")
        self.trouble = str(error)

    def back_off_s(self) -> float | None:
        """Return the wait after a failed step; None after a good one, which ends the back-off."""
        if self.trouble is not None:
            return backoff_s(self._failures, first_s=FIRST_BACK_OFF_S, longest_s=MAX_BACK_OFF_S)
        if self._failures:
            self._failures = 0
            self.say("the proxy answers again")
        return None

    # -- progress

    def stepped(self, paused: str | None) -> None:
        """Report the end of a step."""
        self._metrics.count("gorgo_tuner_polls_total", "ok" if self.trouble is None else "failed")
        progress = self.progress(paused)
        self._metrics.progress(progress, waiting=self._journal.waiting)
        if self._group is not None:
            self._metrics.group(self._group)
        self._reporter.show(progress, now=self._now())

    def progress(self, paused: str | None) -> Progress:
        """Return the campaign's progress."""
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
