"""Where the KV events of one replica come from: its configuration, or what its engine announces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gorgo.config.model import KvEventsConfig
from gorgo.engines.kv_sources import SGLANG_PATHS, VLLM_PATH, KvEventSource, read_sglang, read_vllm
from gorgo.live.upstream.target import Target


class KvSources:
    """The sources of one replica.

    Parameters
    ----------
    answer:
        Returns the JSON of a route of the engine, `None` without one.
    """

    def __init__(self, target: Target, answer: Callable[[str], Awaitable[object]]) -> None:
        self._target = target
        self._answer = answer

    async def of_config(self, config: KvEventsConfig) -> tuple[KvEventSource, ...] | None:
        """Return the sources of the configuration or of the engine; `None` if it did not answer."""
        if config.endpoint is not None:
            return (KvEventSource(config.endpoint, config.replay, config.topic or "", config.mode),)
        found = await self.announced()
        if found is None:
            return None
        return tuple(
            KvEventSource(
                source.endpoint,
                source.replay,
                source.topic if config.topic is None else config.topic,
                rank=source.rank,
                block_tokens=source.block_tokens,
            )
            for source in found
        )

    async def announced(self) -> tuple[KvEventSource, ...] | None:
        """Return the sources that the engine announces, none of an engine without events."""
        host = self._target.upstream.host
        match self._target.dialect.name:
            case "sglang":
                for path in SGLANG_PATHS:
                    found = read_sglang(await self._answer(path), host=host)
                    if found is not None:
                        return found
                return None
            case "vllm":
                return read_vllm(await self._answer(VLLM_PATH), host=host)
        return None if self._target.detects_engine and self._target.found_engine is None else ()
