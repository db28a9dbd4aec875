"""One vLLM-like replica as a sans-IO step model, with the interface of SGLang's `EngineModel`.

Owns the scheduler: the queue, the running list and the contents of each step. `block_pool` has the blocks, `profiles`
the costs. As there, time is an argument and the same requests at the same times always give the same steps.

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

from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

from gorgo.sim.engine.profiles import EngineProfile
from gorgo.sim.engine.request import DECODING, FINISHED, WAITING
from gorgo.sim.engine.scheduler import Scheduler
from gorgo.sim.engine.steps import RequestT, Step, run_duration_s
from gorgo.sim.engine.vllm.block_pool import BlockPool
from gorgo.sim.engine.vllm.running_list import Running, RunningList
from gorgo.sim.engine.vllm.slots import SlotList, SlotPool


class VllmModel(Scheduler[RequestT, RunningList[RequestT]], Generic[RequestT]):
    """The scheduler of one replica; the parameters are those of `EngineModel`.

    Example
    -------
    >>> from gorgo.sim.engine.request import EngineRequest
    >>> from gorgo.sim.engine.profiles import find_profile
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
