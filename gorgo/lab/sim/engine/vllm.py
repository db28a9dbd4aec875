"""One vLLM-like replica as a sans-IO step model, with the interface of SGLang's `EngineModel`.

Owns the scheduler (the queue and the contents of each step), the running requests and the blocks that each holds
(`RunningList`), and the slots of a llama.cpp-like engine, which this scheduler has instead of blocks (`SlotPool`,
`SlotList`). Leaves the blocks to `gorgo.lab.sim.engine.kv_cache`, and the costs to `profiles`. As there, time is an
argument and the same requests at the same times always give the same steps.

Theory of operation. A step has a budget of tokens (`chunk_tokens`, vLLM's `max_num_batched_tokens`). It is shared

    1. among the running requests in order of admission: one token for each that decodes, as many as are left for the
       last one, whose prompt may be unfinished
    2. among those in line, first come first served, while fewer than `max_running_requests` run

- A request is admitted if all tokens that it has now fit into free blocks; its output is not counted. Blocks are taken
  as tokens are scheduled. If none is free, the last running request is preempted: it loses its blocks, goes to the
  front of the line, and computes prompt and output again, less what is still cached. Nothing is admitted in that step.
- A full block is found by others as soon as its last token is scheduled, also in mid-prefill and in the same step. The
  last token is always computed, so a prompt of whole blocks computes its last one again.
- Finished requests release their blocks at the end of a step; freed blocks stay cached until they are taken.

This is vLLM with chunked prefill and `scheduler_reserve_full_isl`, which are its defaults, and without asynchronous
scheduling, which forms a step before the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Generic

from gorgo.lab.sim.engine.kv_cache import BlockPool, CachedUnit
from gorgo.lab.sim.engine.model import Scheduler
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import DECODING, FINISHED, PREFILLING, WAITING, RequestT, Step, run_duration_s


class Running(Generic[RequestT]):
    """One running request.

    `contents` are the full units of its prompt and output, `units` those that it holds, `blank` its other blocks,
    `blocks` all of them and `computed` the tokens that are in the pool or in the step under way.
    """

    __slots__ = ("blank", "blocks", "computed", "contents", "request", "units")

    def __init__(
        self, request: RequestT, contents: tuple[int, ...], units: list[CachedUnit], *, computed: int, blocks: int
    ) -> None:
        self.request = request
        self.contents = contents
        self.units = units
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
        cached = pool.find(contents[: (total - 1) // pool.unit_tokens])
        needed = pool.blocks_of(total) - len(cached) * pool.unit_blocks + pool.idle_blocks(cached)
        if needed > pool.free_blocks:
            return None
        pool.hold(cached)
        entry = Running(
            request, contents, cached, computed=len(cached) * pool.unit_tokens, blocks=len(cached) * pool.unit_blocks
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


# The prompt cache of a llama.cpp-like engine: a slot for each place of the batch, and prompts stored in host memory.
#
# Theory of operation. A slot keeps the tokens of its last request, and only a request that takes the slot finds them.
# So an idle slot is taken whose tokens begin as the prompt does, the longest beginning of more than a tenth of the
# prompt first; else the one that was used longest ago. Before a slot loses more than half of its tokens they are
# copied to host memory, and the slot gets the stored prompt that has both more of the new one and less beside it, if
# there is one. Stored prompts go in order of age where they and the slots together exceed the pool. What a running
# request computes is not found until it has ended.
#
# Every slot has room for the longest context: nothing is preempted. Such engines publish no events of their caches.


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
            shared_units = _shared(prompt.contents, contents)
            share = shared_units * self.unit_tokens / prompt.tokens
            if share >= LEAST_USED and share > used_share and shared_units > shared:
                better, used_share, shared = prompt, share, shared_units
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
        slot, cached_units = pool.take_slot(
            contents[: request.prompt_tokens // pool.unit_tokens], request.prompt_tokens
        )
        self._taken[request] = slot
        return self._run(Running(request, contents, [], computed=cached_units * pool.unit_tokens, blocks=0))

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


class VllmModel(Scheduler[RequestT, RunningList[RequestT]], Generic[RequestT]):
    """The scheduler of one replica; the parameters are those of `EngineModel`.

    Example
    -------
    >>> from gorgo.lab.sim.engine.request import EngineRequest
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> model: VllmModel[EngineRequest] = VllmModel(find_profile("1xH100-Llama-3.1-8B-vLLM"))
    >>> for key in (b"word" * 5000, b"else" * 5000):
    ...     model.submit(EngineRequest(key, prompt_tokens=5000, output_tokens=2), now=0.0)
    >>> step = model.start_step(now=0.0)
    >>> step.chunks, len(model.finish_step(step))
    ((5000, 3192), 1)
    >>> model.start_step(now=step.ends_s).chunks  # the first decodes beside the rest of the second
    (0, 1808)
    """

    def __init__(self, profile: EngineProfile, *, item_bytes: int = 4, item_tokens: int = 1) -> None:
        assert profile.chunk_tokens >= profile.max_running_requests, "each running request may decode in each step"
        self.cache: BlockPool
        batch: RunningList[RequestT]
        if profile.slot_cache:
            self.cache = pool = SlotPool(
                capacity_tokens=profile.kv_tokens,
                block_tokens=profile.block_tokens,
                item_bytes=item_bytes,
                item_tokens=item_tokens,
                caching=profile.prefix_cache,
                slots=profile.max_running_requests,
            )
            batch = SlotList(pool)
            limits = replace(profile, kv_tokens=max(profile.kv_tokens, profile.context_tokens))
        else:
            self.cache = BlockPool(
                capacity_tokens=profile.kv_tokens,
                block_tokens=profile.block_tokens,
                item_bytes=item_bytes,
                item_tokens=item_tokens,
                hit_share=profile.hit_share,
                checkpoint_tokens=profile.checkpoint_tokens,
                caching=profile.prefix_cache,
            )
            batch = RunningList(self.cache)
            limits = replace(profile, kv_tokens=self.cache.capacity_tokens)
        super().__init__(profile, batch, limits=limits)

    @property
    def used_tokens(self) -> int:
        """Pool tokens in blocks that running requests hold."""
        return self.cache.capacity_tokens - self.cache.free_tokens - self.cache.evictable_tokens

    def flush(self) -> bool:
        """Forget every cached prefix. Refused (False) while requests wait or run."""
        if self._waiting or self.batch:
            return False
        self.cache.flush()
        return True

    def start_step(self, *, now: float, ahead: bool = False) -> Step[RequestT] | None:
        """Begin the next step, or None if there is nothing to do at `now`; `ahead` as in `EngineModel`."""
        assert self._stepping is None, "one step at a time"
        scheduled, preempted = self._schedule_running()
        if not preempted:
            self._admit(scheduled, now)
        if not scheduled:
            assert not preempted, "a request that is alone has all blocks"
            return None
        step = self._form(scheduled, tuple(preempted), now, ahead)
        self._stepping = step
        self.totals.steps += step.iterations
        self.totals.busy_s += step.ends_s - step.started_s
        return step

    def split_run(self, *, now: float) -> tuple[int, Step[RequestT] | None]:
        """Leave a run of decode iterations at `now`, as `EngineModel.split_run` does."""
        run = self._stepping
        if run is None or run.iterations == 1:
            return 0, None
        ended = run.iteration_at(now) - 1
        left = Step(run.ended_s(ended), run.ended_s(ended + 1), run.requests, ())
        self._advance(run.requests, ended)
        for request in run.requests:
            request.emitted += ended
        self._stepping = left
        self.totals.generated_tokens += ended * len(run.requests)
        self.totals.steps -= run.iterations - ended - 1
        self.totals.busy_s -= run.ends_s - left.ends_s
        return ended, left

    def finish_step(self, step: Step[RequestT]) -> list[RequestT]:
        """End the step at `step.ends_s`: the requests that got a token from each of its iterations."""
        assert step is self._stepping, "the step that was started"
        self._stepping = None
        self._advance(step.requests, step.iterations - 1)
        emitting = [request for request in step.requests if self._emit(request, step)]
        self.totals.generated_tokens += len(emitting) * step.iterations
        return emitting

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self.cache.check()
        self.batch.check()
        assert len(self.batch) <= self.profile.max_running_requests

    # -- helpers

    def _release(self, request: RequestT) -> None:
        self.batch.leave(request)

    def _schedule_running(self) -> tuple[list[tuple[Running[RequestT], int]], list[RequestT]]:
        """Give each running request its tokens, and preempt from the end where blocks are missing."""
        budget, entries = self.profile.chunk_tokens, self.batch.entries
        scheduled: list[tuple[Running[RequestT], int]] = []
        preempted: list[RequestT] = []
        while len(scheduled) < len(entries) and budget > 0:
            entry = entries[len(scheduled)]
            tokens = min(entry.missing, budget)
            while not self.batch.schedule(entry, tokens):
                preempted.append(self._preempt())
                if len(scheduled) == len(entries):
                    return scheduled, preempted  # It was preempted itself.
            scheduled.append((entry, tokens))
            budget -= tokens
        return scheduled, preempted

    def _preempt(self) -> RequestT:
        request = self.batch.entries[-1].request
        self.batch.leave(request)
        request.stage = WAITING
        self._waiting.appendleft(request)
        self.totals.preemptions += 1
        return request

    def _admit(self, scheduled: list[tuple[Running[RequestT], int]], now: float) -> None:
        """Let those in line run, in order, while budget, places and blocks last."""
        budget = self.profile.chunk_tokens - sum(tokens for _, tokens in scheduled)
        while budget > 0 and self._waiting and self._waiting[0].submitted_s <= now:
            request = self._waiting[0]
            if len(self.batch) >= self.profile.max_running_requests:
                return
            entry = self.batch.admit(request)
            if entry is None:
                return
            self._waiting.popleft()
            if request.admitted_s is None:
                request.admitted_s = now
                request.cached_tokens = entry.computed
                self.totals.prompt_tokens += request.prompt_tokens
                self.totals.cached_tokens += entry.computed
            tokens = min(entry.missing, budget)
            taken = self.batch.schedule(entry, tokens)
            assert taken, "what is admitted has blocks for all its tokens"
            scheduled.append((entry, tokens))
            budget -= tokens

    def _form(
        self, scheduled: list[tuple[Running[RequestT], int]], preempted: tuple[RequestT, ...], now: float, ahead: bool
    ) -> Step[RequestT]:
        """Return the step: its duration, and for decoding alone how many iterations it may have."""
        requests = tuple(entry.request for entry, _ in scheduled)
        new_tokens, attended, context = 0, 0.0, 0
        chunks = []
        for entry, tokens in scheduled:
            decodes = entry.request.stage is DECODING
            chunks.append(0 if decodes else tokens)
            if decodes:
                context += entry.total
            else:
                new_tokens += tokens
                attended += tokens * (entry.computed - tokens / 2)
        size = len(chunks) - sum(map(bool, chunks))
        if new_tokens:
            duration_s = self.profile.mixed_s(new_tokens, attended, size, context) * self.slowdown
            self.totals.prefill_tokens += new_tokens
            self.totals.prefill_busy_s += duration_s
            return Step(now, now + duration_s, requests, tuple(chunks), preempted=preempted)
        first_s = self.profile.decode_s(size, context) * self.slowdown
        growth_s = self.profile.decode_kv_s * size * self.slowdown
        iterations = self._iterations() if ahead and not preempted else 1
        ends_s = now + (first_s if iterations == 1 else run_duration_s(first_s, growth_s, iterations))
        return Step(now, ends_s, requests, (), iterations, first_s, growth_s, preempted)

    def _iterations(self) -> int:
        """Decode iterations up to the first that ends a request, or after which blocks are missing.

        A queued request is not admitted before: it needs as many blocks, or fewer by those that a running one took.
        """
        left = min([entry.request.output_tokens - entry.request.emitted for entry in self.batch.entries])
        if self._waiting and any(entry.request.output_key for entry in self.batch.entries):
            return 1  # An answer may complete a block that the first in line finds.
        return self.batch.iterations_that_fit(left)

    def _advance(self, requests: Sequence[RequestT], iterations: int) -> None:
        if iterations:
            for request in requests:
                entry = self.batch.entry_of(request)
                assert entry is not None, "nothing leaves during a run"
                taken = self.batch.schedule(entry, iterations)
                assert taken, "a run is as long as its blocks last"

    def _emit(self, request: RequestT, step: Step[RequestT]) -> bool:
        """Give a request its token, unless its prompt is unfinished or it was aborted meanwhile."""
        entry = self.batch.entry_of(request)
        if entry is None or entry.computed < entry.total + step.iterations - 1:
            return False
        request.emitted += step.iterations
        if request.first_token_s is None:
            request.first_token_s = step.ends_s
        request.stage = DECODING
        if request.finished:
            self.batch.leave(request)
            request.stage = FINISHED
        return True
