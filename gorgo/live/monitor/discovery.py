"""The models of one replica and, for `engine: auto`, its kind of engine, by asking it.

Owns when which route is asked; `gorgo.engines.discovery` reads the answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from gorgo.core.numeric import is_quick
from gorgo.engines.discovery import (
    MODELS_PATH,
    FoundEngine,
    ServedModel,
    context_routes,
    identifying_routes,
    owner_of,
    read_context,
    read_models,
    recognise,
)
from gorgo.live.logs import log
from gorgo.live.state import Replicas, Routing
from gorgo.live.upstream.client import UpstreamError
from gorgo.live.upstream.target import Target

#: For one answer. A request for an unknown model may wait for it.
DISCOVERY_TIMEOUT_S = 2.0
#: Names in one log line.
NAMES_LOGGED = 20

Fetch = Callable[[str, float], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True, slots=True)
class Discovered:
    """Answers of one replica; `None` is unknown."""

    models: tuple[ServedModel, ...] | None = None
    engine: FoundEngine | None = None


async def discover(
    answer: Callable[[str], Awaitable[object]], *, identify: bool, known: FoundEngine | None = None, kind: str = ""
) -> Discovered:
    """Return the models of a replica and, with `identify` or if it is not `known` any longer, its kind of engine.

    `answer` returns the JSON of a route, `None` without one. `kind` is the engine's where it is not asked for. A
    context that the list of models does not have is read from the engine's own route.
    """
    listed = await answer(MODELS_PATH)
    models, owner = read_models(listed), owner_of(listed)
    identify = identify or (known is not None and owner not in (None, known.name))
    engine = await _engine(answer, owner) if identify else None
    if engine is None and models is not None and identify:
        engine = FoundEngine("openai")
    if models and all(model.context_tokens is None for model in models):
        context_tokens = await _context(answer, kind if engine is None else engine.name)
        models = tuple(replace(model, context_tokens=context_tokens) for model in models)
    return Discovered(models, engine)


async def _context(answer: Callable[[str], Awaitable[object]], kind: str) -> int | None:
    for path in context_routes(kind):
        context_tokens = read_context(await answer(path))
        if context_tokens is not None:
            return context_tokens
    return None


async def _engine(answer: Callable[[str], Awaitable[object]], owner: str | None) -> FoundEngine | None:
    for path in identifying_routes(owner):
        engine = recognise(path, await answer(path))
        if engine is not None:
            return engine
    return None if owner is None else FoundEngine(owner)


class Discovery:
    """Asks one replica.

    Parameters
    ----------
    fetch:
        Returns status and body of a GET within a time limit. Raises `UpstreamError`.
    """

    def __init__(self, routing: Routing, replicas: Replicas, target: Target, fetch: Fetch) -> None:
        self._routing = routing
        self._replicas = replicas
        self._target = target
        self._fetch = fetch
        self._identify = target.detects_engine

    def expect_another_process(self) -> None:
        """Identify the engine again at the next question: another process may answer."""
        self._identify = self._target.detects_engine

    async def request(self) -> Discovered:
        """Ask for the models, and for the kind of engine where it is not known."""
        target = self._target
        return await discover(self.answer, identify=self._identify, known=target.found_engine, kind=target.dialect.name)

    def publish(self, discovered: Discovered) -> bool:
        """Use what was found, unless another process has this name now. Return whether the kind of engine changed."""
        if self._replicas.targets.get(self._target.name) is not self._target:
            return False
        changed = self.apply_engine(discovered)
        if discovered.models is not None:
            self._use_models(discovered.models)
        return changed

    def apply_engine(self, discovered: Discovered) -> bool:
        """Use the kind of engine that was found. Return whether it changed."""
        return discovered.engine is not None and self._use_engine(discovered.engine)

    def _use_engine(self, engine: FoundEngine) -> bool:
        self._identify = False
        target = self._target
        if engine == target.found_engine:
            return False
        was = target.found_engine
        target.use_engine(engine)
        log("engine_found", replica=target.name, engine=engine.name, version=engine.version)
        if was is not None and was.name != engine.name:
            self._routing.router.caches.flush(target.name, now=self._routing.clock())
        return was is None or was.name != engine.name

    def _use_models(self, models: tuple[ServedModel, ...]) -> None:
        routing, name = self._routing, self._target.name
        before, contexts_before = routing.models.listed(name), routing.models.contexts(name)
        now_listed = routing.models.set_list(name, models, engine=self._target.dialect.name)
        contexts = routing.models.contexts(name)
        if now_listed == before and contexts == contexts_before:
            return
        if now_listed != before:
            added = [model for model in now_listed if model not in before]
            removed = [model for model in before if model not in now_listed]
            log("models_found", replica=name, added=added[:NAMES_LOGGED], removed=removed[:NAMES_LOGGED])
        now = routing.clock()
        routing.gateway.apply(routing.router.replicas.on_models(name, now_listed, contexts=contexts, now=now))

    async def answer(self, path: str) -> object:
        """Return the JSON of a route, `None` without one."""
        try:
            status, body = await self._fetch(path, DISCOVERY_TIMEOUT_S)
            return json.loads(body) if status == 200 and is_quick(body) else None
        except (UpstreamError, ValueError, RecursionError):
            return None
