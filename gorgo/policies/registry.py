"""Policies by name: those of this package, and those of entry points.

A new policy here is one class and one line below. Another package adds its own by an entry point in the group
`gorgo.policies` with the policy's name and the class as object; it cannot replace a name of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import get_args

from gorgo.core.policy.interface import IndexKind, Policy, validate_shadow
from gorgo.errors import UnknownPolicy, closest

ENTRY_POINTS = "gorgo.policies"

#: A policy per line, in the order of the documentation: its name, and module of `gorgo.policies` and class.
_BUILT_IN = {
    "gorgo": "gorgo:Gorgo",
    "gorgo-ms": "gorgo_ms:GorgoMs",
    "least-load": "least_load:LeastLoad",
    "least-request": "least_load:LeastRequest",
    "prefix-cache": "prefix_cache:PrefixCache",
    "simple-session-affinity": "baselines:SimpleSessionAffinity",
    "random": "baselines:Random",
    "round-robin": "baselines:RoundRobin",
    "power-of-two": "least_load:PowerOfTwo",
    "nearest": "baselines:Nearest",
    "prefix-cache-and-load": "prefix_cache:PrefixCacheAndLoad",
    "prefix-threshold": "prefix_cache:PrefixThreshold",
    "load-prefix": "prefix_cache:LoadPrefix",
    "mooncake": "published:Mooncake",
    "sticky-least-loaded": "published:StickyLeastLoaded",
    "multi-depth": "multi_depth:MultiDepth",
    "lmetric": "published:LMetric",
    "dualmap": "published:DualMap",
    "skywalker": "published:SkyWalker",
    "preble-e2": "published:PrebleE2",
    "lodestar": "learned.lodestar:Lodestar",
    "predicted-latency": "learned.predicted_latency:PredictedLatency",
    "gorgo-residual": "learned.gorgo_residual:GorgoResidual",
    "least-load-first-token": "least_load:LeastLoadFirstToken",
    "least-request-in-flight": "least_load:LeastRequestInFlight",
    "prefix-cache-in-flight": "prefix_cache:PrefixCacheInFlight",
}

# Names that comparisons take.

#: The published policy, the paper's four baselines, and chance.
PUBLISHED: tuple[str, ...] = (
    "gorgo",
    "least-load",
    "least-request",
    "prefix-cache",
    "simple-session-affinity",
    "random",
)
OURS, PAPER, RANDOM = "gorgo-ms", "gorgo", "random"
#: The paper's four, as its authors released them.
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, RANDOM))
#: With the readings that are stronger than the released ones: no claim of this project looks better for a weaker one.
#: (`least-load-first-token` is weaker at every load.)
ALL_READINGS = (*BASELINES, "least-request-in-flight", "prefix-cache-in-flight")


class _Policies(Mapping[str, type[Policy]]):
    """The classes by name, each imported when it is asked for: a process has one policy, or two."""

    def __getitem__(self, name: str) -> type[Policy]:
        kind: type[Policy] = resolve_name(f"gorgo.policies.{_BUILT_IN[name]}")
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(_BUILT_IN)

    def __contains__(self, name: object) -> bool:
        return name in _BUILT_IN

    def __len__(self) -> int:
        return len(_BUILT_IN)


#: The policies of this package, in the order of the README's table.
POLICIES: Mapping[str, type[Policy]] = _Policies()


def policy_names() -> list[str]:
    """Return every name that `make_policy` accepts, those of this package first."""
    return [*POLICIES, *sorted(_third_party())]


def make_policy(name: str) -> Policy:
    """A new instance, with fresh state. Raises `UnknownPolicy` with the names that there are.

    Example
    -------
    >>> make_policy("gorgo").unit
    'tokens'
    """
    if name in POLICIES:
        return POLICIES[name]()
    offered = _third_party().get(name)
    if offered is None:
        names = policy_names()
        raise UnknownPolicy(f"no policy named {name!r}{closest(name, names)}; there are: {', '.join(names)}")
    return _loaded(offered)


def make_shadow(name: str | None, policy: Policy) -> Policy | None:
    """A new instance to score the decisions of `policy`, if there is a name.

    Raises `ConfigError` where the two cannot go together, and `UnknownPolicy`.
    """
    if name is None:
        return None
    shadow = make_policy(name)
    validate_shadow(policy, shadow)
    return shadow


def _loaded(offered: EntryPoint) -> Policy:
    place = f"{offered.value} of the entry point {offered.name!r}"
    try:
        policy = offered.load()()
    except Exception as error:
        raise UnknownPolicy(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [name for name in (*Policy.__annotations__, "choose") if not hasattr(policy, name)]
    if missing or not isinstance(policy, Policy):
        raise UnknownPolicy(
            f"{place} has no {', '.join(missing)}; expected what gorgo.core.policy.interface.Policy has"
        )
    if policy.index not in get_args(IndexKind):
        raise UnknownPolicy(f"{place} has the index {policy.index!r}; expected one of {', '.join(get_args(IndexKind))}")
    if policy.name != offered.name:
        raise UnknownPolicy(f"{place} has the name {policy.name!r}; expected that of the entry point")
    return policy


def _third_party() -> dict[str, EntryPoint]:
    """Looked up on each call, never at import: finding them reads files."""
    return {found.name: found for found in entry_points(group=ENTRY_POINTS) if found.name not in POLICIES}
