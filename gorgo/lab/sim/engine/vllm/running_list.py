"""The running requests of a vLLM-like engine and the blocks that each holds.

Owns the accounting of one request: tokens with KV, full blocks, blank blocks. `model` decides who runs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic

from gorgo.lab.sim.engine.request import DECODING, PREFILLING, RequestT
from gorgo.lab.sim.engine.vllm.block_pool import BlockPool, CachedUnit


class Running(Generic[RequestT]):
    """One running request.

    `contents` are the full units of its prompt and output, `units` those that it holds, `blank` its other blocks,
    `blocks` all of them and `computed` the tokens that are in the pool or in the step under way.
    """

    __slots__ = ("blank", "blocks", "computed", "contents", "request", "units")

    def __init__(
        self, request: RequestT, contents: tuple[int, ...], found: list[CachedUnit], *, computed: int, blocks: int
    ) -> None:
        self.request = request
        self.contents = contents
        self.units = found
        self.blank = 0
        self.blocks = blocks
        self.computed = computed

    @property
    def total(self) -> int:
        """Prompt and output tokens so far."""
        return self.request.prompt_tokens + self.request.emitted

    @property
    def missing(self) -> int:
        """Tokens to compute before the next token: one for a request that decodes."""
        return self.request.prompt_tokens + self.request.emitted - self.computed


class RunningList(Generic[RequestT]):
    """The running requests of one engine in order of admission.

    Parameters
    ----------
    pool:
        The engine's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.entries: list[Running[RequestT]] = []
        self._entries: dict[RequestT, Running[RequestT]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def decoding(self) -> Collection[RequestT]:
        """Return the requests that have their first token, in order of admission."""
        return [entry.request for entry in self.entries if entry.request.stage is DECODING]

    def entry_of(self, request: RequestT) -> Running[RequestT] | None:
        """Return the entry of a request; `None` if it does not run."""
        return self._entries.get(request)

    def admit(self, request: RequestT) -> Running[RequestT] | None:
        """Let a request run with the prefix that is cached, if all its tokens fit into free blocks."""
        pool = self._pool
        total = request.prompt_tokens + request.emitted
        contents = request.contents
        if contents is None:
            contents = request.contents = pool.contents(request.key + request.output_key)
        found = pool.find(contents[: (total - 1) // pool.unit_tokens])
        needed = pool.blocks_of(total) - len(found) * pool.unit_blocks + pool.idle_blocks(found)
        if needed > pool.free_blocks:
            return None
        pool.hold(found)
        entry = Running(
            request, contents, found, computed=len(found) * pool.unit_tokens, blocks=len(found) * pool.unit_blocks
        )
        return self._run(entry)

    def _run(self, entry: Running[RequestT]) -> Running[RequestT]:
        """Add an admitted request to those that run; return its entry."""
        request = entry.request
        request.prefilled_tokens = entry.computed
        request.stage = PREFILLING
        self.entries.append(entry)
        self._entries[request] = entry
        return entry

    def schedule(self, entry: Running[RequestT], tokens: int) -> bool:
        """Compute so many more tokens: take their blocks and give content to those that become full.

        False, and nothing changes, if too few blocks are free.
        """
        pool = self._pool
        computed = entry.computed + tokens
        needed = pool.blocks_of(computed) - entry.blocks
        if needed > 0:
            if needed > pool.free_blocks:
                return False
            pool.take_blocks(needed)
            entry.blocks += needed
            entry.blank += needed
        entry.computed = computed
        entry.request.prefilled_tokens = min(computed, entry.request.prompt_tokens)
        full = min(computed // pool.unit_tokens, len(entry.contents))
        if full > (first := len(entry.units)):
            entry.units += pool.store(entry.contents[first:full])
            entry.blank -= pool.unit_blocks * (full - first)
            if pool.observer is not None:
                pool.report_stored(entry.contents[:full], entry.request.key + entry.request.output_key, first=first)
        return True

    def leave(self, request: RequestT) -> None:
        """Release the blocks of a request that has ended or is preempted."""
        entry = self._entries.pop(request)
        self.entries.remove(entry)
        self._pool.release(entry.units, blank=entry.blank)
        request.prefilled_tokens = 0

    def iterations_that_fit(self, at_most: int) -> int:
        """Return how many decode iterations, counted from the one just scheduled, find their blocks."""
        if self._needed_by_all(at_most - 1) <= self._pool.free_blocks:
            return at_most
        fit, unfit = 1, at_most
        while unfit - fit > 1:
            middle = (fit + unfit) // 2
            if self._needed_by_all(middle - 1) <= self._pool.free_blocks:
                fit = middle
            else:
                unfit = middle
        return fit

    def check(self) -> None:
        """Assert that the accounts of pool and requests agree."""
        pool = self._pool
        blocks = {id(unit): unit for entry in self.entries for unit in entry.units}
        holders = sum(unit.holders for unit in blocks.values())
        assert holders == sum(len(entry.units) for entry in self.entries)
        blank = sum(entry.blank for entry in self.entries)
        assert len(blocks) * pool.unit_blocks + blank + pool.free_blocks == pool.blocks, "no block is lost"
        for entry in self.entries:
            assert entry.blocks == len(entry.units) * pool.unit_blocks + entry.blank, "a block is full or blank"
            assert entry.blocks == pool.blocks_of(entry.computed), "blocks cover the computed tokens"
            assert [unit.content for unit in entry.units] == list(entry.contents[: len(entry.units)])

    def _needed_by_all(self, tokens: int) -> int:
        """Return the blocks that each request's next `tokens` take together."""
        blocks_of = self._pool.blocks_of
        return sum([max(0, blocks_of(entry.computed + tokens) - entry.blocks) for entry in self.entries])
