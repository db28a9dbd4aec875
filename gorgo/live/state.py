"""What routes in a live process, below its front end. A reload replaces some parts within one step of the loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gorgo.config.model import Config, LimitsConfig
from gorgo.config.router_settings import router_limits
from gorgo.core.buffer_budget import BufferBudget
from gorgo.core.limits import RouterLimits
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.router import Router
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.cache_push.service import PushService
from gorgo.live.cache_push.source import PushSource
from gorgo.live.cache_states import CacheState
from gorgo.live.clock import Clock
from gorgo.live.control.service import ControlService
from gorgo.live.http.client_auth import ClientKeys
from gorgo.live.http.tls import ServedTls
from gorgo.live.kv_feed_stats import KvFeedStats
from gorgo.live.model_lists import ModelLists
from gorgo.live.parsing.workers import BodyWorkers
from gorgo.live.policy_training import PolicyTraining
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.readiness import NotReady, why_not_ready
from gorgo.live.request_options import ClientPolicies
from gorgo.live.router_gateway import RouterGateway
from gorgo.live.served_models import ServedModels
from gorgo.live.stored_responses import StoredResponses
from gorgo.live.telemetry.line_log import LineLog
from gorgo.live.telemetry.metrics import Metrics
from gorgo.live.telemetry.probe_history import ProbeHistory
from gorgo.live.upstream.target import Target

if TYPE_CHECKING:
    from gorgo.live.kv_events.feeds import KvSubscriptions
    from gorgo.live.peer_store.service import PeerStoreService
    from gorgo.live.telemetry.spans import Tracing

#: Set to 1, it turns on `GET /admin/check`.
INTERNAL_VARIABLE = "GORGO_INTERNAL_ROUTES"
#: Blocks of each kind that a flush removes in one step of the event loop, in about a millisecond; and most steps, for
#: eight million blocks: reports can add some meanwhile.
FLUSH_BLOCKS, FLUSH_STEPS = 1024, 8192


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The Router of a process with its replicas, clock, settings and reports."""

    #: In force: keys that need a restart are as at the start.
    config: Config
    #: As last read from regions.yaml, with the options of the command line.
    file_config: Config
    limits: LimitsConfig
    router: Router
    clock: Clock
    metrics: Metrics
    #: The Router for exchanges.
    gateway: RouterGateway
    #: Changes by operators and tuners.
    control: ControlService
    #: Of the policy that learns.
    training: PolicyTraining
    #: Rules of clients and models; replaced by a reload.
    client_policies: ClientPolicies
    #: Replaced as a whole by a reload, in the same step as the Router's fleet: both have the same replicas.
    targets: Mapping[str, Target]
    #: For all replicas, those of later reloads included.
    tls: ssl.SSLContext
    fingerprinter: Fingerprinter
    #: Read the bodies that would hold the event loop.
    body_workers: BodyWorkers
    #: Counts the tokens of models with a tokenizer.
    prompt_tokens: PromptTokens
    #: Buffered bytes of requests and fetches.
    buffers: BufferBudget
    #: By `clock`.
    started_s: float
    #: Aliases, and the models that replicas list.
    models: ServedModels
    #: Answers of replicas to `GET /v1/models`.
    model_lists: ModelLists
    #: Replicas of fleet sources.
    found: FoundFleet
    #: What engines push of their caches.
    pushes: PushService
    #: `None` for a router that reports to no other.
    peer_store: PeerStoreService | None = None
    #: `None` while clients need no key.
    client_keys: ClientKeys | None = None
    #: `None` without TLS on the data listener.
    served_tls: ServedTls | None = None
    #: What the subscribers to KV events share; `None` until a replica has some.
    kv_feeds: KvSubscriptions | None = None
    #: Their states by replica.
    kv_feed_stats: dict[str, KvFeedStats] = field(default_factory=dict)
    stored_responses: StoredResponses = field(default_factory=StoredResponses)
    #: The last probes of each replica, for the status page.
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    #: `None` without a request log.
    request_log: LineLog | None = None
    #: `None` without an outcome log.
    outcome_log: LineLog | None = None
    #: `None` unless requests are traced.
    tracing: Tracing | None = None
    #: Whether `GET /admin/check` is on.
    internal_routes: bool = False
    #: Set at the first signal: new requests are rejected.
    stopping: bool = False
    #: Tasks of the open exchanges, for the end of the grace period.
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)
    #: Removed from the fleet, with streams in progress.
    draining_targets: set[Target] = field(default_factory=set)

    def __post_init__(self) -> None:
        # The metrics stand below the state, and a scrape reads what the state composes.
        self.metrics.caches.read = self.cache_states

    @property
    def line_logs(self) -> list[LineLog]:
        """Return the logs that are written."""
        return [each for each in (self.request_log, self.outcome_log) if each is not None]

    async def flush(self, replica: str | None) -> None:
        """Forget what one replica or all have cached, in steps of about a millisecond. Raises `UnknownReplica`.

        Their KV events are subscribed to anew, so that what their engines retain is replayed; without replays the feed
        is incomplete until the engine reports an empty cache. Pushed caches come back with the next whole push.
        """
        await self.begin_flush(list(self.targets) if replica is None else (replica,))
        self.router.caches.flush(replica, now=self.clock())
        for target in self.targets.values() if replica is None else (self.targets[replica],):
            target.kv_events_changed.set()

    async def begin_flush(self, replicas: Iterable[str]) -> None:
        """Forget what replicas have cached, in steps, before a flush or their leaving.

        At once it takes 0.6 us a block.
        """
        for name in replicas:
            for _ in range(FLUSH_STEPS):
                if not self.router.caches.flush_some(name, blocks=FLUSH_BLOCKS, now=self.clock()):
                    break
                await asyncio.sleep(0)

    def cache_states(self) -> dict[str, CacheState]:
        """Return what is known of each replica's cache, and by which reports."""
        stats, feeds = self.router.caches.sources(now=self.clock()), self.kv_feed_stats
        return {
            name: CacheState(target.region, stats[name], target.pushes.stats, feeds.get(name) or KvFeedStats())
            for name, target in self.targets.items()
            if name in stats
        }

    def push_sources(self) -> dict[str, PushSource]:
        """Return the pushes of each replica."""
        return {name: target.pushes for name, target in self.targets.items()}

    def why_not_ready(self, *, required: int = 1) -> NotReady | None:
        """Return why fewer than `required` replicas could serve a request now; `None` if so many could."""
        return why_not_ready(
            self.router.view.snapshots(now=self.clock()),
            self.client_policies.models,
            required=required,
            unreachable={name for name, target in self.targets.items() if target.unreachable},
        )

    def router_limits(self, config: Config) -> RouterLimits:
        """Return the Router's bounds under `config`, as this front end can carry them out."""
        return router_limits(config)

    def apply_config(self, config: Config) -> None:
        """Apply what of a reloaded configuration belongs to the front end alone."""

    async def aclose(self) -> None:
        self.gateway.close()
        if self.kv_feeds is not None:
            await self.kv_feeds.aclose()
        if self.peer_store is not None:
            await self.peer_store.aclose()
        await self.control.aclose()
        await self.training.aclose()
        await self.body_workers.aclose()
        self.prompt_tokens.close()
        for line_log in self.line_logs:
            line_log.close()
        if self.tracing is not None:
            await self.tracing.export.aclose()
        for target in (*self.targets.values(), *self.draining_targets):
            await target.upstream.aclose()
