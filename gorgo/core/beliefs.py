"""What the ends of attempts say about the prefix index: confirmed, withdrawn, corrected, and how much a replica holds.

Owns the step from an outcome to the index, and the size that the index gives each replica. The index itself is
`prefix_index`, what a report of cached tokens means `cache_reports`.
"""

from __future__ import annotations

from gorgo.core.cache_reports import contradicts
from gorgo.core.fleet import Change, Fleet
from gorgo.core.ledger import Attempt
from gorgo.core.member import Member
from gorgo.core.prefix_index import PrefixIndex
from gorgo.core.request import Ending, Outcome


class Beliefs:
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

    def first_token(self, attempt: Attempt) -> None:
        """The prompt has been prefilled there."""
        if attempt.member.slot >= 0:
            self._index.confirm(attempt.state.request.blocks, attempt.member.slot)

    def ended(self, attempt: Attempt, outcome: Outcome) -> None:
        """Confirm or withdraw, and take the engine's own account over belief."""
        if attempt.member.slot < 0:
            return
        blocks, slot = attempt.state.request.blocks, attempt.member.slot
        completed, bounded = outcome.ending is Ending.COMPLETED, self._index.bounded
        if completed and (bounded or attempt.first_token_s is None):
            # Once more after the first token: the engine held the blocks to the end, so they were used last now.
            self._index.confirm(blocks, slot)
        elif attempt.first_token_s is None:
            self._index.withdraw(blocks, slot)
        if completed and bounded:
            self._correct(attempt, outcome)

    def replaced(self, change: Change) -> None:
        """The fleet is another one."""
        for slot in change.left_slots:
            self._index.remove_replica(slot)
        for member in change.joined:
            self._index.add_replica(member.slot, capacity_blocks=self._capacity_blocks(member))
        self.fit_all()

    def fit_all(self) -> None:
        for member in self._fleet.members.values():
            self.fit(member)

    def fit(self, member: Member) -> None:
        """Give the replica as many blocks as its KV pool holds."""
        self._index.set_capacity(member.slot, self._capacity_blocks(member))

    def _correct(self, attempt: Attempt, outcome: Outcome) -> None:
        """Truth beats belief: the engine has told what it had cached."""
        contradicted = contradicts(attempt.state.request, attempt.belief, outcome)
        if contradicted is None:
            return
        member = attempt.member
        if contradicted:
            self._index.correct(member.slot, before=attempt.belief.tick)
        resident = self._index.resident_blocks(member.slot)
        if member.learned_capacity.learn(contradicted=contradicted, resident_blocks=resident):
            self.fit(member)

    def _capacity_blocks(self, member: Member) -> int | None:
        tokens = float(self._fleet.columns.kv_capacity_tokens[member.slot])
        return member.learned_capacity.blocks if tokens != tokens else int(tokens / self.block_tokens)
