r"""One SGLang-like replica as a sans-IO step model: requests in with `now`, one token per request and step out.

Owns the scheduler (the queue, admission, and the contents of each step) and the running requests with their share of
the pool (`Batch`). Leaves the pool to `kv_cache`, the costs of steps to `profiles`, and the records of requests and
steps to `gorgo.lab.sim.engine.request`. Time is an argument and nothing is random: the same requests at the same times
always give the same steps, in wall time behind HTTP and in virtual time on an event heap.

Theory of operation. The caller owns the clock and drives one loop:

    model.submit(request, now=now)          whenever a request arrives
    step = model.start_step(now=now)        when idle: at an arrival; when busy: at the end of the step before
    ... time passes until step.ends_s ...
    for request in model.finish_step(step): it has one token more; `request.finished` says whether that was the last

A step is a prefill batch alone whenever one can be formed (what decodes stalls meanwhile), else one decode iteration,
or, for a caller in virtual time who asks for it, all up to the next at which something changes:

    waiting --admission, FCFS--> prefilling --last chunk: first token--> decoding --last token--> finished
        \__________________________________\____ abort ____________________\--> gone, everything freed

- Admission: fewer than `max_running_requests` run, and uncached prompt plus all its output fits beside what is promised
  to those that run. The first in line that does not fit holds back those behind it.
- A prefill step computes at most `chunk_tokens`, shared by several requests in order; only its last one is cut.
- At least one prompt token is always computed. Prompt KV can be hit by others only after the whole prefill, generated
  tokens only when the request has ended (the last one, which no step has read, never), and only with `caches_output`.
- A request that arrives while a step runs is considered at its end. One whose time of arrival is later than the start
  of a step is not in that step, even if the caller is late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence, Sized
from typing import Generic, TypeVar

from gorgo.lab.sim.engine.kv_cache import KvCache, Match
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import (
    ABORTED,
    DECODING,
    FINISHED,
    NEW,
    PREFILLING,
    WAITING,
    EngineRequest,
    RequestT,
    Step,
    Totals,
    run_duration_s,
)

# What the models of all engines share: the queue, the step under way, the counters, and how a request comes and goes.
#
# Owns arrival and abort, and the views of observers. `EngineModel` and `VllmModel` decide admission and the contents of
# steps.


#: The running requests of one kind of engine.
BatchT = TypeVar("BatchT", bound=Sized)


class Scheduler(ABC, Generic[RequestT, BatchT]):
    """One engine without its rules of admission.

    Parameters
    ----------
    profile:
        Costs and limits.
    batch:
        The running requests.
    limits:
        Bounds the size of a request; `profile` if None.
    """

    def __init__(self, profile: EngineProfile, batch: BatchT, *, limits: EngineProfile | None = None) -> None:
        self.profile = profile
        #: The running requests; observers only read them.
        self.batch = batch
        self.totals = Totals()
        #: Every step takes this many times as long: a fault to inject.
        self.slowdown = 1.0
        self._limits = limits or profile
        self._waiting: deque[RequestT] = deque()
        self._stepping: Step[RequestT] | None = None

    @property
    def running(self) -> int:
        return len(self.batch)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[RequestT]:
        """Return the queued requests in order; read-only."""
        return self._waiting

    @property
    def step(self) -> Step[RequestT] | None:
        """The step under way."""
        return self._stepping

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens of queued requests, cached ones included."""
        return sum(request.prompt_tokens for request in self._waiting)

    @property
    def next_arrival_s(self) -> float | None:
        """When the first in line arrived: an idle engine starts then, even if its caller is late."""
        return self._waiting[0].submitted_s if self._waiting else None

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.batch or self._stepping)

    def submit(self, request: RequestT, *, now: float) -> None:
        """Queue a request; raises `BadRequest` if it can never run."""
        assert request.stage is NEW, "a request is submitted once"
        self._limits.check_size(request.prompt_tokens, request.output_tokens)
        request.stage = WAITING
        request.submitted_s = now
        self._waiting.append(request)
        self.totals.requests += 1

    def abort(self, request: RequestT) -> bool:
        """Drop a request in any stage and free all that it holds. False if it had already ended."""
        if request.stage in (NEW, FINISHED, ABORTED):
            return False
        assert self._stepping is None or self._stepping.iterations == 1, "a run is interrupted first"
        if request.stage is WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        request.stage = ABORTED
        self.totals.aborted += 1
        return True

    @abstractmethod
    def _release(self, request: RequestT) -> None:
        """Remove a running request and free all that it holds."""


# The transitions of a running request from admission to its end, and their accounting. It has locked its cached prefix,
# and it has private tokens and a reservation for the rest. What goes into the tree is no longer the request's own, and
# its lock moves to the end of it. An end of any kind gives back the lock, its own tokens and what was promised to it.


class Batch(Generic[RequestT]):
    """The running requests of one engine.

    Parameters
    ----------
    cache:
        The engine's pool.
    caching:
        Whether prompts are put into the tree for later requests.
    """

    __slots__ = ("_cache", "_caching", "context_tokens", "decoding", "prefilling")

    def __init__(self, cache: KvCache, *, caching: bool = True) -> None:
        self._cache = cache
        self._caching = caching
        #: Requests in prefill, in order of admission.
        self.prefilling: list[RequestT] = []
        #: Those that have their first token. Insertion order is admission order, so that steps do not depend on hashes.
        self.decoding: dict[RequestT, None] = {}
        #: Context tokens of all decoding requests.
        self.context_tokens = 0

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def admit(self, request: RequestT, match: Match, *, cached_tokens: int, needed_tokens: int) -> None:
        """Admit a request: `match` is its cached prefix; the rest of the prompt and the output are reserved."""
        request.handle = self._cache.lock(match)
        self._cache.reserve(needed_tokens)
        request.reserved_tokens = needed_tokens
        request.cached_tokens = request.prefilled_tokens = cached_tokens
        request.stage = PREFILLING
        self.prefilling.append(request)

    def allocate(self, request: RequestT, tokens: int) -> None:
        """Take room for so much more of its prompt."""
        self._cache.allocate(tokens)
        request.private_tokens += tokens
        request.reserved_tokens -= tokens

    def advance(self, requests: Sequence[RequestT], iterations: int) -> None:
        """Take room for one token each per decode iteration."""
        if not iterations:
            return
        self._cache.allocate(iterations * len(requests))
        for request in requests:
            request.private_tokens += iterations
            request.reserved_tokens -= iterations
        self.context_tokens += iterations * len(requests)

    def begin_decoding(self, request: RequestT) -> None:
        """The prompt is in the pool: cache it, emit the first token, go on decoding if there is more to come."""
        self.prefilling.remove(request)
        self._cache_prefix(request, request.key, request.prompt_tokens)
        request.stage = DECODING
        request.emitted = 1
        self.decoding[request] = None
        self.context_tokens += request.prompt_tokens
        if request.finished:
            self.finish(request)

    def finish(self, request: RequestT) -> None:
        """It has its last token."""
        if request.output_key:
            self._cache_prefix(request, request.key + request.output_key, _context(request))
        self.leave(request)
        request.stage = FINISHED

    def leave(self, request: RequestT) -> None:
        """Free everything that a running request holds."""
        if request.stage is PREFILLING:
            self.prefilling.remove(request)
        else:
            del self.decoding[request]
            self.context_tokens -= _context(request)
        assert request.handle is not None, "a running request holds a path"
        self._cache.unlock(request.handle)
        self._cache.release(private=request.private_tokens, promised=request.reserved_tokens)
        request.handle = None
        request.private_tokens = request.reserved_tokens = 0

    def check(self) -> None:
        """Assert that the accounts of the pool and of the running requests agree."""
        cache, running = self._cache, [*self.prefilling, *self.decoding]
        assert cache.private_tokens == sum(request.private_tokens for request in running)
        assert cache.reserved_tokens == sum(request.reserved_tokens for request in running)
        assert self.context_tokens == sum(_context(request) for request in self.decoding)
        for request in running:
            node = request.handle
            assert node is not None
            while node.parent is not None:
                assert node.locks > 0, "what a running request holds is locked"
                assert node.parent.children[node.edge[: cache.item_bytes]] is node, "and is in the tree"
                node = node.parent

    def _cache_prefix(self, request: RequestT, key: bytes, tokens: int) -> None:
        """Put the whole items of the first `tokens` of `key` into the tree."""
        cache = self._cache
        assert request.handle is not None, "a running request holds a path"
        items = min(len(key) // cache.item_bytes, tokens // cache.item_tokens) if self._caching else 0
        in_tree = request.handle.end
        if items > in_tree:
            request.handle, _ = cache.insert(key[: items * cache.item_bytes], request.handle)
            request.private_tokens -= (items - in_tree) * cache.item_tokens


def _context(request: EngineRequest) -> int:
    """Return the tokens of a decoding request with KV after this step: each reduces the reservation by one."""
    return request.prompt_tokens + request.output_tokens - request.reserved_tokens


class EngineModel(Scheduler[RequestT, Batch[RequestT]], Generic[RequestT]):
    """The scheduler of one replica.

    Generic in the class of its requests: `finish_step` returns the submitted objects.

    Parameters
    ----------
    profile:
        Costs and limits.
    item_bytes, item_tokens:
        Size of one item of a key: one token of four bytes, or a block of a trace.

    Example
    -------
    >>> from gorgo.lab.sim.engine.request import EngineRequest
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> model: EngineModel[EngineRequest] = EngineModel(find_profile("1xH100-Llama-3.1-8B"))
    >>> request = EngineRequest(b"word" * 1000, prompt_tokens=1000, output_tokens=2)
    >>> model.submit(request, now=0.0)
    >>> step = model.start_step(now=0.0)
    >>> round(step.ends_s, 4), [r.emitted for r in model.finish_step(step)]
    (0.023, [1])
    >>> step = model.start_step(now=step.ends_s)
    >>> [r.finished for r in model.finish_step(step)]
    [True]
    """

    def __init__(self, profile: EngineProfile, *, item_bytes: int = 4, item_tokens: int = 1) -> None:
        self.cache = KvCache(
            capacity_tokens=profile.kv_tokens,
            item_bytes=item_bytes,
            item_tokens=item_tokens,
            hit_share=profile.hit_share,
            checkpoint_tokens=profile.checkpoint_tokens,
            block_tokens=profile.block_tokens,
        )
        super().__init__(profile, Batch(self.cache, caching=profile.prefix_cache))

    @property
    def used_tokens(self) -> int:
        """Pool tokens that running requests hold: locked prefixes and their own."""
        return self.cache.locked_tokens + self.cache.private_tokens

    def submit(self, request: RequestT, *, now: float) -> None:
        super().submit(request, now=now)
        request.output_key = request.output_key if self.profile.caches_output else b""

    def flush(self) -> bool:
        """Forget every cached prefix. Refused (False) while requests wait or run, as the real engine does.

        A step that has lost all its requests to aborts may still be under way: it holds nothing.
        """
        if self._waiting or self.batch:
            return False
        self.cache.flush()
        return True

    def start_step(self, *, now: float, ahead: bool = False) -> Step[RequestT] | None:
        """Begin the next step, or None if there is nothing to do at `now`.

        With `ahead` it may be a run of decode iterations, up to the first that finishes a request. Its caller calls
        `split_run` before anything else happens to the engine; see there.
        """
        assert self._stepping is None, "one step at a time"
        chunks = self._form_prefill(now) if self._waiting or self.batch.prefilling else None
        if chunks:
            step = self._prefill_step(chunks, now)
        elif self.batch.decoding:
            step = self._decode_step(now, self._until_finish() if ahead else 1)
        else:
            return None
        self._stepping = step
        self.totals.steps += step.iterations
        self.totals.busy_s += step.ends_s - step.started_s
        return step

    def split_run(self, *, now: float) -> tuple[int, Step[RequestT] | None]:
        """Leave a run of decode iterations at `now`: those before the one under way are over.

        Returns the number of completed iterations and the step of the current one; (0, None) without a run. Called
        before anything that can change or observe the next steps: a request that could be admitted, an abort, another
        `slowdown`, an observer.
        """
        run = self._stepping
        if run is None or run.iterations == 1:
            return 0, None
        ended = run.iteration_at(now) - 1
        left = Step(run.ended_s(ended), run.ended_s(ended + 1), run.requests, ())
        self.batch.advance(run.requests, ended)
        for request in run.requests:
            request.emitted += ended
        self._stepping = left
        self.totals.generated_tokens += ended * len(run.requests)
        self.totals.steps -= run.iterations - ended - 1
        self.totals.busy_s -= run.ends_s - left.ends_s
        return ended, left

    def finish_step(self, step: Step[RequestT]) -> list[RequestT]:
        """End the step at `step.ends_s`: the requests that got a token from each of its iterations.

        Those aborted meanwhile are left out.
        """
        assert step is self._stepping, "the step that was started"
        self._stepping = None
        emitting = self._finish_prefill(step) if step.chunks else self._finish_decode(step)
        self.totals.generated_tokens += len(emitting) * step.iterations
        return emitting

    def check(self) -> None:
        """Assert every invariant; for tests."""
        self.cache.check()
        assert len(self.batch) <= self.profile.max_running_requests
        self.batch.check()

    # -- helpers

    def _release(self, request: RequestT) -> None:
        self.batch.leave(request)

    def _form_prefill(self, now: float) -> list[tuple[RequestT, int]]:
        """Share one chunk among those in prefill and then those in line, in order."""
        budget = self.profile.chunk_tokens
        chunks = []
        prefilling = self.batch.prefilling
        for request in prefilling:
            tokens = min(budget, request.prompt_tokens - request.prefilled_tokens)
            chunks.append((request, tokens))
            budget -= tokens
        while budget > 0 and self._waiting and self._waiting[0].submitted_s <= now and self._admit(now):
            request = prefilling[-1]
            tokens = min(budget, request.prompt_tokens - request.prefilled_tokens)
            chunks.append((request, tokens))
            budget -= tokens
        return chunks

    def _admit(self, now: float) -> bool:
        """Let the first in line run if there is room for all that it can need."""
        if len(self.batch) >= self.profile.max_running_requests:
            return False
        request = self._waiting[0]
        match = self.cache.find(request.key, at_most=(request.prompt_tokens - 1) // self.cache.item_tokens)
        cached = match.items * self.cache.item_tokens
        needed = request.prompt_tokens - cached + request.output_tokens
        if needed > self.cache.available_tokens - match.evictable_tokens:
            return False
        self._waiting.popleft()
        request.admitted_s = now
        self.batch.admit(request, match, cached_tokens=cached, needed_tokens=needed)
        self.totals.prompt_tokens += request.prompt_tokens
        self.totals.cached_tokens += cached
        return True

    def _prefill_step(self, chunks: list[tuple[RequestT, int]], now: float) -> Step[RequestT]:
        new_tokens = 0
        attended = 0.0
        for request, tokens in chunks:
            self.batch.allocate(request, tokens)
            new_tokens += tokens
            attended += tokens * (request.prefilled_tokens + tokens / 2)
        duration_s = self.profile.prefill_s(new_tokens, attended) * self.slowdown
        self.totals.prefill_tokens += new_tokens
        self.totals.prefill_busy_s += duration_s
        requests, sizes = zip(*chunks, strict=True)
        return Step(now, now + duration_s, requests, sizes)

    def _until_finish(self) -> int:
        """Decode iterations up to the first that finishes a request.

        Until then no queued request becomes admissible: it needs as many tokens more as it loses of its cached prefix,
        and running requests have as many private and reserved tokens together as before.
        """
        return min([request.output_tokens - request.emitted for request in self.batch.decoding])

    def _decode_step(self, now: float, iterations: int) -> Step[RequestT]:
        batch = tuple(self.batch.decoding)
        self.batch.advance(batch, 1)
        profile, size = self.profile, len(batch)
        first_s = profile.decode_s(size, self.batch.context_tokens) * self.slowdown
        growth_s = profile.decode_kv_s * size * self.slowdown
        ends_s = now + (first_s if iterations == 1 else run_duration_s(first_s, growth_s, iterations))
        return Step(now, ends_s, batch, (), iterations, first_s, growth_s)

    def _finish_prefill(self, step: Step[RequestT]) -> list[RequestT]:
        emitting = []
        for request, tokens in zip(step.requests, step.chunks, strict=True):
            if request.stage is not PREFILLING:
                continue
            request.prefilled_tokens += tokens
            if request.prefilled_tokens == request.prompt_tokens:
                request.first_token_s = step.ends_s
                self.batch.begin_decoding(request)
                emitting.append(request)
        return emitting

    def _finish_decode(self, step: Step[RequestT]) -> list[RequestT]:
        emitting = []
        self.batch.advance(step.requests, step.iterations - 1)
        for request in step.requests:
            if request.stage is DECODING:
                request.emitted += step.iterations
                emitting.append(request)
                if request.emitted == request.output_tokens:
                    self.batch.finish(request)
        return emitting
