from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from aiohttp.client_proto import ResponseHandler

from gorgo.core.path import INITIAL_WINDOW_BYTES, Windows
from gorgo.proxy.connections import KeptConnections, idling_shrinks
from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, delta, stream

ONE_HUNDRED_KB = {"messages": [{"role": "user", "content": "w" * 100_000}], "stream": True}


class FakeLink:
    def __init__(self) -> None:
        self.open = True

    def is_connected(self) -> bool:
        return self.open


class Pool:
    """Kept connections under a clock of their own."""

    def __init__(self, *, shrinks: bool = True) -> None:
        self.now = 100.0
        self.kept = KeptConnections(keep_s=4.0, idling_shrinks=shrinks, clock=lambda: self.now)

    def serve(self, link: FakeLink, body_bytes: int) -> bool:
        reused = self.kept.taken(link, body_bytes)
        self.kept.given_back(link)
        return reused


def test_a_pool_without_an_idle_connection_opens_one() -> None:
    pool, link = Pool(), FakeLink()
    assert pool.kept.next() is None
    pool.kept.taken(link, 500)
    assert pool.kept.next() is None


def test_the_last_given_back_is_the_next_one_taken() -> None:
    pool, small, large = Pool(), FakeLink(), FakeLink()
    pool.serve(small, 500)
    pool.serve(large, 100_000)
    assert pool.kept.next() == (Windows(114_600.0, 65_535.0), 0.0)
    pool.kept.taken(large, 500)
    assert pool.kept.next() == (Windows(), 0.0)


def test_a_connection_tells_whether_it_had_served_before() -> None:
    pool, link = Pool(), FakeLink()
    assert [pool.serve(link, 500), pool.serve(link, 500)] == [False, True]


def test_closed_and_expired_connections_are_passed_over() -> None:
    pool, closed, expired, kept = Pool(), FakeLink(), FakeLink(), FakeLink()
    pool.serve(expired, 500)
    pool.now += 4.5
    pool.serve(kept, 100_000)
    pool.serve(closed, 500)
    closed.open = False
    found = pool.kept.next()
    assert found is not None
    assert found[0].congestion == 114_600.0
    pool.now += 4.5
    assert pool.kept.next() is None
    assert pool.kept.alive == 2


def test_a_ping_on_an_idle_connection_keeps_it_open_but_not_its_window() -> None:
    pool, link = Pool(), FakeLink()
    pool.serve(link, 100_000)
    pool.now += 2.0
    pool.serve(link, 200)
    assert pool.kept.next() == (Windows(INITIAL_WINDOW_BYTES, 65_535.0), 0.0)


def test_where_idling_costs_nothing_a_window_stays() -> None:
    pool, link = Pool(shrinks=False), FakeLink()
    pool.serve(link, 100_000)
    pool.now += 2.0
    pool.serve(link, 200)
    found = pool.kept.next()
    assert found == (Windows(114_600.0, 65_535.0), float("-inf"))


@pytest.mark.parametrize(
    ("restart", "control", "shrinks"), [("1", "cubic", True), ("0", "cubic", False), ("1", "bbr", False)]
)
def test_the_kernel_s_settings_are_read(tmp_path: Path, restart: str, control: str, shrinks: bool) -> None:
    (tmp_path / "tcp_slow_start_after_idle").write_text(restart + "\n")
    (tmp_path / "tcp_congestion_control").write_text(control + "\n")
    assert idling_shrinks(tmp_path) is shrinks


def test_a_kernel_without_such_settings_counts_as_one_that_shrinks(tmp_path: Path) -> None:
    assert idling_shrinks(tmp_path / "none")


async def test_the_router_hears_when_a_replica_hangs_up(start: Start) -> None:
    proxy = await start.fleet([stream(delta("a"), DONE)])
    columns = proxy.state.router._fleet.columns
    await proxy.client.post("/v1/chat/completions", json=ONE_HUNDRED_KB)
    await until(lambda: columns.congestion_bytes[0] > 0.0)
    for link in list(proxy.state.targets["r0"].upstream._pool._sent):
        cast(ResponseHandler, link).close()
    await until(lambda: columns.congestion_bytes[0] == 0.0)


async def test_the_router_prices_the_connection_that_the_next_request_gets(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.proxy.upstream.idling_shrinks", lambda: False)
    proxy = await start.fleet([stream(delta("a"), DONE)], proxy=replace(QUIET, policy="gorgo-ms"))
    (before,) = proxy.state.router.fleet_view(now=proxy.state.clock())
    assert before.rtt_ms is not None
    trips = []
    for _ in range(3):
        answer = await proxy.client.post("/v1/chat/completions", json=ONE_HUNDRED_KB)
        (decision,) = proxy.state.router.decisions(answer.headers["x-request-id"])
        trips.append(round(float(decision.terms["rtt"][0]) / before.rtt_ms, 6))
        await proxy.idle()
    assert trips == [3, 2, 1]
