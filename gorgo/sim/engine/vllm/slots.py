"""The prompt cache of a llama.cpp-like engine: a slot for each place of the batch, and prompts stored in host memory.

Owns which slot a request takes and what is stored. `model` and `running_list` form the steps.

Theory of operation. A slot keeps the tokens of its last request, and only a request that takes the slot finds them. So
an idle slot is taken whose tokens begin as the prompt does, the longest beginning of more than a tenth of the prompt
first; else the one that was used longest ago. Before a slot loses more than half of its tokens they are copied to host
memory, and the slot gets the stored prompt that has both more of the new one and less beside it, if there is one.
Stored prompts go in order of age where they and the slots together exceed the pool. What a running request computes is
not found until it has ended.

Every slot has room for the longest context: nothing is preempted. Such engines publish no events of their caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from gorgo.sim.engine.steps import RequestT
from gorgo.sim.engine.vllm.block_pool import BlockPool, CachedUnit
from gorgo.sim.engine.vllm.running_list import Running, RunningList

#: llama.cpp's `--slot-prompt-similarity`: a slot with less of the prompt is not preferred.
LEAST_SHARE = 0.1
#: A slot that keeps less of its tokens is saved first; a stored prompt of which less is used stays where it is.
SAVED_BELOW, LEAST_USED = 0.5, 0.25
#: Blocks are never missing.
_ALL = 1 << 40

Contents = tuple[int, ...]


class StoredPrompt:
    """Tokens of an ended request: the content of each full unit, and the number of all."""

    __slots__ = ("contents", "tokens", "used")

    def __init__(self, contents: Contents, tokens: int, used: int) -> None:
        self.contents = contents
        self.tokens = tokens
        self.used = used


class SlotPool(BlockPool):
    """Slots and stored prompts of one engine; the parameters are those of `BlockPool`, and the number of slots.

    Example
    -------
    >>> pool = SlotPool(capacity_tokens=100, block_tokens=1, item_bytes=1, slots=2)
    >>> slot, found = pool.take_slot(pool.contents(b"abcdefgh"), 8)
    >>> pool.take_slot(pool.contents(b"abcdefxy"), 8)  # the other slot: the first is in use
    (0, 0)
    >>> pool.release_slot(slot, pool.contents(b"abcdefgh"), 8)
    >>> pool.take_slot(pool.contents(b"abcdefij"), 8) == (slot, 6)
    True
    """

    def __init__(
        self,
        *,
        capacity_tokens: int,
        block_tokens: int = 1,
        item_bytes: int = 4,
        item_tokens: int = 1,
        caching: bool = True,
        slots: int,
    ) -> None:
        super().__init__(
            capacity_tokens=capacity_tokens,
            block_tokens=block_tokens,
            item_bytes=item_bytes,
            item_tokens=item_tokens,
            caching=caching,
        )
        #: Empty while a request has the slot.
        self._slots = [StoredPrompt((), 0, -1) for _ in range(slots)]
        self._busy = [False] * slots
        #: In host memory, the oldest first.
        self._stored: list[StoredPrompt] = []

    @property
    def free_blocks(self) -> int:
        return _ALL

    @property
    def free_tokens(self) -> int:
        """Return the part of the pool without content, as far as that is known: what runs is not counted."""
        return self.capacity_tokens - self.evictable_tokens

    @property
    def evictable_tokens(self) -> int:
        """Return the tokens that are found, at most a pool: slots can exceed a small one."""
        return min(self.capacity_tokens, self._used_tokens())

    def has(self, content: int) -> bool:
        """Whether some idle slot or stored prompt has this content."""
        return any(content in prompt.contents for prompt in (*self._slots, *self._stored))

    def find(self, contents: Sequence[int]) -> list[CachedUnit]:  # noqa: ARG002 - that of other pools
        """Return nothing: what is found depends on the slot."""
        return []

    def take_slot(self, contents: Contents, tokens: int) -> tuple[int, int]:
        """Let a prompt take an idle slot, of which there is one; return it and the units found there."""
        slot, shared = self._most_similar(contents, tokens)
        is_similar = slot >= 0
        if not is_similar:
            slot = self._longest_idle()
            shared = _shared(self._slots[slot].contents, contents)
        old = self._slots[slot]
        self._busy[slot] = True
        self._slots[slot] = StoredPrompt((), 0, old.used)
        if not is_similar or shared * self.unit_tokens < SAVED_BELOW * old.tokens:
            shared = self._swap(old, contents, shared)
        return slot, min(shared, (tokens - 1) // self.unit_tokens)

    def release_slot(self, slot: int, contents: Contents, tokens: int) -> None:
        """Keep the tokens of a request that has left its slot."""
        assert self._busy[slot], "a request has one slot"
        self._busy[slot] = False
        used = 1 + max(prompt.used for prompt in self._slots)
        self._slots[slot] = StoredPrompt(contents, tokens, used) if contents else StoredPrompt((), 0, used)
        self._drop()

    def flush(self) -> None:
        """Forget every prompt. Only an idle engine does this."""
        assert not any(self._busy), "nothing runs"
        self._slots = [StoredPrompt((), 0, -1) for _ in self._slots]
        self._stored = []

    def check(self) -> None:
        """Assert every invariant."""
        assert all(not prompt.tokens for prompt, busy in zip(self._slots, self._busy, strict=True) if busy)
        assert len(self._stored) <= 1 or self._used_tokens() <= self.capacity_tokens, "what is too much was dropped"

    def _most_similar(self, contents: Contents, tokens: int) -> tuple[int, int]:
        """Return the idle slot with the longest common beginning and its units; -1 if all are short."""
        best, most = -1, 0
        for slot, prompt in enumerate(self._slots):
            if not self._busy[slot]:
                shared = _shared(prompt.contents, contents)
                if shared > most and shared * self.unit_tokens > LEAST_SHARE * tokens:
                    best, most = slot, shared
        return best, most

    def _longest_idle(self) -> int:
        idle = [slot for slot, busy in enumerate(self._busy) if not busy]
        assert idle, "the caller saw that fewer run than there are slots"
        return min(idle, key=lambda slot: (self._slots[slot].used, -slot))

    def _swap(self, old: StoredPrompt, contents: Contents, shared: int) -> int:
        """Copy a slot's prompt to host memory, and return the units found of the better of it and those there."""
        if old.tokens and not any(self._contains(prompt, old) for prompt in self._stored):
            self._stored = [prompt for prompt in self._stored if not self._contains(old, prompt)]
            self._stored.append(old)
        used_share = shared * self.unit_tokens / old.tokens if old.tokens else -1.0
        better: StoredPrompt | None = None
        for prompt in self._stored:
            found = _shared(prompt.contents, contents)
            share = found * self.unit_tokens / prompt.tokens
            if share >= LEAST_USED and share > used_share and found > shared:
                better, used_share, shared = prompt, share, found
        if better is not None:
            self._stored.remove(better)
        self._drop()
        return shared

    def _drop(self) -> None:
        """Forget the oldest of the stored prompts but for the last one, where slots and these exceed the pool."""
        while len(self._stored) > 1 and self._used_tokens() > self.capacity_tokens:
            self.evicted_tokens_total += self._stored.pop(0).tokens

    def _contains(self, longer: StoredPrompt, shorter: StoredPrompt) -> bool:
        """Whether one begins with all of the other; tokens behind the last full unit are never known to."""
        units = len(shorter.contents)
        return units * self.unit_tokens == shorter.tokens and _shared(longer.contents, shorter.contents) == units

    def _used_tokens(self) -> int:
        return sum(prompt.tokens for prompt in (*self._slots, *self._stored))


class SlotList(RunningList[RequestT], Generic[RequestT]):
    """The running requests of an engine with slots."""

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool)
        self._slot_pool = pool
        self._taken: dict[RequestT, int] = {}

    def admit(self, request: RequestT) -> Running[RequestT]:
        """Let a request run in the slot that it takes."""
        pool = self._slot_pool
        contents = pool.contents(request.key + request.output_key)
        slot, found = pool.take_slot(contents[: request.prompt_tokens // pool.unit_tokens], request.prompt_tokens)
        self._taken[request] = slot
        return self._run(Running(request, contents, [], computed=found * pool.unit_tokens, blocks=0))

    def schedule(self, entry: Running[RequestT], tokens: int) -> bool:
        """Compute so many more tokens; there is always room."""
        entry.computed += tokens
        entry.request.prefilled_tokens = min(entry.computed, entry.request.prompt_tokens)
        return True

    def leave(self, request: RequestT) -> None:
        """Give back the slot of a request that has ended."""
        entry = self._entries.pop(request)
        self.entries.remove(entry)
        pool = self._slot_pool
        pool.release_slot(
            self._taken.pop(request), entry.contents[: entry.computed // pool.unit_tokens], entry.computed
        )
        request.prefilled_tokens = 0

    def iterations_that_fit(self, at_most: int) -> int:
        return at_most

    def check(self) -> None:
        assert set(self._taken) == {entry.request for entry in self.entries}, "a request has a slot"
        assert len(set(self._taken.values())) == len(self._taken), "and no other has it"


def _shared(one: Contents, other: Contents) -> int:
    """Return the units of the common beginning: contents tell all tokens up to their end."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
