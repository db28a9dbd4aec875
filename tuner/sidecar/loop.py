"""The loop: polls the proxy, feeds the campaign, executes its actions.

Owns the order of a step, which call of a proxy or a group a command becomes (`WeightsCalls`), the words of its reports
as lines, metrics and events, and the back-off after failed calls (`CampaignObserver`). Leaves decisions to the
campaign, and the start to `tuner.sidecar.bootstrap`.

Theory of operation of one step: read all new samples first, so that no decision rests on half of them; then read the
weights in force, so that a freeze or a foreign change is found before anything is put; then advance the campaign's
time; then execute. A failed call ends the reading, keeps the command, and lengthens the wait; the proxy routes on.
Records are written, or buffered, before what follows them; a roll-back comes before everything else.

`now` is Unix time that only moves forward while the process runs; a resumed campaign continues with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gorgo.core.backoff import backoff_s
from gorgo.errors import ProxyRefused, ProxyUnreachable
from tuner.campaign.generation import Action, Freeze, Generation, PutWeights, RecordGeneration, RollBack, Stop, Wait
from tuner.campaign.machine import Campaign, campaign_state
from tuner.campaign.switchback import Switchback
from tuner.history import EventRow
from tuner.history.store import EventKind
from tuner.objective import RollingWindow, SampleCursor
from tuner.proxy_client import ProxyClient, ProxyWeights, SampleBatchResult, read_new
from tuner.sidecar.commands import Command, CommandQueue
from tuner.sidecar.group import ProxyGroup
from tuner.sidecar.history_buffer import HistoryBuffer
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Progress, Reporter, shown, verdict

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
        event = EventRow(at_s=self._now(), kind=kind, weights=None if weights is None else dict(weights), reason=reason)
        self._journal.add(event)

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

    def decided(self, generation: Generation) -> None:
        """Report a finished generation, with the weights that are not tuned, for `gorgo freeze`."""
        self._metrics.generation(generation)
        self.say(verdict(generation))
        self._journal.add(replace(generation, weights={**self._campaign.start, **generation.weights}))

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


# The calls of the sidecar that read and change weights, at one proxy or at a group.
#
# Nothing is read or changed by a process that is not the leader.


async def always() -> None:
    """Confirm that this process leads: a tuner without other candidates."""


class WeightsCalls:
    """The calls of one campaign.

    Parameters
    ----------
    client:
        One proxy or a group.
    orders:
        Versions and names for the calls.
    allow_out_of_range:
        Whether to put weights outside the policy's own box.
    confirm:
        Raises `LeadershipLost` if this process does not lead any more.
    """

    def __init__(
        self,
        client: ProxyClient | ProxyGroup,
        orders: CommandQueue,
        *,
        allow_out_of_range: bool,
        confirm: Callable[[], Awaitable[None]] = always,
    ) -> None:
        self.client = client
        self._orders, self._allow_out_of_range, self._confirm = orders, allow_out_of_range, confirm

    @property
    def group(self) -> ProxyGroup | None:
        """Return the group; None for one proxy."""
        return self.client if isinstance(self.client, ProxyGroup) else None

    async def read_new(self, cursor: SampleCursor) -> list[SampleBatchResult]:
        """Return all samples after the cursor; a group has cursors of its own."""
        if isinstance(self.client, ProxyGroup):
            return await self.client.read_new()
        return await read_new(self.client, cursor.boot_id, cursor.last_seq)

    async def routing(self) -> ProxyWeights:
        await self._confirm()
        return await self.client.routing()

    async def read(self) -> ProxyWeights:
        """Return the weights in force, with their author if they are not the expected ones."""
        in_force = await self.routing()
        return in_force if in_force.version == self._orders.version else await self.client.weights()

    async def execute(self, order: PutWeights | RollBack | Freeze) -> ProxyWeights:
        """Execute a command; weights that may be in force whatever the answer is are recorded before."""
        await self._confirm()
        if isinstance(order, Freeze):
            return await self.client.freeze(
                reason=order.reason,
                by=self._orders.by,
                weights=order.values,
                allow_out_of_range=self._allow_out_of_range,
            )
        version = self._orders.version
        if version is None:
            version = (await self.client.routing()).version
        self._orders.mark_sent(order.values)
        put = self.client.roll_back if isinstance(order, RollBack) else self.client.put_weights
        return await put(
            order.values,
            expected_version=version,
            reason=order.reason,
            by=self._orders.by,
            allow_out_of_range=self._allow_out_of_range,
        )


#: Conflicts of one step's puts; after each one the weights in force are read again.
MAX_CONFLICTS = 3
CONFLICT = 409


class Sidecar:
    """One campaign beside one proxy, or beside a group of them.

    Parameters
    ----------
    campaign:
        New, or from its saved state.
    client, orders, journal, reporter, metrics:
        Its outputs.
    policy:
        Nothing is put while the proxy routes by another policy.
    allow_out_of_range:
        Whether to put weights outside the policy's own box.
    clock:
        Unix time, s.
    poll_s:
        Between two polls.
    dry_run:
        Measure the weights in force and report the first proposal; put nothing.
    confirm:
        Raises `LeadershipLost` if this process does not lead any more; then the sidecar ends and puts nothing.
    """

    def __init__(
        self,
        campaign: Campaign,
        client: ProxyClient | ProxyGroup,
        orders: CommandQueue,
        journal: HistoryBuffer,
        reporter: Reporter,
        metrics: TunerMetrics,
        *,
        policy: str,
        allow_out_of_range: bool,
        clock: Callable[[], float],
        poll_s: float = 1.0,
        dry_run: bool = False,
        confirm: Callable[[], Awaitable[None]] = always,
    ) -> None:
        self.campaign = campaign
        self.stopped: str | None = None
        self._calls = WeightsCalls(client, orders, allow_out_of_range=allow_out_of_range, confirm=confirm)
        self._orders, self._journal = orders, journal
        self._observer = CampaignObserver(
            campaign, orders, journal, reporter, metrics, clock=clock, group=self._calls.group
        )
        self._policy, self._now, self._poll_s, self._dry = policy, clock, poll_s, dry_run
        self._answered_s = clock()
        self._paused: str | None = None
        self._ignored_version = self._pinned_by_others = False
        self._saved: dict[str, Any] | None = None

    async def run(self, stop: asyncio.Event) -> bool:
        """Run until the campaign is done or `stop` is set; return whether everything was left in order."""
        await self.start()
        while self.stopped is None and not stop.is_set():
            delay_s = await self.step()
            if self.stopped is None and not stop.is_set():
                await wait(stop, delay_s)
        return await self.finish()

    async def start(self) -> None:
        """Start the campaign and write its state, so that another process resumes it; puts nothing yet."""
        await self._take(self.campaign.on_start(now=self._now()))
        await self._save()

    async def step(self) -> float:
        """Poll the proxy once and act on it; return seconds until the next step."""
        self._observer.trouble = None
        try:
            for delivery in await self._calls.read_new(self.campaign.cursor):
                await self._feed(delivery)
            await self._read_weights()
            self._answered_s = self._now()
            await self._take(self.campaign.on_time(now=self._now()))
        except (ProxyUnreachable, ProxyRefused) as error:
            self._observer.failed(error)
            await self._leave_candidate(error)
        if self._observer.trouble is None:
            await self._carry_out()
        await self._save()
        self._observer.stepped(self._paused)
        return self._delay_s()

    async def finish(self) -> bool:
        """Put the incumbent and write everything; return whether that was possible."""
        put_back = await self._put_back()
        await self._save()
        written = await asyncio.to_thread(self._journal.flush, now=self._now(), at_once=True)
        for line in self._journal.unsaved():
            self._observer.complain(f"not in the history: {line}")
        return put_back and written

    # -- input

    async def _feed(self, delivery: SampleBatchResult) -> None:
        if self.campaign.cursor.boot_id not in (None, delivery.boot_id):
            self._orders.restarted()
            self._observer.restarted(delivery.reason)
        self._observer.delivered(delivery)
        actions = self.campaign.on_samples(delivery.samples, boot_id=delivery.boot_id, now=self._now())
        await self._take(actions)

    async def _read_weights(self) -> None:
        """Read the weights in force, and compare them with the expected ones."""
        await self._compare(await self._calls.read())

    async def _compare(self, in_force: ProxyWeights) -> None:
        pause = self._why_not(in_force)
        if pause is not None:
            await self._pause(pause, in_force)
            return
        if self._paused is not None:
            self._paused = None
            self._observer.log_event("unfreeze", "the weights may be changed again")
            await self._take(self.campaign.on_unfrozen(now=self._now()))
        owner = "foreign" if self._pinned_by_others else self._orders.owner_of(in_force)
        self._pinned_by_others = False
        if owner == "foreign":
            by = in_force.by or in_force.source or "another client"
            self._observer.log_event(
                "foreign", f"weights set by {by}: the campaign continues from them", in_force.values
            )
            self._orders.see(in_force)
            await self._take(self.campaign.on_foreign_weights(in_force.values, now=self._now()))
            self._ignored_version = self.campaign.phase == "stopped"  # outside the box: they stay
        elif owner != "known" or self._orders.in_force is None:
            self._orders.see(in_force)

    def _why_not(self, in_force: ProxyWeights) -> str | None:
        if in_force.policy != self._policy:
            return f"the proxy routes by {in_force.policy}, not by {self._policy}"
        return None if in_force.frozen is None else f"frozen: {in_force.frozen}"

    async def _pause(self, reason: str, in_force: ProxyWeights) -> None:
        self._orders.drop_puts()
        if self._paused is None:
            # Stored here: a restarted proxy forgets it.
            self._pinned_by_others = in_force.policy == self._policy and self._orders.owner_of(in_force) == "foreign"
            self._observer.log_event("freeze", f"{reason}; nothing is put until that ends", in_force.values)
        self._paused = reason
        await self._take(self.campaign.on_frozen(now=self._now()))

    # -- output

    async def _take(self, actions: Sequence[Action]) -> None:
        """Record rows at once and queue commands; execute a roll-back before anything else."""
        for action in actions:
            if isinstance(action, RecordGeneration):
                self._observer.decided(action.generation)
                await self._save()
            elif not isinstance(action, Wait):
                self._orders.add(action)
            if isinstance(action, RollBack):
                self._observer.rolled_back(action.reason, action.values)
                await self._carry_out()

    async def _carry_out(self) -> None:
        """Execute the queue until it is empty or something has to be waited for."""
        conflicts = 0
        try:
            while (order := self._orders.next) is not None and conflicts < MAX_CONFLICTS:
                conflicts += not await self._one(order)
        except (ProxyUnreachable, ProxyRefused) as error:
            self._observer.failed(error)

    async def _one(self, order: Command) -> bool:
        """Return whether the command was executed; otherwise the weights in force were read again."""
        if isinstance(order, Stop):
            self._stop(order)
        elif self._dry:
            await self._would(order)
        else:
            try:
                answer = await self._calls.execute(order)
            except ProxyRefused as refusal:
                if refusal.status != CONFLICT:
                    raise
                return await self._refused(order, refusal)
            self._orders.done(order)
            await self._applied(order, answer)
        return True

    async def _applied(self, order: Command, in_force: ProxyWeights) -> None:
        self._orders.see(in_force)
        if isinstance(order, Freeze):
            self._observer.log_event("freeze", f"pinned: {order.reason}", order.values)
        elif isinstance(order, PutWeights | RollBack):
            self._observer.applied()
            await self._take(self.campaign.on_weights_applied(in_force.version, ticket=order.ticket, now=self._now()))

    async def _refused(self, order: Command, refusal: ProxyRefused) -> bool:
        await self._read_weights()
        if isinstance(order, Freeze):
            self._observer.complain(f"not frozen by the tuner: {refusal}")
            self._orders.done(order)
        return False

    async def _would(self, order: PutWeights | RollBack | Freeze) -> None:
        """Report what would be put; weights already in force count as put."""
        self._orders.done(order)
        in_force = await self._calls.routing()
        same = isinstance(order, PutWeights | RollBack) and dict(order.values) == dict(in_force.values)
        if same and self.campaign.phase != "comparing":
            await self._applied(order, in_force)
            return
        if self.campaign.phase == "comparing" and self.campaign.audited:
            wanted = {**self.campaign.start, **self.campaign.optimizer.ask()}
        else:
            wanted = dict(order.values)
        self._observer.say(f"would put {shown(wanted)}: {order.reason}; a dry run ends here, and nothing was changed")
        self.stopped = "a dry run"

    def _stop(self, order: Stop) -> None:
        self._orders.done(order)
        self._observer.log_event("stop", order.reason, self.campaign.incumbent)
        self._journal.end(order.reason)
        self.stopped = order.reason

    async def _put_back(self) -> bool:
        """Put the incumbent at the end of the process: a candidate must not stay in force without a tuner."""
        in_force = self._orders.in_force
        if self._dry or self._paused is not None or in_force is None:
            return True
        wanted = dict(in_force) if self._ignored_version else {**self.campaign.start, **self.campaign.incumbent}
        if self._are_in_force(wanted):
            return True
        try:
            self._orders.see(await self._calls.execute(RollBack(wanted, "the tuner stops: back to the incumbent", 0)))
        except (ProxyUnreachable, ProxyRefused) as error:
            self._observer.complain(f"the weights under test may be in force still: {error}")
            return False
        self._observer.say(f"back to the incumbent: {shown(wanted)}")
        return True

    def _are_in_force(self, wanted: Mapping[str, float]) -> bool:
        group = self._calls.group
        everywhere = group is None or group.agreement.has(wanted)
        return everywhere and self._orders.in_force == wanted

    async def _leave_candidate(self, error: ProxyUnreachable | ProxyRefused) -> None:
        """Put the incumbent at the other proxies of a group when one has been out of reach for long.

        Without all samples the guard is blind. The campaign pauses until all proxies answer.
        """
        missing_s = self._now() - self._answered_s
        if self._calls.group is None or self._dry or self._paused is not None:
            return
        if missing_s < self.campaign.options.discard_s or self.campaign.phase != "comparing":
            return
        wanted = {**self.campaign.start, **self.campaign.incumbent}
        self._orders.drop_puts()
        self._paused = str(error)
        self._observer.rolled_back(f"{error}, for {missing_s:.0f} s: the other proxies get the incumbent", wanted)
        await self._take(self.campaign.on_frozen(now=self._now()))
        try:
            await self._calls.execute(RollBack(wanted, "a proxy of the group is out of reach", 0))
        except (ProxyUnreachable, ProxyRefused) as missed:
            self._observer.trouble = str(missed)

    # -- state

    async def _save(self) -> None:
        """Write waiting rows, and the campaign's state if more than its cursor has changed."""
        state = campaign_state(self.campaign)
        compared = {key: value for key, value in state.items() if key != "cursor"}
        if compared != self._saved and self.stopped is None:
            self._saved = compared
            self._journal.save(state)
        await asyncio.to_thread(self._journal.flush, now=self._now())

    def progress(self) -> Progress:
        """Return the campaign's progress."""
        return self._observer.progress(self._paused)

    def _delay_s(self) -> float:
        back_off_s = self._observer.back_off_s()
        if back_off_s is not None and self._calls.group is not None:
            # A proxy that comes back may have other weights: it is read well within the discarded start of a block.
            return min(back_off_s, max(self._poll_s, self.campaign.options.discard_s / 3))
        if back_off_s is not None:
            return back_off_s
        until = self.campaign.next_timer()
        return self._poll_s if until is None else min(self._poll_s, max(0.0, until - self._now()))


async def wait(stop: asyncio.Event, seconds: float) -> None:
    """Wait until `stop` is set, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
