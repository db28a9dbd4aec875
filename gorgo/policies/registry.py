"""Policies by name: those of this package, and those of entry points.

A new policy here is one file and one line below. Another package adds its own by an entry point in the group
`gorgo.policies` with the policy's name and the class as object; it cannot replace a name of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from types import MappingProxyType
from typing import get_args

from gorgo.core.policy.interface import IndexKind, Policy
from gorgo.core.policy.shadow import validate_shadow
from gorgo.errors import UnknownPolicy, closest

ENTRY_POINTS = "gorgo.policies"

#: A policy per line, in the order of the documentation: module of `gorgo.policies` and class.
_BUILT_IN = (
    "gorgo:Gorgo",
    "gorgo_ms:GorgoMs",
    "least_load:LeastLoad",
    "least_request:LeastRequest",
    "prefix_cache:PrefixCache",
    "session_affinity:SimpleSessionAffinity",
    "random:Random",
    "round_robin:RoundRobin",
    "power_of_two:PowerOfTwo",
    "nearest:Nearest",
    "prefix_cache_and_load:PrefixCacheAndLoad",
    "prefix_threshold:PrefixThreshold",
    "load_prefix:LoadPrefix",
    "mooncake:Mooncake",
    "sticky.sticky_least_loaded:StickyLeastLoaded",
    "sticky.multi_depth:MultiDepth",
    "learned.lodestar:Lodestar",
    "learned.predicted_latency:PredictedLatency",
    "learned.gorgo_residual:GorgoResidual",
    "least_load:LeastLoadFirstToken",
    "least_request:LeastRequestInFlight",
    "prefix_cache:PrefixCacheInFlight",
)


def _load(lines: Iterable[str]) -> Mapping[str, type[Policy]]:
    kinds: list[type[Policy]] = [resolve_name(f"gorgo.policies.{line}") for line in lines]
    return MappingProxyType({kind.name: kind for kind in kinds})


#: The policies of this package, in the order of the README's table.
POLICIES = _load(_BUILT_IN)


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
