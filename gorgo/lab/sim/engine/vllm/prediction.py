"""Prediction of a vLLM-like engine: when an arriving request gets its first token if no later one arrives.

Owns the look-ahead of the oracle for this scheduler. It reads the engine model and changes nothing in it.

Theory of operation. As in the prediction of an SGLang-like engine, the next steps are played on a light copy: the
running requests in order, those in line, and the contents that become full from now on. Steps, chunks and admission are
the engine's, so that the answer is exact while nothing has to be evicted. Approximated where the pool is nearly full: a
running request takes no further blocks, none is preempted, and a cached prefix is not evicted meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gorgo.lab.sim.engine.prediction import ArrivingRequest, PredictedFirstToken
from gorgo.lab.sim.engine.request import DECODING, EngineRequest, Step, run_duration_s
from gorgo.lab.sim.engine.vllm.model import VllmModel
from gorgo.lab.sim.engine.vllm.running_list import Running


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
        known = next((n for n, one in enumerate(contents) if not (one in self._full or pool.has(one))), len(contents))
        found = pool.found_units(known)
        needed = (
            pool.blocks_of(planned.total) - found * pool.unit_blocks + pool.idle_blocks(pool.find(contents[:found]))
        )
        # An empty engine admits anything: too large requests were rejected before.
        if self._running and needed > self._free:
            return False
        self._free -= needed
        planned.blocks = needed
        planned.cached = planned.computed = found * pool.unit_tokens
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
