"""What the subscribers of one proxy share."""

from __future__ import annotations

import asyncio

from gorgo.live.kv_events.decoding import KvDecoder
from gorgo.live.kv_events.sockets import KvSockets, import_zmq
from gorgo.live.kv_events.turns import Turn
from gorgo.live.kv_feed_stats import KvFeedStats

#: Replays of all replicas that run at once: after a restart of the proxy each replica has one.
MAX_REPLAYS_AT_ONCE = 8


class KvSubscriptions:
    """Sockets, slots of replays, turns of the event loop, and the published states by replica."""

    def __init__(self, stats: dict[str, KvFeedStats] | None = None) -> None:
        self.stats: dict[str, KvFeedStats] = {} if stats is None else stats
        self.replay_slots = asyncio.Semaphore(MAX_REPLAYS_AT_ONCE)
        self.decoder = KvDecoder()
        self.turn = Turn()
        self._sockets: KvSockets | None = None

    @property
    def sockets(self) -> KvSockets:
        """Return the sockets. Raises `MissingExtra`."""
        if self._sockets is None:
            self._sockets = KvSockets(import_zmq(), self.turn)
        return self._sockets

    async def aclose(self) -> None:
        await self.decoder.aclose()
        if self._sockets is not None:
            self._sockets.close()
