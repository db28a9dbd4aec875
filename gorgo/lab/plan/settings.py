"""What a plan may buy and what it has to reach: the file with accelerators, prices, quotas, clients and objectives.

Owns the records and the checks between them. No price comes with the project: prices change, and a contract has its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gorgo.config.load import load_settings
from gorgo.errors import ConfigError
from gorgo.lab.sim.engine.profiles import EngineProfile, named_profile

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: Replicas of one kind in one region. The search goes through combinations, and a larger pool is planned in units.
QUOTA_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """LowerBounds that a request has to meet, each as its client sees it; at least one.

    Parameters
    ----------
    ttft_ms, tpot_ms, e2e_s:
        First token, time per output token after it, and whole answer.
    share:
        Share of a region's requests that meet all of them: 0.95 and `ttft_ms` are a p95 TTFT.
    """

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_s: Positive | None = None
    share: Annotated[float, Field(gt=0, le=1)] = 0.95

    @property
    def first_token_s(self) -> float | None:
        """Return the time within which a first token has to be there, s; None if none has to."""
        bounds = [bound for bound in (None if self.ttft_ms is None else self.ttft_ms / 1e3, self.e2e_s) if bound]
        return min(bounds, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGroup:
    """ClientGroup of one region.

    Parameters
    ----------
    region:
        Names them.
    rtt_ms:
        Mean round trip to the router.
    shift_h:
        Their day begins so much later than that of the trace, h; the trace is turned round by it.
    trace:
        Their own; default: that of the command.
    objective:
        Their own; default: that of the file.
    """

    region: str
    rtt_ms: Amount = 0.0
    shift_h: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    trace: str | None = None
    objective: Objective | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A kind of replica that can be had.

    Parameters
    ----------
    profile:
        Engine profile: a name of `gorgo profiles`, or a file of `gorgo calibrate`.
    price_per_hour:
        Of one replica, by region; a region without a price has none.
    quota:
        Most replicas, by region.
    """

    profile: str
    price_per_hour: Mapping[str, Amount]
    quota: Mapping[str, Annotated[int, Field(ge=0, le=QUOTA_MAX)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The file of `gorgo plan --settings`.

    Parameters
    ----------
    router:
        Region of the router.
    rtt_ms:
        Mean round trip from the router to each region with replicas.
    accelerators:
        What can be had, by name.
    objective:
        Of all clients that have none of their own.
    clients:
        Default: all clients are beside the router.
    egress_per_gb:
        Price of a gigabyte that leaves a region for the router's, or the router's for another; default: nothing.
    bytes_per_token:
        Of an answer on its way to the router: a token's event of a stream.
    policy:
        Of the router.
    """

    router: str
    rtt_ms: Mapping[str, Amount]
    accelerators: Mapping[str, Accelerator]
    objective: Objective
    clients: Sequence[ClientGroup] = ()
    egress_per_gb: Mapping[str, Amount] = field(default_factory=dict)
    bytes_per_token: Amount = 200.0
    policy: str = "gorgo-ms"

    @property
    def groups(self) -> Sequence[ClientGroup]:
        """Return the clients, each with an objective."""
        clients = self.clients or (ClientGroup(region=self.router),)
        return tuple(replace(one, objective=one.objective or self.objective) for one in clients)

    def kinds(self) -> tuple[Kind, ...]:
        """Return every kind of replica with a price and a quota, cheapest first. Raises `UnknownProfile`."""
        kinds = [
            Kind(region=region, accelerator=name, profile=named_profile(one.profile), profile_name=one.profile,
                 price_per_hour=price, quota=one.quota[region], rtt_s=self.rtt_ms[region] / 1e3)
            for name, one in self.accelerators.items()
            for region, price in one.price_per_hour.items()
            if one.quota.get(region)
        ]  # fmt: skip
        return tuple(sorted(kinds, key=lambda kind: (kind.price_per_hour, kind.region, kind.accelerator)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Replicas that are alike: an accelerator in a region; `rtt_s` is the round trip from the router."""

    region: str
    accelerator: str
    profile: EngineProfile
    profile_name: str
    price_per_hour: float
    quota: int
    rtt_s: float

    @property
    def name(self) -> str:
        return f"{self.accelerator} in {self.region}"


def read_settings(path: Path) -> PlanSettings:
    """Return the checked file. Raises `ConfigError` with the key, and `UnknownProfile`."""
    settings = load_settings(path, PlanSettings)
    for key, message in _problems(settings):
        raise ConfigError(f"{path}: {key}: {message}")
    return settings


def _problems(settings: PlanSettings) -> Sequence[tuple[str, str]]:
    objectives = [("objective", settings.objective)]
    objectives += [(f"clients.{one.region}.objective", one.objective) for one in settings.clients if one.objective]
    problems = [
        (key, "no bound; expected ttft_ms, tpot_ms or e2e_s")
        for key, objective in objectives
        if objective.ttft_ms is objective.tpot_ms is objective.e2e_s is None
    ]
    regions = [one.region for one in settings.clients]
    problems += [("clients", f"region {one} twice") for one in sorted(set(regions)) if regions.count(one) > 1]
    if not settings.accelerators:
        problems.append(("accelerators", "none; expected what can be had"))
    for name, one in settings.accelerators.items():
        for region in one.price_per_hour:
            if region not in settings.rtt_ms:
                problems.append((f"accelerators.{name}.price_per_hour", f"{region}: expected a region of rtt_ms"))
            if region not in one.quota:
                problems.append((f"accelerators.{name}.quota", f"{region}: missing; expected the most replicas there"))
        problems += [
            (f"accelerators.{name}.quota", f"{region}: expected a region with a price")
            for region in one.quota
            if region not in one.price_per_hour
        ]
    if not problems and not settings.kinds():
        problems.append(("accelerators", "every quota is 0; expected a replica that can be had"))
    return problems
