from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gorgo.core.prefix.origin import Origin
from gorgo.policies.sticky.routes import RouteKey, RouteTable

LOCAL, PUSH, REMOTE = Origin.LOCAL, Origin.PUSH, Origin.REMOTE


def key(number: int) -> RouteKey:
    return None, number.to_bytes(8, "little")


@dataclass
class Twin:
    """The same contract by one list of routes, longest unused first; each answer is found by looking at everything."""

    max_routes: int
    ttl_s: float
    routes: list[tuple[RouteKey, str, Origin, float]] = field(default_factory=list)

    def replica_of(self, key: RouteKey, *, now: float) -> str | None:
        found = [route for route in self.routes if route[0] == key]
        self.routes = [route for route in self.routes if route[0] != key]
        valid = [route for route in found if now - route[3] <= self.ttl_s]
        self.routes += [(key, replica, origin, now) for _, replica, origin, _ in valid]
        return valid[0][1] if valid else None

    def set_route(self, key: RouteKey, replica: str, origin: Origin, *, now: float) -> None:
        if any(each == key and other > origin and now - used_s <= self.ttl_s for each, _, other, used_s in self.routes):
            return
        self.routes = [route for route in self.routes if route[0] != key] + [(key, replica, origin, now)]
        if len(self.routes) > self.max_routes:
            least = min(route[2] for route in self.routes)
            self.routes.remove(next(route for route in self.routes if route[2] == least))


def test_any_order_of_uses_gives_what_a_plain_list_gives() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        table, twin = RouteTable(6, ttl_s=20.0), Twin(6, ttl_s=20.0)
        now = 0.0
        for step in range(300):
            now += float(rng.choice([0.0, 1.0, 7.0]))
            wanted = key(int(rng.integers(10)))
            if rng.random() < 0.5:
                assert table.replica_of(wanted, now=now) == twin.replica_of(wanted, now=now)
            else:
                origin = Origin(int(rng.integers(3)))
                table.set_route(wanted, f"replica-{step}", origin, now=now)
                twin.set_route(wanted, f"replica-{step}", origin, now=now)
            table.check()
            assert len(table) == len(twin.routes)
        assert [table.replica_of(key(n), now=now) for n in range(10)] == [
            twin.replica_of(key(n), now=now) for n in range(10)
        ]


def test_a_full_table_evicts_foreign_routes_first_then_pushed_ones_then_the_longest_unused() -> None:
    table = RouteTable(3)
    for number, origin in enumerate((LOCAL, PUSH, REMOTE)):
        table.set_route(key(number), "a", origin, now=0.0)
    found = []
    for number in (3, 4, 5):
        table.replica_of(key(0), now=1.0)
        table.set_route(key(number), "a", LOCAL, now=1.0)
        found.append([each for each in range(6) if table.replica_of(key(each), now=1.0) is not None])
    assert found == [[0, 1, 3], [0, 3, 4], [0, 4, 5]]


def test_a_full_table_of_own_routes_takes_no_foreign_one() -> None:
    table = RouteTable(1)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    table.set_route(key(1), "b", REMOTE, now=0.0)
    assert (table.replica_of(key(0), now=0.0), table.replica_of(key(1), now=0.0)) == ("a", None)


def test_a_foreign_route_replaces_an_own_one_only_when_that_is_void() -> None:
    table = RouteTable(ttl_s=10.0)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    table.set_route(key(0), "b", REMOTE, now=10.0)
    assert table.replica_of(key(0), now=10.0) == "a"
    table.set_route(key(0), "b", REMOTE, now=20.1)
    assert table.replica_of(key(0), now=20.1) == "b"
    assert len(table) == 1


def test_a_use_prolongs_a_route() -> None:
    table = RouteTable(ttl_s=10.0)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    assert [table.replica_of(key(0), now=now) for now in (10.0, 20.0, 30.1)] == ["a", "a", None]
    assert len(table) == 0


def test_evicted_routes_are_counted_by_origin() -> None:
    table = RouteTable(2)
    for number, origin in enumerate((LOCAL, REMOTE, REMOTE, LOCAL, LOCAL)):
        table.set_route(key(number), "a", origin, now=float(number))
    assert table.evicted == {REMOTE: 2, LOCAL: 1}
