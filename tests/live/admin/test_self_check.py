"""A look inside the process: off by default, and it says what does not hold."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import Running, Start, config_for
from tests.proxy.fakes import DONE, event, stream
from tests.proxy.test_requests import checked

COMPLETIONS = "/v1/completions"
#: Two blocks of the prefix index.
ASKED = {"prompt": "long " * 120, "stream": True}


@pytest.fixture
async def fleet(start: Start) -> Running:
    replicas = [await start.replica(stream(event({"choices": [{"text": "a"}]}), DONE)) for _ in range(2)]
    return await start.proxy(config_for(replicas), replicas, environ={"GORGO_INTERNAL_ROUTES": "1"})


async def test_it_is_off_by_default(start: Start) -> None:
    fleet = await start.fleet([stream(DONE)])
    checked(await fleet.admin.get("/admin/check"), 404, "not_found")


async def test_an_idle_proxy_has_nothing_open_and_every_invariant_holds(fleet: Running) -> None:
    assert (await fleet.client.post(COMPLETIONS, json=ASKED)).status_code == 200
    await fleet.idle()
    inside = (await fleet.admin.get("/admin/check")).json()
    assert inside["violation"] is None
    assert (inside["in_flight"], inside["queued"], inside["exchanges"], inside["draining"]) == (0, 0, 0, 0)
    assert (inside["buffered_bytes"], inside["buffers"]) == (0, 0)
    assert set(inside["active"].values()) == set(inside["open_responses"].values()) == {0}
    assert inside["index"].keys() == {"blocks", "nodes"}
    assert min(inside["index"].values()) > 0
    assert inside["tasks"]["ReplicaMonitor.run"] == 2


async def test_an_index_that_miscounts_is_named(fleet: Running) -> None:
    await fleet.client.post(COMPLETIONS, json=ASKED)
    fleet.state.routing.router.index.stored_blocks += 1
    said = (await fleet.admin.get("/admin/check")).json()["violation"]
    assert "PrefixIndex.check, line" in said


async def test_buffered_bytes_without_a_request_are_named(fleet: Running) -> None:
    fleet.state.buffers.used_bytes += 1
    assert (await fleet.admin.get("/admin/check")).json()["violation"] == "buffered bytes in sum"
    fleet.state.buffers.used_bytes -= 1


async def test_a_reservation_without_an_attempt_is_named(fleet: Running) -> None:
    router = fleet.state.routing.router
    router._fleet.reserve(router._fleet.member("r1"), 7)
    said = (await fleet.admin.get("/admin/check")).json()["violation"]
    assert said.startswith("r1: ")
    assert "reserved for 0 open attempts" in said
