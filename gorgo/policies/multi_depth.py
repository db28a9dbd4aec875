"""`multi-depth`: the replica that served the longest part of a prompt, learned at several depths from answers.

Owns the policy and its state. Its parts, in the order of the file:

- placement of a prompt without a route;
- `RouteTable`, the replica of each prefix;
- the prefixes of a prompt under which routes are stored and found;
- `MultiDepth`, which joins them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.numeric import Floats
from gorgo.core.policy.interface import Candidates, Choice, IndexKind, RouteStats
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.index import Origin
from gorgo.core.prompt.fingerprint import depths_of, marked_depths
from gorgo.policies.base import least_loaded, rendezvous_scores

# Placement of a prompt without a route: a replica by the hash of its beginning, some rules with respect to load.


_MASK = (1 << 64) - 1


def bounded_load(salt: NDArray[np.uint64], key: int, load: Floats, *, factor: float) -> int:
    """Return the first row in the key's order of replicas that is below `factor` times the mean load with the request.

    The order is that of rendezvous scores, in place of a ring.

    References
    ----------
    Mirrokni, Thorup and Zadimoghaddam, Consistent hashing with bounded loads, 2018.
    """
    cap = ceil(max(factor, 1.0) * (float(load.sum()) + 1.0) / len(load))
    return int(np.where(load < cap, rendezvous_scores(salt, key), np.uint64(0)).argmax())


def two_choices(salt: NDArray[np.uint64], key: int, load: Floats, *, bias: float) -> int:
    """Return the first row in the key's order of replicas, or the second if it has over `bias` requests less."""
    scores = rendezvous_scores(salt, key)
    first = int(scores.argmax())
    if len(scores) == 1:
        return first
    scores[first] = 0
    second = int(scores.argmax())
    return second if load[first] > load[second] + bias else first


def jump_hash(key: int, buckets: int) -> int:
    """Return the bucket of a key; one more bucket moves the least share of keys.

    References
    ----------
    Lamping and Veach, A fast, minimal memory, consistent hash algorithm, 2014.
    """
    bucket, following = -1, 0
    while following < buckets:
        bucket = following
        key = (key * 2862933555777941757 + 1) & _MASK
        following = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


# Routes of prefixes to replicas, bounded by number and age: the least trusted and longest unused are evicted first.


#: Model and hash of a prefix.
RouteKey = tuple[str | None, bytes]

#: Most routes, and the time without use after which one is void, s: Ranvier's.
MAX_ROUTES, TTL_S = 100_000, 3600.0


@dataclass(slots=True)
class _Route:
    replica: str
    used_s: float


class RouteTable:
    """The replica of each prefix.

    Theory of operation. Each origin has its routes in order of use, and a prefix has one route. A route replaces one of
    less or equal trust, or a void one. A full table evicts the longest unused route of the least trusted origin, so
    routes of other routers never displace those learned here.

    Parameters
    ----------
    max_routes:
        Bound of the table.
    ttl_s:
        Time without use after which a route is void.

    Example
    -------
    >>> routes = RouteTable()
    >>> routes.set_route((None, b"prefix"), "replica-a", Origin.LOCAL, now=0.0)
    >>> routes.replica_of((None, b"prefix"), now=3600.0), routes.replica_of((None, b"prefix"), now=7201.0)
    ('replica-a', None)
    """

    def __init__(self, max_routes: int = MAX_ROUTES, ttl_s: float = TTL_S) -> None:
        self.max_routes = max_routes
        self.ttl_s = ttl_s
        #: Routes that a full table had no place for.
        self.evicted: Counter[Origin] = Counter()
        self._by_origin: tuple[OrderedDict[RouteKey, _Route], ...] = tuple(OrderedDict() for _ in Origin)

    def __len__(self) -> int:
        return sum(map(len, self._by_origin))

    def routes_of(self, origin: Origin) -> int:
        """Return the routes of one origin."""
        return len(self._by_origin[origin])

    def replica_of(self, key: RouteKey, *, now: float) -> str | None:
        """Return the replica of a prefix and count the use; `None` without a valid route."""
        for routes in reversed(self._by_origin):
            route = routes.get(key)
            if route is None:
                continue
            if now - route.used_s > self.ttl_s:
                del routes[key]
                return None
            route.used_s = now
            routes.move_to_end(key)
            return route.replica
        return None

    def set_route(self, key: RouteKey, replica: str, origin: Origin, *, now: float) -> None:
        """Add or replace the route of a prefix; a valid one of more trust stays."""
        for other, routes in enumerate(self._by_origin):
            route = routes.get(key)
            if route is not None:
                if other > origin and now - route.used_s <= self.ttl_s:
                    return
                del routes[key]
        self._by_origin[origin][key] = _Route(replica, now)
        self._evict()

    def set_limits(self, max_routes: int, ttl_s: float) -> None:
        """Replace both bounds, and evict what exceeds the first."""
        self.max_routes, self.ttl_s = max_routes, ttl_s
        self._evict()

    def oldest_s(self, origin: Origin) -> float | None:
        """Return when the longest unused route of an origin was used; `None` without one."""
        return next((route.used_s for route in self._by_origin[origin].values()), None)

    def _evict(self) -> None:
        while len(self) > self.max_routes:
            least, routes = next(
                (origin, routes) for origin, routes in zip(Origin, self._by_origin, strict=True) if routes
            )
            routes.popitem(last=False)
            self.evicted[least] += 1

    def check(self) -> None:
        """Assert the bound, one route per prefix, and the order of use."""
        assert len(self) <= self.max_routes, "the table is bounded"
        assert len(set().union(*self._by_origin)) == len(self), "a prefix has one route"
        for routes in self._by_origin:
            uses = [route.used_s for route in routes.values()]
            assert uses == sorted(uses), "routes are in order of use"


# The prefixes of a prompt that have a route: at the ends of its messages, else every 128 tokens.
#
# Theory of operation. Ends of messages are aligned down to 16 tokens, the block of most engines, so that a small error
# of an estimate changes no key. A prefix is known by the hash of its last block: with exact tokens that of 16 tokens,
# else that of the text, whose blocks have some 64. An end is then aligned to those.


#: Tokens to which ends of messages are aligned, and of the shortest prefix before that: Ranvier's.
ALIGNED_TOKENS = 16
LEAST_TOKENS = 4
_HASH_BYTES = 8


class Prefix(NamedTuple):
    """A prefix of a prompt: the key of its route, and its length in tokens."""

    key: RouteKey
    tokens: float


def prefixes_of(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes of a prompt, the shortest first, each once."""
    if not request.boundaries:
        return even_prefixes(request)
    ends = [end for end in request.boundaries if end >= LEAST_TOKENS]
    fine = max((size for size in request.kv_hashes if ALIGNED_TOKENS % size == 0), default=None)
    return _by_text(request, ends) if fine is None else _by_tokens(request, ends, fine)


def even_prefixes(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes every 128 tokens of the text."""
    depths = depths_of(len(request.blocks) // _HASH_BYTES, request.block_tokens)
    return [_text_prefix(request, depth) for depth in depths]


def remote_prefixes(request: RouteRequest) -> list[Prefix]:
    """Return the prefixes that other routers name."""
    full_blocks = len(request.blocks) // _HASH_BYTES
    depths = marked_depths(full_blocks, request.block_tokens, request.boundaries)
    return [_text_prefix(request, depth) for depth in depths]


def _by_tokens(request: RouteRequest, ends: Iterable[int], block_tokens: int) -> list[Prefix]:
    hashes = request.kv_hashes[block_tokens]
    step = ALIGNED_TOKENS // block_tokens
    depths = dict.fromkeys(end // ALIGNED_TOKENS for end in ends)
    return [
        Prefix(_token_key(request, hashes[depth * step - 1]), float(depth * ALIGNED_TOKENS))
        for depth in depths
        if 0 < depth * step <= len(hashes)
    ]


def _token_key(request: RouteRequest, own_hash: int) -> RouteKey:
    """Return the key of a hash of tokens, which is that of no text."""
    return request.recorded_model, b"tokens" + own_hash.to_bytes(_HASH_BYTES, "little")


def _by_text(request: RouteRequest, ends: Iterable[int]) -> list[Prefix]:
    full = len(request.blocks) // _HASH_BYTES
    depths = dict.fromkeys(int(end / request.block_tokens) for end in ends)
    return [_text_prefix(request, depth) for depth in depths if 0 < depth <= full]


def _text_prefix(request: RouteRequest, depth: int) -> Prefix:
    key = request.recorded_model, request.blocks[(depth - 1) * _HASH_BYTES : depth * _HASH_BYTES]
    return Prefix(key, depth * request.block_tokens)


#: The value of weight `depths` with a route at every depth; others have one at the deepest alone.
ALL_DEPTHS = 1


class MultiDepth:
    """The longest match among routes learned from answers; a hash of the prompt's beginning without one.

    Theory of operation. A completed attempt leaves a route at the end of each message of its prompt, so a later prompt
    that shares only the beginning finds its replica. A prompt without messages has one every 128 tokens, and so have
    the routes of other routers. If that replica has far more requests than the median, the least loaded
    serves. The route still names the replica of the match or of the hash: a diversion is temporary, and learning it
    would move prefixes to and fro. The post's router with one depth (`depths` 0) has a route for the whole prompt
    alone, and places a prompt without a route by the hash of all of it: prompts with one beginning are spread.

    References
    ----------
    Ranvier, multi-depth prefix routing.
    """

    name: ClassVar[str] = "multi-depth"
    summary: ClassVar[str] = (
        "Ranvier: the replica of the longest prefix answered before, by routes at several depths; else by a hash; the "
        "least loaded above twice the median load"
    )
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    hashed_block_tokens: ClassVar[int] = ALIGNED_TOKENS
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = (
        WeightSpec(
            "depths",
            1.0,
            0.0,
            2.0,
            "1: a route at the end of each message, else each 128 tokens; 2: the deepest alone; 0: 2, the whole hashed",
            tunable="no",
        ),
        WeightSpec(
            "miss",
            0.0,
            0.0,
            3.0,
            "without a route: 0 bounded-load hash, 1 the better of two, 2 jump hash, 3 hash modulo replicas",
            tunable="no",
        ),
        WeightSpec("load_factor", 1.25, 1.0, 10.0, "bound of `miss` 0, in mean loads", tunable="no"),
        WeightSpec("bias", 2.0, 0.0, 1000.0, "requests by which the second of `miss` 1 must be better", tunable="no"),
        WeightSpec(
            "override", 2.0, 0.0, 100.0, "median loads above which the least loaded serves; 0: off", tunable="no"
        ),
        WeightSpec("margin", 2.0, 0.0, 1000.0, "requests added to that bound", tunable="no"),
    )

    def __init__(self) -> None:
        self.routes = RouteTable()

    def choose(
        self, request: RouteRequest, candidates: Candidates, weights: Weights, rng: np.random.Generator
    ) -> Choice:
        load = candidates.in_flight_requests
        depths = int(weights["depths"])
        prefixes = prefixes_of(request)
        matched = np.zeros(len(candidates))
        fallback = None
        longest = self._longest(self._with_remote(request, prefixes), candidates)
        if longest is None:
            key = _prompt_hash(request) if depths else whole_hash(request)
            row, fallback = _place(key, candidates, weights), "no_match"
        else:
            row, matched[longest[0]] = longest
        first_chosen = candidates.names[row]
        learned = prefixes if depths == ALL_DEPTHS else prefixes[-1:]
        if _is_overloaded(row, load, weights):
            row, fallback = least_loaded(candidates, rng), "overloaded"

        def learn(now: float) -> None:
            for prefix in learned:
                self.routes.set_route(prefix.key, first_chosen, Origin.LOCAL, now=now)

        terms = {"route_tokens": matched, "in_flight": load.copy()}
        return Choice(row, terms, fallback=fallback, learn=learn if prefixes else None)

    def add_remote_route(self, model: str | None, prefix: bytes, replica: str, *, now: float) -> None:
        """Add the route of a prefix that another router had answered."""
        self.routes.set_route((model, prefix), replica, Origin.REMOTE, now=now)

    @property
    def evicted_routes(self) -> Mapping[Origin, int]:
        """The routes that a full table had no place for, by origin."""
        return self.routes.evicted

    def set_route_limits(self, max_routes: int, ttl_s: float) -> None:
        """Bound the routes by number, and by the time without use after which one is void, s."""
        self.routes.set_limits(max_routes, ttl_s)

    def route_stats(self, *, now: float) -> RouteStats:
        """Return the number, the age and the evictions of the routes by origin."""
        routes = self.routes
        oldest_s = {origin: routes.oldest_s(origin) for origin in Origin}
        return RouteStats(
            max_routes=routes.max_routes,
            ttl_s=routes.ttl_s,
            routes={origin.name.lower(): routes.routes_of(origin) for origin in Origin},
            unused_s={origin.name.lower(): now - used_s for origin, used_s in oldest_s.items() if used_s is not None},
            evicted={origin.name.lower(): routes.evicted[origin] for origin in Origin},
        )

    def _with_remote(self, request: RouteRequest, prefixes: list[Prefix]) -> list[Prefix]:
        """Return the prefixes of a prompt, with those that other routers name while there are any."""
        if not request.boundaries or not self.routes.routes_of(Origin.REMOTE):
            return prefixes
        return sorted([*prefixes, *remote_prefixes(request)], key=lambda prefix: prefix.tokens)

    def _longest(self, prefixes: list[Prefix], candidates: Candidates) -> tuple[int, float] | None:
        """Return the row and the tokens of the longest prefix whose replica is a candidate."""
        names, now = candidates.names, candidates.now
        for prefix in reversed(prefixes):
            replica = self.routes.replica_of(prefix.key, now=now)
            if replica is not None and replica in names:
                return names.index(replica), prefix.tokens
        return None


def _prompt_hash(request: RouteRequest) -> int:
    """Return the hash of the first 128 tokens; of the first 256 for a shorter prompt."""
    prefixes = even_prefixes(request)
    return int.from_bytes(prefixes[0].key[1], "little") if prefixes else request.prefix_hash


def whole_hash(request: RouteRequest) -> int:
    """Return the hash of a whole prompt; its text behind the last full block is known by its length."""
    size = request.prompt_tokens if request.text_bytes is None else request.text_bytes
    numbers = b"".join(number.to_bytes(_HASH_BYTES, "little") for number in (request.prefix_hash & _MASK, size))
    digest = blake2b(request.blocks[-_HASH_BYTES:] + numbers, digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


def _place(key: int, candidates: Candidates, weights: Weights) -> int:
    load, rule = candidates.in_flight_requests, int(weights["miss"])
    if rule == 0:
        return bounded_load(candidates.salt, key, load, factor=weights["load_factor"])
    if rule == 1:
        return two_choices(candidates.salt, key, load, bias=weights["bias"])
    return jump_hash(key, len(candidates)) if rule == 2 else key % len(candidates)


def _is_overloaded(row: int, load: Floats, weights: Weights) -> bool:
    factor = weights["override"]
    return factor > 0.0 and bool(load[row] > factor * np.median(load) + weights["margin"])
