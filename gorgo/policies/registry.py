"""Policies by name: those of this package, and those of entry points.

A new policy here is one file and one line below. Another package adds its own by an entry point in the group
`gorgo.policies` with the policy's name and the class as object; it cannot replace a name of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import validate_shadow
from gorgo.errors import UnknownPolicy, closest
from gorgo.policies.gorgo import Gorgo
from gorgo.policies.gorgo_ms import GorgoMs
from gorgo.policies.least_load import LeastLoad
from gorgo.policies.least_request import LeastRequest
from gorgo.policies.nearest import Nearest
from gorgo.policies.power_of_two import PowerOfTwo
from gorgo.policies.prefix_cache import PrefixCache
from gorgo.policies.prefix_cache_and_load import PrefixCacheAndLoad
from gorgo.policies.prefix_threshold import PrefixThreshold
from gorgo.policies.random import Random
from gorgo.policies.round_robin import RoundRobin
from gorgo.policies.session_affinity import SimpleSessionAffinity

ENTRY_POINTS = "gorgo.policies"

_BUILT_IN: tuple[type[Policy], ...] = (
    Gorgo,
    GorgoMs,
    LeastLoad,
    LeastRequest,
    PrefixCache,
    SimpleSessionAffinity,
    Random,
    RoundRobin,
    PowerOfTwo,
    Nearest,
    PrefixCacheAndLoad,
    PrefixThreshold,
)

#: The policies of this package, in the order of the README's table.
POLICIES: Mapping[str, type[Policy]] = MappingProxyType({policy.name: policy for policy in _BUILT_IN})


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
    try:
        policy = offered.load()()
    except Exception as error:
        where = f"{offered.value} of the entry point {name!r}"
        raise UnknownPolicy(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(policy, Policy):
        raise UnknownPolicy(
            f"{offered.value} of the entry point {name!r} is not a policy (gorgo.core.policy.interface.Policy)"
        )
    return policy


def make_shadow(name: str | None, policy: Policy) -> Policy | None:
    """A new instance to score the decisions of `policy`, if there is a name.

    Raises `ConfigError` where the two cannot go together, and `UnknownPolicy`.
    """
    if name is None:
        return None
    shadow = make_policy(name)
    validate_shadow(policy, shadow)
    return shadow


def _third_party() -> dict[str, EntryPoint]:
    """Looked up on each call, never at import: finding them reads files."""
    return {found.name: found for found in entry_points(group=ENTRY_POINTS) if found.name not in POLICIES}
