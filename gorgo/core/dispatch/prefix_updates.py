"""What the ends of attempts say about the prefix index: confirmed, withdrawn, corrected, and how much a replica holds.

Owns the step from an outcome to the index, and the size that the index gives each replica. The index itself is
`prefix_index`, what a report of cached tokens means `cache_reports`.
"""

from __future__ import annotations

from gorgo.core.dispatch.in_flight import Attempt
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.replica import Replica
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.prefix.cache_feedback import is_contradicted
from gorgo.core.prefix.index import PrefixIndex


class PrefixUpdater:
    """Keeps the index to what is known.

    Parameters
    ----------
    index, fleet:
        The Router's.
    block_tokens:
        As in `RouterLimits`; may be replaced.
    """

    def __init__(self, index: PrefixIndex, fleet: Fleet, *, block_tokens: float) -> None:
        self._index = index
        self._fleet = fleet
        self.block_tokens = block_tokens

    def on_first_token(self, attempt: Attempt) -> None:
        """The prompt has been prefilled there."""
        if attempt.replica.slot >= 0:
            self._index.confirm(attempt.state.request.blocks, attempt.replica.slot)

    def on_result(self, attempt: Attempt, outcome: Outcome) -> None:
        """Confirm or withdraw, and take the engine's own account over belief."""
        if attempt.replica.slot < 0:
            return
        blocks, slot = attempt.state.request.blocks, attempt.replica.slot
        completed, bounded = outcome.result is AttemptResult.COMPLETED, self._index.bounded
        if completed and (bounded or attempt.first_token_s is None):
            # Once more after the first token: the engine held the blocks to the end, so they were used last now.
            self._index.confirm(blocks, slot)
        elif attempt.first_token_s is None:
            self._index.retract(blocks, slot)
        if completed and bounded:
            self._correct(attempt, outcome)

    def on_fleet_change(self, change: FleetChange) -> None:
        """The fleet is another one."""
        for slot in change.left_slots:
            self._index.remove_replica(slot)
        for member in change.joined:
            self._index.add_replica(member.slot, capacity_blocks=self._capacity_blocks(member))
        self.resize_all()

    def resize_all(self) -> None:
        for member in self._fleet.replicas.values():
            self.resize(member)

    def resize(self, member: Replica) -> None:
        """Give the replica as many blocks as its KV pool holds."""
        self._index.set_capacity(member.slot, self._capacity_blocks(member))

    def _correct(self, attempt: Attempt, outcome: Outcome) -> None:
        """Truth beats belief: the engine has told what it had cached."""
        contradicted = is_contradicted(attempt.state.request, attempt.confirmed_prefix, outcome)
        if contradicted is None:
            return
        member = attempt.replica
        if contradicted:
            self._index.evict_older(member.slot, before=attempt.confirmed_prefix.tick)
        resident = self._index.resident_blocks(member.slot)
        if member.learned_capacity.learn(contradicted=contradicted, resident_blocks=resident):
            self.resize(member)

    def _capacity_blocks(self, member: Replica) -> int | None:
        tokens = float(self._fleet.columns.kv_capacity_tokens[member.slot])
        return member.learned_capacity.blocks if tokens != tokens else int(tokens / self.block_tokens)
