"""Prefixes that the routers of a group confirmed: those of this Router's attempts, and those of its peers' reports.

Owns what a result of an attempt or a record of a peer means for marks, for the next report, for the index and for a
policy with routes of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.request import Outcome
from gorgo.core.peers.marks import GroupPrefixes
from gorgo.core.peers.outbox import URGENT_PREFILL_S, Outbox
from gorgo.core.peers.records import PrefixMarks
from gorgo.core.peers.routes import PolicyRoutes
from gorgo.core.prefix.cache_feedback import CacheReport
from gorgo.core.prefix.found_share import FoundShares
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.origin import Origin


class SharedPrefixes:
    """Observer of the Router's results.

    Parameters
    ----------
    prefixes, outbox, routes:
        The exchange's: marks, what the next report has, and routes of the policy.
    fleet, found_shares, index, capacity_of:
        As in `PeerExchange`.
    """

    def __init__(
        self,
        prefixes: GroupPrefixes,
        outbox: Outbox,
        routes: PolicyRoutes,
        *,
        fleet: Fleet,
        found_shares: FoundShares,
        index: PrefixIndex,
        capacity_of: Callable[[Replica], int | None],
    ) -> None:
        self._prefixes, self._outbox, self._routes = prefixes, outbox, routes
        self._fleet, self._found_shares, self._index, self._capacity_of = fleet, found_shares, index, capacity_of

    def on_sent(self, attempt: Attempt) -> None:
        """Report the prefixes of a prompt that waits so long that others may send its like before its first token."""
        estimate = attempt.decision.estimate
        if estimate is not None and estimate.queue_s + estimate.prefill_s >= URGENT_PREFILL_S:
            self._outbox.on_sent(attempt)

    def on_withdrawn(self, attempt: Attempt) -> None:
        """Report that a prompt that was reported as sent has ended before its first token."""
        self._outbox.on_withdrawn(attempt)

    def on_confirmed(self, attempt: Attempt) -> None:
        """Mark the prefixes of a prompt, here and in the next report."""
        slot = attempt.replica.slot
        blocks, dispatched_s = attempt.state.request.blocks, attempt.dispatched_s
        attempt.group_prefix = self._prefixes.last_used(slot, blocks, before_s=dispatched_s)
        marks = self._outbox.on_confirmed(attempt)
        if marks is not None:
            self._use_prefixes(attempt.replica, marks, Origin.LOCAL, now=attempt.first_token_s or inf)

    def on_cache_report(self, attempt: Attempt, report: CacheReport, *, evicted: bool) -> None:
        """Add an engine's report to the next one; the index evicts by it, and so do the marks."""
        self._outbox.on_cache_report(attempt, report)
        if evicted:
            self._evict_marks(attempt.replica, attempt.longest_confirmed.tick)

    def on_completed(self, attempt: Attempt, outcome: Outcome) -> None:
        """Remove the marks that are older than one which the engine did not have."""
        prefix, request, slot = attempt.group_prefix, attempt.state.request, attempt.replica.slot
        report = CacheReport.of(request, prefix, outcome)
        if report is not None and report.confirmed_tokens:
            usual = self._found_shares.of(slot, request.recorded_model, report.confirmed_tokens)
            if report.is_contradiction(usual):
                self._evict_marks(attempt.replica, prefix.tick)

    def on_answered(self, attempt: Attempt, output_tokens: int) -> None:
        """Add a whole answer to the next report."""
        self._outbox.on_answered(attempt, output_tokens)

    def evicted(self) -> Counter[Origin]:
        """Return the marks, and the routes of the policy, that were evicted so far, by origin."""
        found: Counter[Origin] = Counter()
        for (origin, _), count in self._prefixes.evicted.items():
            found[origin] += count
        found.update(self._routes.evicted())
        return found

    def take_prefixes(self, marks: PrefixMarks, *, now: float) -> None:
        """Take in prefixes of a peer's report."""
        replica = self._fleet.replicas.get(marks.replica)
        if replica is None:
            return
        if marks.kind == "withdrawn":
            self._prefixes.withdraw(replica.slot, marks.words)
            return
        if marks.kind == "evicted":
            tick = self._prefixes.median_tick(replica.slot, marks.words) + 1
            self._prefixes.evict_older(replica.slot, before=tick)
            self._evict_older(replica.slot, tick)
            return
        self._index.tick += 2  # a use by another router
        confirmed = marks.kind == "confirmed"
        self._use_prefixes(replica, marks, Origin.REMOTE, now=now if confirmed else inf)
        if confirmed:
            self._routes.add(marks, now=now)

    def _evict_marks(self, replica: Replica, tick: int) -> None:
        """Evict the marks last used before `tick`, here and by the next report."""
        marks = self._prefixes.evict_older(replica.slot, before=tick)
        self._outbox.on_evicted(replica.spec.name, marks)

    def _use_prefixes(self, replica: Replica, marks: PrefixMarks, origin: Origin, *, now: float) -> None:
        """Mark prefixes as used now, and evict from the index what no longer fits beside those of all routers."""
        bounded = self._index.bounded
        capacity_blocks = self._capacity_of(replica) if bounded else None
        oldest = self._prefixes.use(
            replica.slot, marks, origin, tick=self._index.tick, now=now, capacity_blocks=capacity_blocks
        )
        self._evict_older(replica.slot, oldest)

    def _evict_older(self, slot: int, tick: int) -> None:
        if tick and self._index.bounded:
            self._index.evict_older(slot, before=tick)
