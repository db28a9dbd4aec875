"""Routers of one group in this process, over one real store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from gorgo.config.model import SharedConfig
from gorgo.core.messages.actions import Dispatch
from gorgo.core.router import Router
from gorgo.live.event_loop import Clock, RouterGateway, epoch_clock
from gorgo.live.peer_store.service import PeerStoreService
from gorgo.policies.registry import make_policy
from tests.core.routers import PROMPT, a_request, dispatched, submitted, timed

KEY_ID = "one key"
#: Of the group: its routers know by it what one of them has written.
GROUP_KEY = "0123456789abcdef" * 2


class Member:
    """One router with its service."""

    def __init__(self, shared: SharedConfig, boot_id: str, *, clock: Clock, key_id: str, policy: str) -> None:
        self.clock = clock
        replicas = [timed("a"), timed("b")]
        self.router = Router(replicas, make_policy(policy), rng=np.random.default_rng(0), boot_id=boot_id)
        for spec in replicas:
            self.router.replicas.on_probe(spec.name, 0.01, now=clock())
        self.gateway = RouterGateway(self.router, clock, lambda _: None)
        self.service = PeerStoreService.connecting(
            shared, {shared.key_env: GROUP_KEY}, self.router, self.gateway, clock, key_id=key_id
        )
        self.probed: list[str] = []
        self.service.probe = self.probed.append

    def dispatch(self, request_id: str, *, replica: str = "a", tokens: int = 256, blocks: bytes = PROMPT) -> Dispatch:
        """Dispatch a request to a replica; its attempt stays open."""
        request = a_request(request_id, blocks=blocks, prompt_tokens=tokens, pinned_replica=replica)
        action = dispatched(submitted(self.router, request, now=self.clock()))
        for observe in self.gateway.on_dispatch:
            observe(action)
        return action

    def serve(self, request_id: str, *, replica: str = "a", blocks: bytes = PROMPT) -> None:
        """Let a replica confirm a prompt."""
        attempt_id = self.dispatch(request_id, replica=replica, blocks=blocks).attempt_id
        self.router.on_first_token(attempt_id, now=self.clock())

    @property
    def heard(self) -> dict[str, bool]:
        """Return the peers, and whether their load counts."""
        return {row.router.partition("/")[0]: row.counts for row in self.service.known_peers()}

    def knows_prefixes(self) -> bool:
        return len(self.service.peers.prefixes) > 0

    def hears_of(self, requests: float) -> bool:
        return self.load_of_others() == requests

    def load_of_others(self, replica: str = "a") -> float:
        peers = self.service.peers
        peers.loads.expire(now=self.clock())
        return peers.loads.requests({"a": 0, "b": 1}[replica])


@asynccontextmanager
async def member(
    shared: SharedConfig,
    router: str,
    *,
    boot_id: str = "run1",
    clock: Clock | None = None,
    key_id: str = KEY_ID,
    policy: str = "gorgo-ms",
) -> AsyncIterator[Member]:
    """Run one router of a group."""
    one = Member(replace(shared, router=router), boot_id, clock=clock or epoch_clock(), key_id=key_id, policy=policy)
    task = asyncio.create_task(one.service.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.service.aclose()
        one.gateway.close()


async def until(condition: Callable[[], bool], *, within_s: float = 8.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
