"""What decides for Envoy in a running picker, above what routes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Self

from gorgo.config.model import Config
from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.live.state import LiveState
from gorgo.picker.endpoints import Endpoints, urls_of
from gorgo.picker.open_exchanges import OpenExchanges
from gorgo.picker.protocol.heads import HeadReader

#: Addresses behind the first, which Envoy may try by itself.
FALLBACKS = 2
#: Longest time in the queue, s: below a message timeout of 30 s, after which Envoy answers by itself.
HOLD_S = 20.0


@dataclass(slots=True, kw_only=True)
class PickerState(LiveState):
    """The running picker."""

    endpoints: Endpoints
    #: Longest time in the queue, s.
    hold_s: float = HOLD_S
    #: Headers that reach replicas beside those that always do.
    passed_headers: frozenset[bytes] = frozenset()
    #: Calls that Envoy has open.
    calls: set[object] = field(default_factory=set)
    #: Reads heads of requests.
    heads: HeadReader = field(default_factory=HeadReader)
    #: Exchanges by this picker's ids.
    open_exchanges: OpenExchanges = field(init=False)

    def __post_init__(self) -> None:
        # Not by `super`: a dataclass with slots is another class than the one in this scope.
        LiveState.__post_init__(self)
        self.open_exchanges = OpenExchanges(self.clock, picker=self.router.boot_id[:8])
        self.apply_config(self.config)
        self.router.settings.set_limits(self.router_limits(self.config), now=self.clock())

    @classmethod
    def serving(cls, live: LiveState, *, hold_s: float = HOLD_S) -> Self:
        """Return the picker that decides with the parts of `live`, which nothing else uses from then on."""
        return cls(
            **{part.name: getattr(live, part.name) for part in fields(live)},
            endpoints=Endpoints({}),
            hold_s=hold_s,
        )

    def router_limits(self, config: Config) -> RouterLimits:
        """Return the Router's bounds: no hedges, which Envoy cannot carry out, and fallbacks."""
        return replace(
            LiveState.router_limits(self, config), hedging=HedgeLimits(budget_ratio=0.0), fallbacks=FALLBACKS
        )

    def apply_config(self, config: Config) -> None:
        self.endpoints.configure(urls_of(config))
        self.passed_headers = frozenset(name.encode() for name in config.proxy.pass_headers)
