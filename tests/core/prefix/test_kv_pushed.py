"""Pushed blocks beside a naive twin, which has a set of reported blocks and the times of the confirmed ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.prefix.kv_chain import chain_hashes
from gorgo.core.prefix.kv_pushed import PushedBlocks
from gorgo.core.prefix.kv_source import TierBlocks

LIMIT = 6


@dataclass
class Twin:
    """One replica."""

    reported: set[int] = field(default_factory=set)
    confirmed: dict[int, float] = field(default_factory=dict)

    @property
    def blocks(self) -> set[int]:
        return self.reported | set(self.confirmed)

    def replace(self, hashes: list[int]) -> None:
        self.reported &= set(hashes)
        self.add(hashes)

    def add(self, hashes: list[int]) -> None:
        for own in dict.fromkeys(hashes):
            if own in self.confirmed or len(self.blocks | {own}) <= LIMIT:
                self.confirmed.pop(own, None)
                self.reported.add(own)

    def remove(self, hashes: list[int]) -> None:
        for own in hashes:
            self.reported.discard(own)
            self.confirmed.pop(own, None)

    def confirm(self, hashes: list[int], now: float) -> None:
        for own in hashes:
            if own not in self.reported and len(self.blocks | {own}) <= LIMIT:
                self.confirmed[own] = now

    def expire_confirmed(self, before_s: float) -> None:
        self.confirmed = {own: since_s for own, since_s in self.confirmed.items() if since_s >= before_s}


STEPS = st.tuples(
    st.sampled_from(["replace", "add", "remove", "confirm", "settle", "clear"]),
    st.integers(0, 1),
    st.lists(st.integers(0, 9), max_size=8),
)


@given(st.lists(STEPS, max_size=30))
def test_pushed_blocks_agree_with_a_naive_twin(steps: list[tuple[str, int, list[int]]]) -> None:
    tier = TierBlocks()
    pushed, twins = PushedBlocks(tier), {0: Twin(), 1: Twin()}
    for now, (step, slot, hashes) in enumerate(steps):
        twin = twins[slot]
        match step:
            case "replace":
                pushed.replace(slot, hashes, limit=LIMIT)
                twin.replace(hashes)
            case "add":
                pushed.add(slot, hashes, limit=LIMIT)
                twin.add(hashes)
            case "remove":
                pushed.remove(slot, hashes)
                twin.remove(hashes)
            case "confirm":
                pushed.confirm(slot, hashes, limit=LIMIT, now=float(now))
                twin.confirm(hashes, float(now))
            case "settle":
                pushed.expire_confirmed(slot, before_s=now - 2.0)
                twin.expire_confirmed(now - 2.0)
            case "clear":
                pushed.clear_replica(slot)
                twin.remove(list(twin.blocks))
        pushed.check(LIMIT)
        expected = {own: sum(1 << slot for slot in twins if own in twins[slot].blocks) for own in range(10)}
        assert tier.masks == {own: mask for own, mask in expected.items() if mask}
        for each in twins:
            assert (pushed.blocks_of(each), pushed.reported(each)) == (
                len(twins[each].blocks),
                len(twins[each].reported),
            )


def test_confirmed_block_that_the_next_snapshot_shows_is_reported() -> None:
    pushed = PushedBlocks(TierBlocks())
    pushed.confirm(0, [1, 2], limit=LIMIT, now=5.0)
    pushed.replace(0, [1], limit=LIMIT)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (2, 1)
    pushed.expire_confirmed(0, before_s=5.5)
    assert (pushed.blocks_of(0), pushed.reported(0)) == (1, 1)


def test_many_blocks_are_in_parts_of_which_none_is_large() -> None:
    tier = TierBlocks()
    pushed, hashes = PushedBlocks(tier), chain_hashes(bytes(4 * 20_000), block_tokens=1)
    assert pushed.add(0, hashes, limit=20_000) == 0
    assert max(map(len, tier.parts)) < 2 * 20_000 / len(tier.parts)
    # A dict begins with the lowest bits: where they were equal in a part, each access met many other blocks.
    assert min(len({hash(own) % 64 for own in part}) for part in tier.parts) > 20
    assert len(tier.masks) == pushed.blocks_of(0) == 20_000
    pushed.set_max_blocks(10_000)
    assert pushed.blocks_of(0) == len(tier.masks) == 10_000
    assert len(tier.masks.keys() & set(hashes[:10_000])) < 1000
