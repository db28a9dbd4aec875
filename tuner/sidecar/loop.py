"""The loop: looks at the proxy, feeds the campaign, carries out what it says, in that order, for ever.

Owns the order of calls and what each failure means. What to do is the campaign's, which orders are left and whose
weights are found is `orders`', what is new is `reader`'s, what is written is `journal`'s.

Theory of operation of one step: read all new samples first, so that nothing is decided on half of them; then look at
what is in force, so that a freeze or somebody's change is seen before anything is put; then let time pass in the
campaign; then carry out. A call that fails ends the reading, keeps the order, and lengthens the wait; the proxy routes
on by what it has. Records are written (or kept for later) before what follows them; a roll-back comes before all else.

`now` is Unix time that only moves forward while the process runs; a restarted campaign goes on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gorgo.errors import ProxyRefused, ProxyUnreachable
from tuner.campaign.actions import Action, Freeze, PutWeights, Record, RollBack, Stop, Wait
from tuner.campaign.generation import Generation
from tuner.campaign.machine import Campaign
from tuner.campaign.switchback import Switchback
from tuner.history import EventRow
from tuner.history.rows import EventKind
from tuner.objective import RollingWindow, Sample
from tuner.proxy_client import ProxyClient, ProxyWeights
from tuner.sidecar.journal import Journal
from tuner.sidecar.metrics import Figures
from tuner.sidecar.orders import Order, Orders
from tuner.sidecar.progress import Progress, Reporter, shown, verdict
from tuner.sidecar.reader import Delivery, read_new

#: After calls that fail: from half a second, doubled up to half a minute, for ever. The proxy does not need us.
FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
#: Refusals of one step's puts; each was answered by looking again, and the next step looks too.
MAX_CONFLICTS = 3
CONFLICT = 409


class Sidecar:
    """One campaign beside one proxy.

    Parameters
    ----------
    campaign:
        New, or from its saved state.
    client, orders, journal, reporter, figures:
        Its ways out.
    policy:
        Whose weights they are: while the proxy routes by another one, nothing is put.
    widen:
        Whether weights outside the policy's own box are put.
    clock:
        Seconds of Unix time.
    poll_s:
        Between two looks.
    dry_run:
        Measure what is in force and say what would be put; put nothing.
    """

    def __init__(
        self,
        campaign: Campaign,
        client: ProxyClient,
        orders: Orders,
        journal: Journal,
        reporter: Reporter,
        figures: Figures,
        *,
        policy: str,
        widen: bool,
        clock: Callable[[], float],
        poll_s: float = 1.0,
        dry_run: bool = False,
    ) -> None:
        self.campaign = campaign
        self.stopped: str | None = None
        self._client, self._orders, self._journal = client, orders, journal
        self._reporter, self._figures = reporter, figures
        self._policy, self._widen, self._now, self._poll_s, self._dry = policy, widen, clock, poll_s, dry_run
        self._paused: str | None = None
        self._trouble: str | None = None
        self._let_be = self._pinned_by_others = False
        self._failures = 0
        self._saved: dict[str, Any] | None = None
        self._window = RollingWindow(campaign.options.window, campaign.options.hop)
        self._routed = 0

    async def run(self, stop: asyncio.Event) -> bool:
        """Until the campaign is over or `stop` is set. Whether everything was left in order."""
        await self.begin()
        while self.stopped is None and not stop.is_set():
            delay_s = await self.step()
            if self.stopped is None and not stop.is_set():
                await wait(stop, delay_s)
        return await self.finish()

    async def begin(self) -> None:
        """First of all; puts nothing yet."""
        await self._take(self.campaign.begin(now=self._now()))

    async def step(self) -> float:
        """One look at the proxy and what follows from it. Seconds until the next."""
        self._trouble = None
        try:
            for delivery in await read_new(self._client, self.campaign.inbox.boot_id, self.campaign.inbox.last_seq):
                await self._feed(delivery)
            await self._look()
            await self._take(self.campaign.on_time(now=self._now()))
        except (ProxyUnreachable, ProxyRefused) as error:
            self._failed(error)
        if self._trouble is None:
            await self._carry_out()
        await self._save()
        self._figures.count("gorgo_tuner_polls_total", "ok" if self._trouble is None else "failed")
        self._show()
        return self._delay_s()

    async def finish(self) -> bool:
        """Leave the incumbent in force and everything written. Whether that was possible."""
        put_back = await self._put_back()
        await self._save()
        written = await asyncio.to_thread(self._journal.flush, now=self._now(), at_once=True)
        for row in self._journal.left_over():
            self._reporter.complain(f"not in the history: {row}")
        return put_back and written

    # -- what comes in

    async def _feed(self, delivery: Delivery) -> None:
        inbox = self.campaign.inbox
        restarted = inbox.boot_id not in (None, delivery.boot_id)
        if restarted:
            self._orders.restarted()
            self._window.clear()
            self._figures.count("gorgo_tuner_proxy_restarts_total")
            self._note("restart", "the proxy is another run than before: what was being measured starts anew")
        missing = delivery.lost + len(delivery.unreadable)
        if missing:
            first = f"; {delivery.unreadable[0]}" if delivery.unreadable else ""
            self._reporter.complain(f"{missing} samples are missing: what was being measured starts anew{first}")
            self._figures.count("gorgo_tuner_lost_samples_total", by=missing)
        self._figures.count("gorgo_tuner_samples_total", by=len(delivery.samples))
        self._tally(delivery.samples)
        actions = self.campaign.on_samples(delivery.samples, boot_id=delivery.boot_id, now=self._now())
        await self._take(actions)

    def _tally(self, samples: Sequence[Sample]) -> None:
        """For the eye: what the weights in force do."""
        for sample in samples:
            if sample.weights_version == self._orders.version:
                self._window.add(sample)
                self._routed += 1

    async def _look(self) -> None:
        """What is in force, and whether that is in order."""
        found = await self._client.routing()
        if found.version != self._orders.version:
            found = await self._client.weights()
        await self._compare(found)

    async def _compare(self, found: ProxyWeights) -> None:
        pause = self._why_not(found)
        if pause is not None:
            await self._pause(pause, found)
            return
        if self._paused is not None:
            self._paused = None
            self._note("thaw", "the weights may be changed again")
            await self._take(self.campaign.on_thawed(now=self._now()))
        whose = "foreign" if self._pinned_by_others else self._orders.whose(found)
        self._pinned_by_others = False
        if whose == "foreign":
            by = found.by or found.source or "somebody"
            self._note("foreign", f"weights that {by} has set: the campaign goes on from there", found.values)
            self._orders.see(found)
            await self._take(self.campaign.on_foreign_weights(found.values, now=self._now()))
            self._let_be = self.campaign.phase == "stopped"  # they are no place to search from, and stay
        elif whose != "known" or self._orders.in_force is None:
            self._orders.see(found)

    def _why_not(self, found: ProxyWeights) -> str | None:
        if found.policy != self._policy:
            return f"the proxy routes by {found.policy}, not by {self._policy}"
        return None if found.frozen is None else f"frozen: {found.frozen}"

    async def _pause(self, reason: str, found: ProxyWeights) -> None:
        self._orders.drop_puts()
        if self._paused is None:
            # Remembered here: over a restart the proxy forgets who it was.
            self._pinned_by_others = found.policy == self._policy and self._orders.whose(found) == "foreign"
            self._note("freeze", f"{reason}; nothing is put until that ends", found.values)
        self._paused = reason
        await self._take(self.campaign.on_frozen(now=self._now()))

    # -- what goes out

    async def _take(self, actions: Sequence[Action]) -> None:
        """Records at once, orders into the queue; weights that do harm go before anything else."""
        for action in actions:
            if isinstance(action, Record):
                await self._record(action.generation)
            elif not isinstance(action, Wait):
                self._orders.add(action)
            if isinstance(action, RollBack):
                self._figures.count("gorgo_tuner_rollbacks_total")
                self._note("rollback", action.reason, action.values)
                await self._carry_out()

    async def _record(self, row: Generation) -> None:
        self._figures.generation(row)
        self._reporter.say(verdict(row))
        whole = {**self.campaign.start, **row.weights}  # with those that are not moved: what `gorgo freeze` is to pin
        self._journal.add(replace(row, weights=whole))
        await self._save()

    async def _carry_out(self) -> None:
        """The queue, until it is empty or something has to be waited for."""
        conflicts = 0
        try:
            while (order := self._orders.next) is not None and conflicts < MAX_CONFLICTS:
                conflicts += not await self._one(order)
        except (ProxyUnreachable, ProxyRefused) as error:
            self._failed(error)

    async def _one(self, order: Order) -> bool:
        """Whether the order was carried out; if not, what is in force was looked at again."""
        if isinstance(order, Stop):
            self._stop(order)
        elif self._dry:
            await self._would(order)
        else:
            try:
                found = await self._call(order)
            except ProxyRefused as refusal:
                if refusal.status != CONFLICT:
                    raise
                return await self._refused(order, refusal)
            self._orders.done(order)
            await self._applied(order, found)
        return True

    async def _call(self, order: PutWeights | RollBack | Freeze) -> ProxyWeights:
        if isinstance(order, Freeze):
            return await self._client.freeze(
                reason=order.reason, by=self._orders.by, weights=order.values, widen=self._widen
            )
        version = self._orders.version
        if version is None:
            version = (await self._client.routing()).version
        self._orders.try_out(order.values)
        return await self._client.put_weights(
            order.values, expected_version=version, reason=order.reason, by=self._orders.by, widen=self._widen
        )

    async def _applied(self, order: Order, found: ProxyWeights) -> None:
        self._orders.see(found)
        if isinstance(order, Freeze):
            self._note("freeze", f"pinned: {order.reason}", order.values)
        elif isinstance(order, PutWeights | RollBack):
            self._window.clear()
            self._routed = 0
            await self._take(self.campaign.on_weights_applied(found.version, ticket=order.ticket, now=self._now()))

    async def _refused(self, order: Order, refusal: ProxyRefused) -> bool:
        await self._look()
        if isinstance(order, Freeze):
            self._reporter.complain(f"not frozen by the tuner: {refusal}")
            self._orders.done(order)
        return False

    async def _would(self, order: PutWeights | RollBack | Freeze) -> None:
        """A dry run: weights that are in force anyway count as put."""
        self._orders.done(order)
        found = await self._client.routing()
        same = isinstance(order, PutWeights | RollBack) and dict(order.values) == dict(found.values)
        if same and self.campaign.phase != "comparing":
            await self._applied(order, found)
            return
        if self.campaign.phase == "comparing" and self.campaign.audited:
            wanted = {**self.campaign.start, **self.campaign.optimizer.ask()}
        else:
            wanted = dict(order.values)
        self._reporter.say(f"would put {shown(wanted)}: {order.reason}; a dry run ends here, and nothing was changed")
        self.stopped = "a dry run"

    def _stop(self, order: Stop) -> None:
        self._orders.done(order)
        self._note("stop", order.reason, self.campaign.incumbent)
        self._journal.end(order.reason)
        self.stopped = order.reason

    async def _put_back(self) -> bool:
        """At the end of the process: what is under test must not stay in force with nobody watching."""
        wanted = {**self.campaign.start, **self.campaign.incumbent}
        found = self._orders.in_force
        if self._dry or self._let_be or self._paused is not None or found is None or dict(found) == wanted:
            return True
        try:
            self._orders.see(await self._call(PutWeights(wanted, "the tuner ends: back to the incumbent", 0)))
        except (ProxyUnreachable, ProxyRefused) as error:
            self._reporter.complain(f"the weights under test may be in force still: {error}")
            return False
        self._reporter.say(f"back to the incumbent: {shown(wanted)}")
        return True

    # -- what is said and kept

    def _failed(self, error: ProxyUnreachable | ProxyRefused) -> None:
        """Said at first and whenever the words change; then the progress line tells."""
        self._failures += 1
        if self._failures == 1:
            self._reporter.complain(f"{error}; routing goes on, the tuner tries again")
        self._trouble = str(error)

    def _note(self, kind: EventKind, reason: str, weights: Any = None) -> None:
        self._reporter.say(f"{kind}: {reason}")
        row = EventRow(at_s=self._now(), kind=kind, weights=None if weights is None else dict(weights), reason=reason)
        self._journal.add(row)

    async def _save(self) -> None:
        """Where the campaign is, if that has changed by more than samples, and what waits to be written."""
        state = self.campaign.state()
        compared = {key: value for key, value in state.items() if key != "cursor"}
        if compared != self._saved and self.stopped is None:
            self._saved = compared
            self._journal.save(state)
        await asyncio.to_thread(self._journal.flush, now=self._now())

    def _show(self) -> None:
        progress = self.progress()
        self._figures.progress(progress, waiting=self._journal.waiting)
        self._reporter.show(progress, now=self._now())

    def progress(self) -> Progress:
        """Where the campaign is."""
        campaign, trial = self.campaign, self.campaign.trial
        by_time = isinstance(trial, Switchback)
        needed = campaign.options.hop if trial is not None and campaign.options.mode == "paper" else self._window.size
        pairs = f"{len(trial.pairs)} of {campaign.options.pairs} pairs" if isinstance(trial, Switchback) else ""
        return Progress(
            phase=campaign.phase,
            generation=campaign.ledger.number,
            arm="" if trial is None else trial.arm,
            weights=self._orders.in_force,
            incumbent=campaign.incumbent,
            ttft_ms_p95=self._window.figures().ttft_ms_p95,
            samples=self._routed,
            needed=0 if by_time else needed,
            detail=pairs,
            trouble=self._trouble or self._paused,
        )

    def _delay_s(self) -> float:
        if self._trouble is not None:
            return min(FIRST_BACK_OFF_S * 2.0 ** min(self._failures - 1, 10), MAX_BACK_OFF_S)
        if self._failures:
            self._failures = 0
            self._reporter.say("the proxy answers again")
        until = self.campaign.next_timer()
        return self._poll_s if until is None else min(self._poll_s, max(0.0, until - self._now()))


async def wait(stop: asyncio.Event, seconds: float) -> None:
    """Whichever comes first."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
