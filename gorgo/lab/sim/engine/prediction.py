"""Prediction of an engine: when an arriving request gets its first token if no later one arrives.

Owns the look-ahead of the oracle, and `PrefixSet`, the prefixes that queued requests will add to a cache. It reads the
engine model and changes nothing in it.

Theory of operation. The engine is deterministic, so its next steps are played on a light copy: requests in line with
their lengths, the decoding ones as a heap of the iteration at which each ends, and the prefixes that have been put into
the cache since now in a tree beside the engine's own. Steps, chunks, admission in order and the instant at which a
prefix becomes hittable are the engine's, so that the answer is exact (the same sums in the same order) while nothing
has to be evicted and the KV pool is not the limit.

Approximated, and only where the pool is nearly full: a cached prefix is not evicted meanwhile, and a request that ends
gives back what it was charged at admission (its uncached prompt and its output), not the shared part that it locks. A
newcomer's output is unknown to whoever routes it and counts as one token. An engine keeps the speed of now: that a
fault will begin or end is the future, which nobody sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Any, NamedTuple

from gorgo.core.prefix.residency import RadixNode, RadixTree
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import DECODING, EngineRequest, Step, run_duration_s
from gorgo.lab.sim.engine.vllm import Running, VllmModel

# Prefixes without eviction. `lower_bound` uses the same set for the trace so far.


class PrefixSet:
    """A radix tree of keys; bounded by what its caller puts in (a trace, or one engine's line).

    Example
    -------
    >>> seen = PrefixSet(item_bytes=1)
    >>> seen.add(b"abcd")
    >>> seen.items(b"abce"), seen.items(b"x")
    (3, 0)
    """

    def __init__(self, *, item_bytes: int) -> None:
        self._tree: RadixTree[RadixNode] = RadixTree(RadixNode, item_bytes=item_bytes)

    def items(self, key: bytes) -> int:
        """Leading items of `key` that were seen as a prefix before."""
        return self._tree.match_path(key)[1]

    def add(self, key: bytes) -> None:
        """See `key`, a whole number of items, with all its prefixes."""
        tree = self._tree
        path, items = tree.match_path(key)
        if len(key) == items * tree.item_bytes:
            return
        node = path[-1] if path else tree.root
        if items < node.end:
            node = tree.split(node, items)
        tree.append(node, key[items * tree.item_bytes :])


class ArrivingRequest(NamedTuple):
    """A request that might be sent: its prompt as the engine's cache items, its length, and when it would arrive."""

    key: bytes
    prompt_tokens: int
    arrives_s: float


class PredictedFirstToken(NamedTuple):
    """Time of the first token of the arrival, and the cached tokens of its prompt at admission."""

    first_token_s: float
    cached_tokens: int


def predict(
    model: EngineModel[Any], in_transit: Sequence[tuple[float, EngineRequest]], arrival: ArrivingRequest, *, now: float
) -> PredictedFirstToken:
    """Play the engine forward from `now` to the first token of `arrival`, without later arrivals.

    `in_transit` are requests sent and not yet there, with their times of arrival; all times in seconds of one clock.

    Example
    -------
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> idle: EngineModel[EngineRequest] = EngineModel(find_profile("1xH100-Llama-3.1-8B"))
    >>> foreseen = predict(idle, [], ArrivingRequest(b"word" * 1000, 1000, arrives_s=0.5), now=0.0)
    >>> round(foreseen.first_token_s, 4), foreseen.cached_tokens
    (0.523, 0)
    """
    if model.step is None and not in_transit:
        return _alone(model, arrival, now)
    return _Projection(model, in_transit, arrival, now).run()


def _alone(model: EngineModel[Any], arrival: ArrivingRequest, now: float) -> PredictedFirstToken:
    """Return the same for an idle engine, by the same sums: most engines of a large fleet are idle."""
    cache, profile = model.cache, model.profile
    match = cache.find(arrival.key[: (arrival.prompt_tokens - 1) // cache.item_tokens * cache.item_bytes])
    cached = prefilled = match.items * cache.item_tokens
    t = max(now, arrival.arrives_s)
    while prefilled < arrival.prompt_tokens:
        tokens = min(profile.chunk_tokens, arrival.prompt_tokens - prefilled)
        t += profile.prefill_s(tokens, tokens * (prefilled + tokens / 2)) * model.slowdown
        prefilled += tokens
    return PredictedFirstToken(t, cached)


def idle_ttft_s(profile: EngineProfile, new_tokens: int, cached_tokens: int) -> float:
    """Prefill of `new_tokens` behind `cached_tokens` on an idle engine, in as many chunks as it takes."""
    chunks = ceil(new_tokens / profile.chunk_tokens)
    attended = new_tokens * (cached_tokens + new_tokens / 2)
    return profile.prefill_s(new_tokens, attended) + (chunks - 1) * profile.prefill_base_s


@dataclass(slots=True, eq=False)
class _PlannedRequest:
    """A request as the projection moves it on."""

    key: bytes
    output_key: bytes
    prompt_tokens: int
    output_tokens: int
    prefilled: int = 0
    cached: int = 0

    @property
    def charged(self) -> int:
        """Pool tokens set aside for it."""
        return self.prompt_tokens - self.cached + self.output_tokens


class _Projection:
    """A light copy of the engine, run once."""

    def __init__(
        self,
        model: EngineModel[Any],
        in_transit: Sequence[tuple[float, EngineRequest]],
        arrival: ArrivingRequest,
        now: float,
    ) -> None:
        self._profile, self._slowdown = model.profile, model.slowdown
        self._cache = model.cache
        self._prefixes = PrefixSet(item_bytes=self._cache.item_bytes)
        self._arrival = _PlannedRequest(arrival.key, b"", arrival.prompt_tokens, 1)
        self._done = False
        self._t = now
        self._waiting = deque(map(_entry, model.waiting))
        self._coming = _in_order(in_transit, self._arrival, arrival.arrives_s)
        self._available = self._cache.available_tokens
        # Decoding: (iteration at which it ends, tie-break, request), counted from the end of the step under way.
        self._ends: list[tuple[int, int, _PlannedRequest]] = []
        self._iteration = self._pushes = 0
        self._context_tokens = model.batch.context_tokens
        self._prefilling: list[_PlannedRequest] = []
        step: Step[Any] | None = model.step
        self._end_step(model, step)

    def run(self) -> PredictedFirstToken:
        while not self._done:
            chunks = self._form()
            if chunks:
                self._prefill(chunks)
                self._arrive()
            elif self._ends:
                self._decode()
                self._arrive()
            else:
                # An idle engine starts with the first arrival.
                arrives_s, entry = self._coming.popleft()
                self._t = max(self._t, arrives_s)
                self._waiting.append(entry)
        return PredictedFirstToken(self._t, self._arrival.cached)

    # -- the state at the end of the step under way

    def _end_step(self, model: EngineModel[Any], step: Step[Any] | None) -> None:
        """Of a run of decode iterations, the one that is under way now."""
        if step is None:
            assert model.idle, "an engine with work is in a step"
            return
        ended = step.iteration_at(self._t) - 1 if step.iterations > 1 else 0
        self._t = step.ended_s(ended + 1) if step.iterations > 1 else step.ends_s
        self._context_tokens += ended * len(step.requests)
        computed = dict(zip(step.requests, step.chunks, strict=True)) if step.chunks else {}
        decoded = 0 if step.chunks else ended + 1
        for request in model.batch.decoding:
            self._pushes += 1
            left = request.output_tokens - request.emitted - decoded
            self._ends.append((left, self._pushes, _entry(request)))
        heapify(self._ends)
        self._leave()
        for request in model.batch.prefilling:
            entry = _entry(request)
            entry.prefilled = request.prefilled_tokens + computed.get(request, 0)
            self._prefilling.append(entry)
        for entry in [each for each in self._prefilling if each.prefilled == each.prompt_tokens]:
            self._first_token(entry)
        self._arrive()

    # -- one step

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self._t:
            self._waiting.append(self._coming.popleft()[1])

    def _form(self) -> list[tuple[_PlannedRequest, int]]:
        """As the engine shares one chunk: those in prefill first, then those in line, in order."""
        budget = self._profile.chunk_tokens
        chunks = []
        for entry in self._prefilling:
            tokens = min(budget, entry.prompt_tokens - entry.prefilled)
            chunks.append((entry, tokens))
            budget -= tokens
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            entry = self._waiting.popleft()
            self._prefilling.append(entry)
            tokens = min(budget, entry.prompt_tokens - entry.prefilled)
            chunks.append((entry, tokens))
            budget -= tokens
        return chunks

    def _admit(self, entry: _PlannedRequest) -> bool:
        running = len(self._prefilling) + len(self._ends)
        if running >= self._profile.max_running_requests:
            return False
        cache = self._cache
        key = entry.key[: (entry.prompt_tokens - 1) // cache.item_tokens * cache.item_bytes]
        match = cache.find(key)
        entry.cached = max(match.items, cache.found_items(self._prefixes.items(key))) * cache.item_tokens
        # An empty engine admits anything: too large requests were rejected before.
        if running and entry.charged > self._available - match.evictable_tokens:
            return False
        self._available -= entry.charged + match.evictable_tokens
        entry.prefilled = entry.cached
        return True

    def _prefill(self, chunks: list[tuple[_PlannedRequest, int]]) -> None:
        new_tokens, attended = 0, 0.0
        for entry, tokens in chunks:
            new_tokens += tokens
            attended += tokens * (entry.prefilled + tokens / 2)
        self._t += self._profile.prefill_s(new_tokens, attended) * self._slowdown
        for entry, tokens in chunks:
            entry.prefilled += tokens
            if entry.prefilled == entry.prompt_tokens:
                self._first_token(entry)

    def _first_token(self, entry: _PlannedRequest) -> None:
        """Its prompt can be hit from now on, and it decodes."""
        self._prefilling.remove(entry)
        self._see(entry.key, entry.prompt_tokens)
        self._done = self._done or entry is self._arrival
        self._context_tokens += entry.prompt_tokens
        self._pushes += 1
        heappush(self._ends, (self._iteration + entry.output_tokens - 1, self._pushes, entry))
        self._leave()

    def _decode(self) -> None:
        """Return the iterations until an arrival, or until an end that may admit the next queued request."""
        batch, iterations = len(self._ends), self._ends[0][0] - self._iteration
        first_s = self._profile.decode_s(batch, self._context_tokens + batch) * self._slowdown
        growth_s = self._profile.decode_kv_s * batch * self._slowdown
        run: Step[Any] = Step(
            self._t, self._t + run_duration_s(first_s, growth_s, iterations), (), (), iterations, first_s, growth_s
        )
        if self._coming and self._coming[0][0] < run.ends_s:
            iterations = run.iteration_at(self._coming[0][0])
        self._t = run.ended_s(iterations)
        self._iteration += iterations
        self._context_tokens += iterations * batch
        self._leave()

    def _leave(self) -> None:
        """Those that have all their tokens go."""
        while self._ends and self._ends[0][0] <= self._iteration:
            entry = heappop(self._ends)[2]
            context_tokens = entry.prompt_tokens + entry.output_tokens - 1
            self._context_tokens -= context_tokens
            self._available += entry.charged
            if entry.output_key and self._profile.caches_output:
                self._see(entry.key + entry.output_key, context_tokens)

    def _see(self, key: bytes, tokens: int) -> None:
        """Add the whole items of the first `tokens` of `key` to the cache that queued requests will match."""
        if self._waiting or self._coming:
            items = min(len(key) // self._cache.item_bytes, tokens // self._cache.item_tokens)
            self._prefixes.add(key[: items * self._cache.item_bytes])


def _entry(request: EngineRequest) -> _PlannedRequest:
    return _PlannedRequest(
        request.key, request.output_key, request.prompt_tokens, request.output_tokens, cached=request.cached_tokens
    )


def _in_order(
    in_transit: Sequence[tuple[float, EngineRequest]], arrival: _PlannedRequest, arrives_s: float
) -> deque[tuple[float, _PlannedRequest]]:
    """Return all arrivals, the new one behind others of the same time."""
    coming = [(at_s, _entry(request)) for at_s, request in in_transit]
    coming.append((arrives_s, arrival))
    coming.sort(key=lambda one: one[0])
    return deque(coming)


# Prediction of a vLLM-like engine: when an arriving request gets its first token if no later one arrives.
#
# Owns the look-ahead of the oracle for this scheduler. It reads the engine model and changes nothing in it.
#
# Theory of operation. As in the prediction of an SGLang-like engine, the next steps are played on a light copy: the
# running requests in order, those in line, and the contents that become full from now on. Steps, chunks and admission
# are the engine's, so that the answer is exact while nothing has to be evicted. Approximated where the pool is nearly
# full: a running request takes no further blocks, none is preempted, and a cached prefix is not evicted meanwhile.


def predict_vllm(
    model: VllmModel[Any], in_transit: Sequence[tuple[float, EngineRequest]], arrival: ArrivingRequest, *, now: float
) -> PredictedFirstToken:
    """Play the engine forward to the first token of `arrival`; the arguments are those of `predict`.

    Example
    -------
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> idle: VllmModel[EngineRequest] = VllmModel(find_profile("1xH100-Llama-3.1-8B-vLLM"))
    >>> foreseen = predict_vllm(idle, [], ArrivingRequest(b"word" * 1000, 1000, arrives_s=0.5), now=0.0)
    >>> round(foreseen.first_token_s, 4), foreseen.cached_tokens
    (0.523, 0)
    """
    return _VllmProjection(model, in_transit, arrival, now).run()


@dataclass(slots=True, eq=False)
class _Planned:
    """A request as the projection moves it on: tokens so far, tokens with KV, tokens to come, charged blocks."""

    contents: tuple[int, ...]
    total: int
    left: int
    computed: int = 0
    cached: int = 0
    blocks: int = 0
    decodes: bool = False


class _VllmProjection:
    """A light copy of the engine, run once."""

    def __init__(
        self,
        model: VllmModel[Any],
        in_transit: Sequence[tuple[float, EngineRequest]],
        arrival: ArrivingRequest,
        now: float,
    ) -> None:
        self._profile, self._slowdown, self._pool = model.profile, model.slowdown, model.cache
        self._t, self._done = now, False
        self._free = self._pool.free_blocks
        #: Contents that become full from now on.
        self._full: set[int] = set()
        self._arrival = _Planned(self._pool.contents(arrival.key), arrival.prompt_tokens, 1)
        self._waiting = deque(map(self._plan, model.waiting))
        coming = [(at_s, self._plan(request)) for at_s, request in in_transit]
        self._coming = deque(sorted([*coming, (arrival.arrives_s, self._arrival)], key=lambda one: one[0]))
        self._running: list[_Planned] = []
        self._end_step(model)

    def run(self) -> PredictedFirstToken:
        while not self._done:
            if not self._running and not self._waiting:
                # An idle engine starts with the first arrival.
                arrives_s, planned = self._coming.popleft()
                self._t = max(self._t, arrives_s)
                self._waiting.append(planned)
            self._step()
            self._arrive()
        return PredictedFirstToken(self._t, self._arrival.cached)

    # -- the state at the end of the step under way

    def _end_step(self, model: VllmModel[Any]) -> None:
        """Of a run of decode iterations, the one that is under way now."""
        step: Step[Any] | None = model.step
        if step is None:
            assert model.idle, "an engine with work is in a step"
            return
        ended = step.iteration_at(self._t) - 1 if step.iterations > 1 else 0
        self._t = step.ended_s(ended + 1) if step.iterations > 1 else step.ends_s
        for entry in model.batch.entries:
            self._running.append(self._continue(entry, ended))
        self._emit()
        self._arrive()

    def _continue(self, entry: Running[Any], ended: int) -> _Planned:
        """Return a running request as it is after so many more iterations of a run."""
        planned = self._plan(entry.request)
        planned.decodes = entry.request.stage is DECODING
        planned.total += ended
        planned.left -= ended
        planned.computed = entry.computed + ended
        shared = sum(unit.holders > 1 for unit in entry.units) * self._pool.unit_blocks
        planned.blocks = self._pool.blocks_of(planned.computed) - shared
        self._see(planned, entry.computed)
        return planned

    def _plan(self, request: EngineRequest) -> _Planned:
        contents = request.contents
        if contents is None:
            contents = self._pool.contents(request.key + request.output_key)
        return _Planned(contents, request.prompt_tokens + request.emitted, request.output_tokens - request.emitted)

    # -- one step

    def _arrive(self) -> None:
        while self._coming and self._coming[0][0] <= self._t:
            self._waiting.append(self._coming.popleft()[1])

    def _step(self) -> None:
        """As the engine shares its budget: the running requests first, then those in line."""
        budget = self._profile.chunk_tokens
        chunks = []
        for planned in self._running:
            chunks.append(self._compute(planned, budget))
            budget -= chunks[-1]
        while budget > 0 and self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.popleft())
            chunks.append(self._compute(self._running[-1], budget))
            budget -= chunks[-1]
        if all(planned.decodes for planned in self._running):
            self._decode()
            return
        new_tokens, attended, batch, context = 0, 0.0, 0, 0
        for planned, tokens in zip(self._running, chunks, strict=True):
            if planned.decodes:
                batch, context = batch + 1, context + planned.total
            else:
                new_tokens += tokens
                attended += tokens * (planned.computed - tokens / 2)
        self._t += self._profile.mixed_s(new_tokens, attended, batch, context) * self._slowdown
        self._emit()

    def _compute(self, planned: _Planned, budget: int) -> int:
        tokens = min(planned.total - planned.computed, budget)
        planned.computed += tokens
        self._see(planned, planned.computed - tokens)
        return tokens

    def _admit(self, planned: _Planned) -> bool:
        if len(self._running) >= self._profile.max_running_requests:
            return False
        pool = self._pool
        contents = planned.contents[: (planned.total - 1) // pool.unit_tokens]
        stored_units = next(
            (n for n, one in enumerate(contents) if not (one in self._full or pool.has(one))), len(contents)
        )
        cached_units = pool.found_units(stored_units)
        needed = (
            pool.blocks_of(planned.total)
            - cached_units * pool.unit_blocks
            + pool.idle_blocks(pool.find(contents[:cached_units]))
        )
        # An empty engine admits anything: too large requests were rejected before.
        if self._running and needed > self._free:
            return False
        self._free -= needed
        planned.blocks = needed
        planned.cached = planned.computed = cached_units * pool.unit_tokens
        return True

    def _decode(self) -> None:
        """Play the iterations until an arrival, or until an end that may admit the next queued request.

        One of them was computed already.
        """
        batch, context = len(self._running), sum(planned.total for planned in self._running)
        iterations = min(planned.left for planned in self._running)
        first_s = self._profile.decode_s(batch, context) * self._slowdown
        growth_s = self._profile.decode_kv_s * batch * self._slowdown
        ends_s = self._t + run_duration_s(first_s, growth_s, iterations)
        run: Step[Any] = Step(self._t, ends_s, (), (), iterations, first_s, growth_s)
        if self._coming and self._coming[0][0] < ends_s:
            iterations = run.iteration_at(self._coming[0][0])
        self._t = run.ended_s(iterations)
        for planned in self._running:
            planned.total += iterations - 1
            planned.left -= iterations - 1
            self._compute(planned, iterations - 1)
        self._emit()

    def _emit(self) -> None:
        """Give a token to each request without missing ones; those that have all leave."""
        for planned in self._running:
            if planned.computed == planned.total:
                planned.total += 1
                planned.left -= 1
                planned.decodes = True
                self._done = self._done or planned is self._arrival
        self._free += sum(planned.blocks for planned in self._running if not planned.left)
        self._running = [planned for planned in self._running if planned.left]

    def _see(self, planned: _Planned, before: int) -> None:
        """Let the contents that became full since `before` be found."""
        size = self._pool.unit_tokens
        self._full.update(planned.contents[before // size : planned.computed // size])
