"""The same offers in virtual time, and the capacity that they are multiples of."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from gorgo.config.model import Config
from gorgo.errors import TraceError
from gorgo.lab.sim.fleet import fleet_of, limits_of
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.simulate.overload import AT_CAPACITY, EXACT, at_once
from gorgo.lab.traces import TraceRequest
from tests.overload.fleet import ROOT_CONFIG
from tests.overload.window import Offer, Served, cut, served

#: Time scales between which capacity is looked for.
HIGHEST, LOWEST = 1 / 16, 16.0


def simulated(offer: Offer, config: Config, *, held: bool, slo_ttft_ms: float, seed: int = 0) -> Served:
    """`offer` in virtual time, the fleet as `config` has it: held with a deadline, or sent at once."""
    limits = limits_of(config)
    run = run_once(
        SimJob(
            trace="offer",
            feed=feed_of(offer.requests),
            policy="gorgo-ms",
            fleet=fleet_of(config, source=ROOT_CONFIG),
            time_scale=offer.time_scale,
            limits=limits if held else at_once(limits),
            slo_ttft_ms=slo_ttft_ms if held else None,
            probe_interval_s=config.proxy.probe_interval_s,
            scrape_interval_s=config.proxy.scrape_interval_s,
            seed=seed,
            keep_requests=True,
        )
    )
    assert run.requests is not None, "they were to be kept"
    return served(run.requests, offered=len(offer.requests), lasts_s=offer.lasts_s)


def capacity_of(requests: Sequence[TraceRequest], config: Config, *, lasts_s: float) -> float:
    """The least time scale at which 95 % of what is offered for `lasts_s` is served well when sent at once, to 5 %.

    Raises `TraceError` where there is none. Engines are cold at first, so it is less than that of a whole trace.
    """

    def well(time_scale: float) -> bool:
        offer = cut(requests, load=1.0, capacity=time_scale, lasts_s=lasts_s)
        return simulated(offer, config, held=False, slo_ttft_ms=0.0).good >= AT_CAPACITY

    high = 1.0
    while high > HIGHEST and well(high):
        high /= 2
    while not well(high):
        high *= 2
        if high > LOWEST:
            raise TraceError(f"{lasts_s:g} s of this trace are at no load served well: leave out the longest requests")
    low = high / 2
    while high / low > EXACT:
        middle = sqrt(low * high)
        low, high = (low, middle) if well(middle) else (middle, high)
    return high
