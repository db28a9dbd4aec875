"""Routes of prefixes to replicas, bounded by number and age: the least trusted and longest unused are evicted first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from gorgo.core.prefix.origin import Origin

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
        self._max_routes = max_routes
        self._ttl_s = ttl_s
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
            if now - route.used_s > self._ttl_s:
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
                if other > origin and now - route.used_s <= self._ttl_s:
                    return
                del routes[key]
        self._by_origin[origin][key] = _Route(replica, now)
        if len(self) > self._max_routes:
            least, routes = next(
                (origin, routes) for origin, routes in zip(Origin, self._by_origin, strict=True) if routes
            )
            routes.popitem(last=False)
            self.evicted[least] += 1

    def check(self) -> None:
        """Assert the bound, one route per prefix, and the order of use."""
        assert len(self) <= self._max_routes, "the table is bounded"
        assert len(set().union(*self._by_origin)) == len(self), "a prefix has one route"
        for routes in self._by_origin:
            uses = [route.used_s for route in routes.values()]
            assert uses == sorted(uses), "routes are in order of use"
