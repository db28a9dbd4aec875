"""Updates of the prefix index by results of attempts: confirm, retract, correct, and resize.

Owns the step from an outcome to the index and each replica's size there (`PrefixUpdater`), and the sums by which
estimated and reported cached tokens are compared (`CacheAccuracy`). See `prefix.index` for the index and
`prefix.residency` for what a report of cached tokens corrects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.decision import CacheSourceStats
from gorgo.core.messages.request import COMPLETED, Outcome, RouteRequest
from gorgo.core.prefix.index import Answers, PrefixIndex, slots_of
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import CacheReport, FoundShares, LearnedCapacity

# How right the estimate of cached tokens was: sums of estimated and reported tokens per replica.
#
# Owns the sums. `prefix.residency` decides what a report corrects.


@dataclass(slots=True)
class _Sums:
    """What of a `CacheSourceStats` is summed request by request; the rest of it is read from the feed at that time."""

    requests: int = 0
    estimated_tokens: int = 0
    reported_tokens: int = 0
    phantom_tokens: int = 0
    missed_tokens: int = 0


class CacheAccuracy:
    """Sums of all replicas since they joined."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def remove_replica(self, slot: int) -> None:
        """Drop the sums of a replica that has left."""
        self._sums.pop(slot, None)

    def add(self, slot: int, request: RouteRequest, outcome: Outcome, *, estimated_tokens: int) -> None:
        """Add a completed request, if the engine reported its cached tokens.

        A prompt whose length was estimated wrong is compared in the engine's tokens.
        """
        reported = outcome.cached_tokens
        if reported is None:
            return
        if outcome.prompt_tokens and request.prompt_tokens:
            estimated_tokens = round(estimated_tokens * outcome.prompt_tokens / request.prompt_tokens)
        sums = self._sums.get(slot)
        if sums is None:
            sums = self._sums[slot] = _Sums()
        sums.requests += 1
        sums.estimated_tokens += estimated_tokens
        sums.reported_tokens += reported
        if estimated_tokens > reported:
            sums.phantom_tokens += estimated_tokens - reported
        else:
            sums.missed_tokens += reported - estimated_tokens

    def stats(self, slot: int, feeds: KvFeeds, *, now: float) -> CacheSourceStats:
        """Return the sums beside the state of the replica's feed."""
        feed, sums = feeds.newest(slot), self._sums.get(slot, _Sums())
        return CacheSourceStats(
            source="history" if feed is None else feed.source,
            complete=feed is not None and feed.complete,
            block_tokens=None if feed is None else feed.index.block_tokens,
            blocks=feeds.blocks(slot),
            speculated_blocks=feeds.speculated_blocks(slot, now=now),
            age_s=None if feed is None else now - feed.newest_s,
            requests=sums.requests,
            estimated_tokens=sums.estimated_tokens,
            reported_tokens=sums.reported_tokens,
            phantom_tokens=sums.phantom_tokens,
            missed_tokens=sums.missed_tokens,
            events=feeds.event_stats(slot),
            decisions=feeds.decisions(slot),
        )


#: Prompts over which the share of found tokens is averaged.
WINDOW_PROMPTS = 256
_PROMPTS_LEFT = 1.0 - 1.0 / WINDOW_PROMPTS
#: What the average begins with: 32 prompts of 4,000 tokens, half of them found.
FIRST_TOKENS, FIRST_SHARE = 128_000.0, 0.5


class PrefixObserver(Protocol):
    """Receiver of what results of attempts say about prefixes."""

    def on_confirmed(self, attempt: Attempt) -> None: ...

    def on_withdrawn(self, attempt: Attempt) -> None: ...

    def on_cache_report(self, attempt: Attempt, report: CacheReport, *, evicted: bool) -> None: ...

    def on_completed(self, attempt: Attempt, outcome: Outcome) -> None: ...

    def on_answered(self, attempt: Attempt, output_tokens: int) -> None: ...


class PrefixUpdater:
    """Applies results to the index.

    Parameters
    ----------
    index, fleet, found_shares, answers, feeds, accuracy:
        The Router's.
    block_tokens:
        As in `RouterLimits`; may be replaced.
    """

    def __init__(
        self,
        index: PrefixIndex,
        fleet: Fleet,
        found_shares: FoundShares,
        answers: Answers,
        feeds: KvFeeds,
        accuracy: CacheAccuracy,
        *,
        block_tokens: float,
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._found_shares = found_shares
        self.answers = answers
        self._feeds = feeds
        self._accuracy = accuracy
        self.block_tokens = block_tokens
        #: By slot.
        self._learned_capacities: dict[int, LearnedCapacity] = {}
        #: Collects what peers are told; `None` without peers.
        self.observer: PrefixObserver | None = None
        #: Blocks that prompts of all routers have on a slot, as far as they are reported; `None` without peers.
        self.group_blocks: Callable[[int], int] | None = None
        self._prompt_tokens, self._found_tokens = FIRST_TOKENS, FIRST_SHARE * FIRST_TOKENS
        #: The share of prompt tokens that some replica had, of the last `WINDOW_PROMPTS` or so.
        self.found_share = FIRST_SHARE

    def update_fills(self) -> None:
        """Write the fill of each cache that has changed."""
        index, feeds, fills = self._index, self._feeds, self._fleet.columns.cache_fill
        changed = index.changed | feeds.changed_slots
        index.changed = feeds.changed_slots = 0
        counted, group_blocks = feeds.reported and feeds.counted, self.group_blocks
        for slot in slots_of(changed):
            reported = feeds.fill(slot) if counted else None
            if reported is None:
                reported = index.fill(slot, blocks=0 if group_blocks is None else group_blocks(slot))
            fills[slot] = reported

    def on_request(self, request: RouteRequest, *, found_tokens: float) -> None:
        """Count a prompt that is dispatched for the first time, of which some replica has `found_tokens`."""
        self._found_tokens = matched = self._found_tokens * _PROMPTS_LEFT + found_tokens
        self._prompt_tokens = prompts = self._prompt_tokens * _PROMPTS_LEFT + request.prompt_tokens
        self.found_share = matched / prompts

    def on_first_token(self, attempt: Attempt, *, now: float) -> None:
        """Confirm the prompt on the replica."""
        if attempt.replica.slot >= 0:
            self._index.confirm(attempt.request.blocks, attempt.replica.slot, attempt.request.client)
            self._confirmed(attempt, now)

    def on_result(self, attempt: Attempt, outcome: Outcome, *, now: float) -> None:
        """Confirm or retract the prompt, and correct the index by the engine's report."""
        if attempt.replica.slot < 0:
            return
        blocks, slot = attempt.request.blocks, attempt.replica.slot
        completed, bounded = outcome.result is COMPLETED, self._index.bounded
        if completed and (bounded or attempt.first_token_s is None):
            # Once more after the first token: the engine used the blocks until now.
            self._index.confirm(blocks, slot, attempt.request.client)
            if attempt.first_token_s is None:
                self._confirmed(attempt, now)
        elif attempt.first_token_s is None:
            self._index.retract(blocks, slot)
            if self.observer is not None:
                self.observer.on_withdrawn(attempt)
            if attempt.speculation is not None:
                self._feeds.withdraw(attempt.speculation)
        if completed:
            estimated_tokens = attempt.decision.estimated_cached_tokens
            if self.observer is not None:
                self.observer.on_completed(attempt, outcome)
            self._accuracy.add(slot, attempt.request, outcome, estimated_tokens=estimated_tokens)
        if completed and bounded:
            self._correct(attempt, outcome)
            if outcome.output_tokens:
                self.answers.add(slot, attempt.request, outcome.output_tokens)
                if self.observer is not None:
                    self.observer.on_answered(attempt, outcome.output_tokens)

    def on_fleet_change(self, change: FleetChange) -> None:
        """Add and remove replicas."""
        for slot in change.left_slots:
            self._index.remove_replica(slot)
            self._found_shares.remove_replica(slot)
            self.answers.remove_replica(slot)
            self._feeds.remove_replica(slot)
            self._accuracy.remove_replica(slot)
            del self._learned_capacities[slot]
        for replica in change.joined:
            self._learned_capacities[replica.slot] = LearnedCapacity()
            self._index.add_replica(replica.slot, capacity_blocks=self.capacity_blocks(replica))
        if change.left_slots or change.joined:
            self._feeds.set_replicas([replica.slot for replica in self._fleet.replicas.values()])
        self.resize_all()

    def resize_all(self) -> None:
        for replica in self._fleet.replicas.values():
            self.resize(replica)

    def resize(self, replica: Replica) -> None:
        """Bound the replica's blocks by its KV capacity."""
        blocks = self.capacity_blocks(replica)
        self._index.set_capacity(replica.slot, blocks)
        self._feeds.set_capacity(replica.slot, None if blocks is None else blocks * self.block_tokens)

    def _confirmed(self, attempt: Attempt, now: float) -> None:
        """Pass on that a replica has prefilled a prompt."""
        if attempt.request.kv_hashes:
            self._feeds.confirm(attempt.replica.slot, attempt.request, now=now)
        if self.observer is not None:
            self.observer.on_confirmed(attempt)

    def _correct(self, attempt: Attempt, outcome: Outcome) -> None:
        """Correct the replica's blocks by the engine's report of cached tokens."""
        request, replica = attempt.request, attempt.replica
        confirmed = attempt.longest_confirmed
        report = CacheReport.of(request, confirmed, outcome)
        if report is None or not report.confirmed_tokens:
            return
        if attempt.behind is not None:
            self.answers.on_report(replica.slot, attempt.behind, found_tokens=report.found_tokens)
        shares, slot, model = self._found_shares, replica.slot, attempt.decision.model
        usual = shares.of(slot, model, report.confirmed_tokens)
        shares.learn(slot, model, confirmed_tokens=report.confirmed_tokens, found_tokens=report.found_tokens)
        contradicted = report.is_contradiction(usual)
        explained = contradicted and not report.is_contradiction(shares.of(slot, model, report.confirmed_tokens))
        if self.observer is not None:
            self.observer.on_cache_report(attempt, report, evicted=contradicted and not explained)
        if explained:
            # The learned share explains this report and those before it: they were no evictions.
            if self._learned_capacities[slot].reset():
                self.resize(replica)
            return
        if contradicted:
            self._index.evict_older(replica.slot, before=confirmed.tick)
        resident = self._index.resident_blocks(replica.slot)
        if self._learned_capacities[slot].learn(contradicted=contradicted, resident_blocks=resident):
            self.resize(replica)

    def capacity_blocks(self, replica: Replica) -> int | None:
        """Return the blocks that fit into the replica's cache; `None` if unknown."""
        tokens = self._fleet.columns.kv_capacity_tokens.item(replica.slot)
        if tokens != tokens:
            return self._learned_capacities[replica.slot].blocks
        return int(tokens / self.block_tokens)
