"""The parts that all exchanges of one proxy share. A reload replaces some between two steps of the event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gorgo.config.model import Config, LimitsConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.core.router import Router
from gorgo.proxy.clock import Clock
from gorgo.proxy.control.service import ControlService
from gorgo.proxy.http.client_auth import ClientKeys
from gorgo.proxy.http.tls import ServedTls
from gorgo.proxy.request_options import ClientPolicies
from gorgo.proxy.router_gateway import RouterGateway
from gorgo.proxy.stored_responses import StoredResponses
from gorgo.proxy.telemetry.metrics import Metrics
from gorgo.proxy.telemetry.probe_history import ProbeHistory
from gorgo.proxy.telemetry.request_log import RequestLog
from gorgo.proxy.uploads import UploadCounter
from gorgo.proxy.upstream.target import Target

if TYPE_CHECKING:
    from gorgo.proxy.telemetry.spans import Tracing

#: Set to 1, it turns on `GET /admin/check`.
INTERNAL_VARIABLE = "GORGO_INTERNAL_ROUTES"


@dataclass(slots=True)
class RunningProxy:
    """The running proxy."""

    config: Config
    limits: LimitsConfig
    router: Router
    clock: Clock
    metrics: Metrics
    #: How exchanges speak to the Router.
    gateway: RouterGateway
    #: What operators and tuners change goes through here.
    control: ControlService
    #: What clients and models are granted; replaced by a reload.
    client_policies: ClientPolicies
    #: Replaced as a whole by a reload, in the same step as the Router's fleet: who is in one is in the other.
    targets: Mapping[str, Target]
    #: Of all replicas, those that a reload adds included.
    tls: ssl.SSLContext
    fingerprinter: Fingerprinter
    uploads: UploadCounter
    #: By `clock`.
    started_s: float
    #: `None` while clients need no key.
    client_keys: ClientKeys | None = None
    #: `None` where the data listener speaks plain HTTP.
    served_tls: ServedTls | None = None
    stored_responses: StoredResponses = field(default_factory=StoredResponses)
    #: The last probes of each replica, for the status page.
    probe_history: ProbeHistory = field(default_factory=ProbeHistory)
    #: `None` where none is asked for.
    request_log: RequestLog | None = None
    #: `None` unless requests are traced.
    tracing: Tracing | None = None
    #: `GET /admin/check` answers.
    internal_routes: bool = False
    #: Set once, at the first signal: nothing new is taken.
    stopping: bool = False
    #: Tasks of the open exchanges, for the end of the grace period.
    exchanges: set[asyncio.Task[object]] = field(default_factory=set)
    #: No longer in the fleet, but with streams that have not ended.
    draining_targets: set[Target] = field(default_factory=set)

    async def aclose(self) -> None:
        self.gateway.close()
        await self.control.aclose()
        if self.request_log is not None:
            self.request_log.close()
        if self.tracing is not None:
            await self.tracing.export.aclose()
        for target in (*self.targets.values(), *self.draining_targets):
            await target.upstream.aclose()
