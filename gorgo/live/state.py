"""What a live process has below its front end: routing, replicas, telemetry, and the settings in force.

Owns the three parts (`Routing`, `Replicas`, `Telemetry`), and what needs several of them: a flush, the states of caches
(`CacheState`), readiness (`NotReady`), and the end. `build` makes them; a front end has them. A reload replaces some
parts within one step of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from gorgo.config.model import Config, LimitsConfig
from gorgo.config.router_settings import router_limits
from gorgo.core.fleet.snapshot import ReplicaSnapshot
from gorgo.core.limits import BufferBudget, RouterLimits
from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.decision import CacheSourceStats
from gorgo.core.policy.interface import scrape_interval_s
from gorgo.core.prompt.fingerprint import Fingerprinter, PromptHeads
from gorgo.core.router import Router
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.cache_push import PushService, PushSource, PushStats
from gorgo.live.control.service import ControlService
from gorgo.live.event_loop import Clock, RouterGateway
from gorgo.live.http.body import UploadCounter
from gorgo.live.http.tls import ServedTls, SharedTls
from gorgo.live.kv_feed_stats import KvFeedStats
from gorgo.live.logs import LineLog, log
from gorgo.live.parsing.workers import BodyWorkers
from gorgo.live.policy_training import PolicyTraining
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.request_options import ClientKeys, ClientPolicies
from gorgo.live.scaling import ScalingService
from gorgo.live.served_models import ModelLists, ServedModels
from gorgo.live.stored_responses import StoredResponses
from gorgo.live.telemetry.health import ProbeHistory
from gorgo.live.telemetry.metrics import Metrics
from gorgo.live.upstream.target import Target
from gorgo.live.workers.link import WorkerLink

if TYPE_CHECKING:
    from gorgo.live.kv_events.subscriber import KvSubscriptions
    from gorgo.live.peer_store.local import LocalPeers
    from gorgo.live.peer_store.service import PeerStoreService
    from gorgo.live.telemetry.spans import Tracing


# Readiness, for `/ready` and the status page's alert: whether some replica could serve a request now, and the reason
# for each that could not. In a panic the Router also tries ejected replicas; a load balancer with another proxy to
# choose should not.


#: Regions that may serve a model, for models with such a rule.
AllowedRegions = Mapping[str, frozenset[str]]


class NotReady(NamedTuple):
    """Code and message of the error."""

    code: str
    message: str


def why_not_ready(
    views: Sequence[ReplicaSnapshot],
    allowed: AllowedRegions,
    *,
    required: int = 1,
    unreachable: Container[str] = (),
) -> NotReady | None:
    """Return the error if fewer than `required` replicas can serve a request.

    `unreachable` has the replicas whose last pings found no connection. A load balancer that requires several replicas
    counts those with a recent probe alone.
    """
    if not views:
        return NotReady("no_replica", "no replica can serve a request: the fleet is empty")
    obstacles = [_obstacle(view, allowed, view.name in unreachable) for view in views]
    if all(obstacles):
        # Without names: this route needs no key.
        counts = Counter(obstacle for obstacle in obstacles if obstacle is not None)
        reasons = ", ".join(f"{n} {reason}" for reason, n in counts.most_common())
        return NotReady("no_replica", f"no replica can serve a request: {reasons}")
    ready = sum(view.state == "healthy" and view.rtt_ms is not None for view in views)
    # For 1, any replica that can serve counts: a single lost ping must not take the only one away.
    if ready < required and required > 1:
        return NotReady("too_few_replicas", f"{ready} replicas are ready; {required} are required")
    return None


def _obstacle(view: ReplicaSnapshot, allowed: AllowedRegions, unreachable: bool) -> str | None:
    if view.state == "draining":
        return "draining"
    if view.models and all(view.region not in allowed.get(model, (view.region,)) for model in view.models):
        return "without a model that its region may serve"
    if unreachable:
        return "without a connection"
    if view.state == "ejected":
        return "ejected after failed requests" if view.ejected_by == "attempts" else "without an answer to probes"
    if view.state == "half_open":
        # A back-off also ends for a replica that is still silent.
        return None if view.answers else "without an answer to probes"
    # One lost ping says little while the round trip before it is recent, or requests succeed.
    alive = view.answers is not False or view.rtt_ms is not None or not view.failures_in_a_row
    return None if alive else "without an answer to probes"


# What the proxy knows of each replica's cache, how right it was, and by which reports: for metrics, status and page.


@dataclass(frozen=True, slots=True)
class CacheState:
    """The cache of one replica; `feed` is `None` where no KV events are configured.

    `unused` says why decisions use the history although the engine reports its cache, or should; `None` if they do not.
    """

    region: str
    stats: CacheSourceStats
    pushes: PushStats
    feed: KvFeedStats | None = None
    unused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        feed = None
        if self.feed is not None:
            feed = asdict(self.feed) | {"state": self.feed.state.value, "endpoints": list(self.feed.endpoints)}
        return asdict(self.stats) | {"unused": self.unused, "feed": feed, "pushes": asdict(self.pushes)}

    def reports(self) -> Iterator[tuple[str, int]]:
        """Yield the number of reports by what became of them."""
        feed = self.feed or KvFeedStats()
        yield "messages", feed.messages
        yield "rejected", feed.rejected_messages + feed.rejected_events
        yield "gaps", feed.gaps
        yield "restarts", feed.restarts
        yield "replays", feed.replays
        yield "failed_replays", feed.failed_replays
        pushes = self.pushes
        yield "snapshots", pushes.snapshots
        yield "evictions", pushes.evictions
        yield "stale", pushes.stale
        yield "lost", pushes.lost
        yield "limited", pushes.limited
        yield "silences", pushes.silences


#: Models named in a reason: a replica with adapters lists hundreds.
MODELS_NAMED = 4
#: Set to 1, it turns on `GET /admin/check`.
INTERNAL_VARIABLE = "GORGO_INTERNAL_ROUTES"
#: Blocks of each kind that a flush removes in one step of the event loop, in about a millisecond; and most steps, for
#: eight million blocks: reports can add some meanwhile.
FLUSH_BLOCKS, FLUSH_STEPS = 1024, 8192


@dataclass(slots=True, kw_only=True)
class Routing:
    """The Router of a process, what reads a request for it, and what changes its settings."""

    router: Router
    clock: Clock
    #: The Router for exchanges.
    gateway: RouterGateway
    #: Changes by operators and tuners.
    control: ControlService
    #: Of the policy that learns.
    training: PolicyTraining
    #: Rules of clients and models; replaced by a reload.
    client_policies: ClientPolicies
    #: Aliases, and the models that replicas list.
    models: ServedModels
    fingerprinter: Fingerprinter
    #: Read the bodies that would hold the event loop.
    body_workers: BodyWorkers
    #: Counts the tokens of models with a tokenizer.
    prompt_tokens: PromptTokens
    #: Bodies of requests that the Router does not know yet.
    uploads: UploadCounter
    #: The wanted replicas, and the prompts that new ones are warmed with.
    scaling: ScalingService
    #: Of the newest prompts, which says where they part.
    prompt_heads: PromptHeads = field(default_factory=PromptHeads)
    #: `None` while clients need no key.
    client_keys: ClientKeys | None = None
    #: `None` for a router that reports to no other.
    peer_store: PeerStoreService | None = None
    #: Among the workers of this router; `None` for a router of one process, and where the workers share the store.
    local_peers: LocalPeers | None = None


@dataclass(slots=True, kw_only=True)
class Replicas:
    """The processes of the fleet as this one reaches them, and what they say of themselves."""

    #: Replaced as a whole by a reload, in the same step as the Router's fleet: both have the same replicas.
    targets: Mapping[str, Target]
    #: For all replicas, those of later reloads included.
    tls: SharedTls
    #: Replicas of fleet sources.
    found: FoundFleet
    #: What engines push of their caches.
    pushes: PushService
    #: Answers of replicas to `GET /v1/models`.
    model_lists: ModelLists
    #: What the subscribers to KV events share; `None` until a replica has some.
    kv_feeds: KvSubscriptions | None = None
    #: Their states by replica.
    kv_feed_stats: dict[str, KvFeedStats] = field(default_factory=dict)
    stored_responses: StoredResponses = field(default_factory=StoredResponses)
    #: Removed from the fleet, with streams in progress.
    draining_targets: set[Target] = field(default_factory=set)

    def push_sources(self) -> dict[str, PushSource]:
        """Return the pushes of each replica."""
        return {name: target.pushes for name, target in self.targets.items()}

    def record_stored(self, dispatch: Dispatch, target: Target, head: bytes, *, client: str | None) -> None:
        """Record which replica has a response that later requests may continue; `head` has its first bytes."""
        if self.targets.get(dispatch.replica) is target:
            self.stored_responses.record(head, dispatch.replica, client=client)


@dataclass(slots=True, kw_only=True)
class Telemetry:
    """What a process says of its requests and replicas: metrics, logs and spans."""

    metrics: Metrics
    #: The last probes of each replica, for the status page.
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    #: `None` without a request log.
    request_log: LineLog | None = None
    #: `None` without an outcome log.
    outcome_log: LineLog | None = None
    #: `None` unless requests are traced.
    tracing: Tracing | None = None

    @property
    def line_logs(self) -> list[LineLog]:
        """Return the logs that are written."""
        return [each for each in (self.request_log, self.outcome_log) if each is not None]

    async def aclose(self) -> None:
        for line_log in self.line_logs:
            line_log.close()
        if self.tracing is not None:
            await self.tracing.export.aclose()


@dataclass(frozen=True, slots=True)
class FrontEndKind:
    """What the parts below a front end have to know of its kind."""

    #: As in messages to clients.
    name: str
    #: The Router's bounds under a configuration, as this kind can carry them out.
    router_limits: Callable[[Config], RouterLimits] = router_limits
    #: New requests are answered 503 while the process stops. Not if what calls it serves them without an answer.
    refuses_when_stopping: bool = True


PROXY = FrontEndKind("proxy")


@dataclass(slots=True, kw_only=True)
class LiveState:
    """The three parts, with the settings in force and the open exchanges."""

    kind: FrontEndKind
    routing: Routing
    replicas: Replicas
    telemetry: Telemetry
    #: In force: keys that need a restart are as at the start.
    config: Config
    #: As last read from regions.yaml, with the options of the command line.
    file_config: Config
    limits: LimitsConfig
    #: Buffered bytes of requests and fetches.
    buffers: BufferBudget
    #: By the clock.
    started_s: float
    #: `None` without TLS on the data listener.
    served_tls: ServedTls | None = None
    #: Whether `GET /admin/check` is on.
    internal_routes: bool = False
    #: HTTP by stock hypercorn, Starlette's router and httpx.
    plain: bool = False
    #: To the other workers of this router; `None` for a router of one process.
    link: WorkerLink | None = None
    #: Set at the first signal: new requests are rejected.
    stopping: bool = False
    #: Tasks of the open exchanges, for the end of the grace period.
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)
    #: Called with each reloaded configuration, for what of it belongs to the front end alone.
    on_config: Callable[[Config], None] | None = None
    #: Headers that pass in both directions beside those that always do; replaced by a reload.
    passed_headers: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        # The metrics stand below the state, and a scrape reads what the state composes.
        if self.telemetry.tracing is not None:
            self.telemetry.tracing.describe = self._describe
        metrics = self.telemetry.metrics
        metrics.caches.read = self.cache_states
        metrics.listeners.is_ready = self.is_ready
        if self.served_tls is not None:
            metrics.listeners.tls.append(self.served_tls)
        self.apply_config(self.config)

    def apply_config(self, config: Config) -> None:
        """Apply what of a configuration does not concern the Router or its replicas."""
        self.passed_headers = frozenset(name.encode() for name in config.proxy.pass_headers)
        if self.on_config is not None:
            self.on_config(config)

    async def flush(self, replica: str | None) -> None:
        """Forget what one replica or all have cached, in steps of about a millisecond. Raises `UnknownReplica`.

        Their KV events are subscribed to anew, so that what their engines retain is replayed; without replays the feed
        is incomplete until the engine reports an empty cache. Pushed caches come back with the next whole push.
        """
        routing, targets = self.routing, self.replicas.targets
        await self.begin_flush(list(targets) if replica is None else (replica,))
        routing.router.caches.flush(replica, now=routing.clock())
        targets = self.replicas.targets
        for target in targets.values() if replica is None else (targets[replica],):
            target.kv_events_changed.set()

    async def begin_flush(self, replicas: Iterable[str]) -> None:
        """Forget what replicas have cached, in steps, before a flush or their leaving.

        At once it takes 0.6 us a block.
        """
        routing = self.routing
        for name in replicas:
            for _ in range(FLUSH_STEPS):
                if not routing.router.caches.flush_some(name, blocks=FLUSH_BLOCKS, now=routing.clock()):
                    break
                await asyncio.sleep(0)

    async def exposition(self) -> bytes:
        """Return the text of `/metrics`: that of all workers of the router."""
        metrics, link = self.telemetry.metrics, self.link
        if link is None:
            return metrics.exposition()
        from gorgo.live.telemetry.metrics import exposition, families_of, merged

        others = await link.question_all("metrics")
        return exposition(merged(link.leader, {link.number: families_of(metrics.registry), **others}))

    @property
    def leads(self) -> bool:
        """Whether this process does what is done once for all workers of its router."""
        return self.link is None or self.link.leads

    @property
    def scrape_interval_s(self) -> float:
        """Interval of scrapes: that of the configuration, else what the policies in force need."""
        settings = self.routing.router.settings
        return scrape_interval_s(self.config.proxy.scrape_interval_s, settings.policy, settings.shadow)

    def cache_states(self) -> dict[str, CacheState]:
        """Return what is known of each replica's cache, and by which reports."""
        stats, feeds = self.routing.router.caches.sources(now=self.routing.clock()), self.replicas.kv_feed_stats
        return {
            name: CacheState(
                target.region,
                stats[name],
                target.pushes.stats,
                feeds.get(name) or KvFeedStats(),
                self.why_unused(target),
            )
            for name, target in self.replicas.targets.items()
            if name in stats
        }

    def why_unused(self, target: Target) -> str | None:
        """Return why no decision can use what a replica reports of its cache; `None` if some can, or without reports.

        A prompt that a client sends as token ids needs no tokenizer; it is compared with reports in any case.
        """
        router = self.routing.router
        if target.kv_events is None and not router.caches.has_reports(target.name):
            return None
        if not router.caches.read_reports:
            return f"policy {router.settings.policy.name} reads no reports of caches"
        tokens, models = self.routing.prompt_tokens.models, self.routing.models
        bases = dict.fromkeys(models.governing(name, tokens) or name for name in models.served(target.name))
        if any(name in tokens and not tokens[name].differs for name in bases):
            return None
        differing = [name for name in bases if name in tokens]
        if differing:
            return f"the tokenizer of {', '.join(differing)} counts other tokens than the engine"
        if not bases and any(not model_tokens.differs for model_tokens in tokens.values()):
            return None  # the replica has not listed its models yet
        return f"no tokenizer for {', '.join(islice(bases, MODELS_NAMED)) or 'any model'}"

    def log_unused(self, target: Target) -> None:
        """Log why what a replica reports of its cache is not used, once until that changes."""
        unused = self.why_unused(target)
        if unused == target.unused_reports:
            return
        target.unused_reports = unused
        if unused is None:
            log("cache_reports_used", replica=target.name)
        else:
            log("cache_reports_unused", level=logging.WARNING, replica=target.name, in_force=f"history: {unused}")

    def _describe(self, replica: str) -> dict[str, str | int]:
        """Return what OpenTelemetry's conventions say of a replica: its engine, its host and its port."""
        target = self.replicas.targets.get(replica)
        configured = next((each for each in self.config.replicas if each.name == replica), None)
        engine = None if target is None else target.engine["name"]
        attributes: dict[str, str | int] = {} if engine is None else {"gen_ai.provider.name": str(engine)}
        if configured is not None:
            parts = urlsplit(configured.url)
            attributes["server.address"] = parts.hostname or ""
            attributes["server.port"] = parts.port or (443 if parts.scheme == "https" else 80)
        return attributes

    def is_ready(self) -> bool:
        """Return whether a load balancer may send requests here, as `GET /ready` says."""
        if self.stopping or self.replicas.found.pending(self.routing.clock()):
            return False
        return self.why_not_ready(required=self.config.proxy.min_ready_replicas) is None

    def why_not_ready(self, *, required: int = 1) -> NotReady | None:
        """Return why fewer than `required` replicas could serve a request now; `None` if so many could."""
        return why_not_ready(
            self.routing.router.view.snapshots(now=self.routing.clock()),
            self.routing.client_policies.models,
            required=required,
            unreachable={name for name, target in self.replicas.targets.items() if target.unreachable},
        )

    async def aclose(self) -> None:
        routing, replicas = self.routing, self.replicas
        routing.gateway.close()
        if replicas.kv_feeds is not None:
            await replicas.kv_feeds.aclose()
        if routing.peer_store is not None:
            await routing.peer_store.aclose()
        await routing.control.aclose()
        await routing.training.aclose()
        await routing.body_workers.aclose()
        routing.prompt_tokens.close()
        await self.telemetry.aclose()
        for target in (*replicas.targets.values(), *replicas.draining_targets):
            await target.upstream.aclose()
