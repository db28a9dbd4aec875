"""An engine model in virtual time, as `measure` calls an engine."""

from __future__ import annotations

from collections.abc import Sequence

from gorgo.errors import BadRequest
from gorgo.lab.calibrate.measured_engine import Answer
from gorgo.lab.engine_server.text import cache_key, token_count
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import EngineRequest

#: What a request takes outside of the engine's steps.
OVERHEAD_S = 0.004


class VirtualEngine:
    """One idle engine; each call of `generate` plays it until it is idle again.

    The first prompt of a length takes `compile_s` more, as where kernels are made for each shape, and one after a pause
    `wake_s`.
    """

    def __init__(
        self, profile: EngineProfile, *, reports_cached: bool = True, compile_s: float = 0.0, wake_s: float = 0.0
    ) -> None:
        self._model: Engine[EngineRequest] = make_engine(profile)
        self._now_s = 0.0
        self._reports_cached = reports_cached
        self._compile_s = compile_s
        self._compiled: set[int] = set()
        self._wake_s = wake_s
        self._is_idle = False

    async def generate(self, prompts: Sequence[str], *, output_tokens: int) -> list[Answer]:
        started_s, model = self._now_s, self._model
        self._now_s += self._wake_s if self._is_idle else 0.0
        self._is_idle = False
        times: dict[EngineRequest, list[float]] = {}
        answers: list[EngineRequest | str] = []
        for prompt in prompts:
            text = prompt.encode()
            request = EngineRequest(cache_key(text), prompt_tokens=token_count(text), output_tokens=output_tokens)
            try:
                model.submit(request, now=self._now_s)
            except BadRequest as error:
                answers.append(str(error))
                continue
            if request.prompt_tokens not in self._compiled:
                self._compiled.add(request.prompt_tokens)
                self._now_s += self._compile_s
            times[request] = []
            answers.append(request)
        while not model.idle:
            step = model.start_step(now=self._now_s)
            assert step is not None
            self._now_s = step.ends_s
            for request in model.finish_step(step):
                times[request].append(self._now_s - started_s + OVERHEAD_S)
        self._now_s += OVERHEAD_S
        return [
            Answer(None, None, (), answer)
            if isinstance(answer, str)
            else Answer(
                answer.prompt_tokens, answer.cached_tokens if self._reports_cached else None, tuple(times[answer])
            )
            for answer in answers
        ]

    async def round_trip_s(self) -> float:
        return OVERHEAD_S

    def now_s(self) -> float:
        return self._now_s

    async def pause(self, seconds: float) -> None:
        self._now_s += seconds
        self._is_idle = True
