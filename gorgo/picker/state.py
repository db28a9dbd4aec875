"""What decides for Envoy in a running picker, above what routes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gorgo.config.model import Config
from gorgo.config.router_settings import router_limits
from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.live.state import FrontEndKind, LiveState, Replicas, Routing, Telemetry
from gorgo.picker.endpoints import Endpoints, urls_of
from gorgo.picker.open_exchanges import OpenExchanges
from gorgo.picker.protocol.heads import HeadReader

#: Addresses behind the first, which Envoy may try by itself.
FALLBACKS = 2
#: Longest time in the queue, s: below a message timeout of 30 s, after which Envoy answers by itself.
HOLD_S = 20.0


@dataclass(slots=True)
class PickerState:
    """The running picker."""

    live: LiveState
    #: Longest time in the queue, s.
    hold_s: float = HOLD_S
    #: Calls that Envoy has open.
    calls: set[object] = field(default_factory=set)
    #: Reads heads of requests.
    heads: HeadReader = field(default_factory=HeadReader)
    endpoints: Endpoints = field(init=False)
    #: Exchanges by this picker's ids.
    open_exchanges: OpenExchanges = field(init=False)
    #: Of `live`.
    routing: Routing = field(init=False)
    replicas: Replicas = field(init=False)
    telemetry: Telemetry = field(init=False)

    def __post_init__(self) -> None:
        live = self.live
        self.routing, self.replicas, self.telemetry = live.routing, live.replicas, live.telemetry
        self.endpoints = Endpoints(urls_of(live.config))
        self.open_exchanges = OpenExchanges(self.routing.clock, picker=self.routing.router.boot_id[:8])
        live.on_config = lambda config: self.endpoints.configure(urls_of(config))


def _limits(config: Config) -> RouterLimits:
    """Return the Router's bounds: no hedges, which Envoy cannot carry out, and fallbacks."""
    return replace(router_limits(config), hedging=HedgeLimits(budget_ratio=0.0), fallbacks=FALLBACKS)


PICKER = FrontEndKind("picker", _limits)
