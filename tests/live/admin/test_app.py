"""The admin listener: who may call it, what a wrong token costs, what it shows, and what a call changes."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request

from gorgo.config.fleet import FleetSourceConfig
from gorgo.core.messages.kv_events import CacheSnapshot
from gorgo.core.scaling import Group, GroupEvidence, ScalingLimits, ScalingSignal
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.admin.app import Admin, admin_app
from gorgo.live.admin.calls import (
    BODY_S,
    FREE,
    LOG_S,
    MAX_BODY_BYTES,
    MAX_TEXT,
    WAITING,
    WINDOW_S,
    BoundedBodies,
    Check,
    NoAnswer,
    TokenCheck,
    count_of,
    is_count,
    is_flag,
    is_text,
    is_weights,
    json_response,
    parse_body,
    read_body,
)
from gorgo.live.event_loop import EpochClock
from gorgo.live.http.errors import HttpError, Message
from gorgo.live.state import FLUSH_BLOCKS
from gorgo.live.workers.link import WorkerRow
from tests.documents import DOCS, code, rows_of, section
from tests.lab.sim.live_shell import VirtualLoop
from tests.proxy.conftest import QUIET, TOKEN, Running, Start, config_for, system_tls, until
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, event, hang, stream
from tests.proxy.followed import Followed, follow, regions
from tests.proxy.test_requests import checked

# --- The admin listener: who may call it, what it shows, and what a call changes.


CHAT = "/v1/chat/completions"
CALLS = [
    ("GET", "/admin/fleet"),
    ("GET", "/admin/weights"),
    ("PUT", "/admin/weights"),
    ("GET", "/admin/policy"),
    ("PUT", "/admin/policy"),
    ("POST", "/admin/freeze"),
    ("POST", "/admin/unfreeze"),
    ("GET", "/admin/samples"),
    ("GET", "/admin/decisions"),
    ("GET", "/admin/decisions/x"),
    ("POST", "/admin/replicas"),
    ("DELETE", "/admin/replicas/r0"),
    ("POST", "/admin/replicas/r0/drain"),
    ("POST", "/admin/flush"),
    ("POST", "/admin/reload"),
    ("GET", "/admin/check"),
]


@pytest.fixture
async def fleet(start: Start) -> Running:
    proxy = replace(QUIET, policy="gorgo")
    good = stream(delta("a"), USAGE, DONE)
    return await start.fleet([good], [good], proxy=proxy)


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_without_a_configured_token_every_call_is_refused(start: Start, method: str, path: str) -> None:
    replica = await start.replica(answer(200))
    fleet = await start.proxy(config_for([replica]), [replica], token=None)
    headers = {"authorization": "Bearer None"}
    for response in (await fleet.admin.request(method, path), await fleet.admin.request(method, path, headers=headers)):
        assert "GORGO_ADMIN_TOKEN" in checked(response, 401, "admin_off")["message"]


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic let-me-in", "let-me-in", "Bearer é"])
async def test_only_the_token_opens(fleet: Running, given: str | None) -> None:
    headers = [] if given is None else [(b"authorization", given.encode())]
    async with httpx.AsyncClient(base_url=fleet.addresses.admin_url, verify=system_tls()) as stranger:
        for method, path in CALLS:
            response = await stranger.request(method, path, headers=headers)
            assert "Bearer" in checked(response, 401, "unauthorized")["message"]
            assert response.headers["www-authenticate"] == "Bearer"


async def test_token_for_metrics_shows_metrics_and_opens_nothing_else(fleet: Running) -> None:
    reader = "token-of-a-prometheus"
    app = admin_app(fleet.state, cast(Any, None), "token-of-operators", asyncio.Event(), metrics_token=reader)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for token, status in ((reader, 200), ("token-of-operators", 200), ("another", 401), ("", 401)):
            shown = await client.get("/metrics", headers={"authorization": f"Bearer {token}"})
            assert shown.status_code == status, token
        for method, path in CALLS:
            response = await client.request(method, path, headers={"authorization": f"Bearer {reader}"})
            checked(response, 401, "unauthorized")


async def test_fleet_has_a_row_per_replica(fleet: Running) -> None:
    shown = (await fleet.admin.get("/admin/fleet")).json()
    assert [row["name"] for row in shown["replicas"]] == ["r0", "r1"]
    assert all(row["rtt_ms"] > 0 and row["state"] == "healthy" for row in shown["replicas"])
    assert shown["boot_id"] == fleet.state.routing.router.boot_id


async def test_weights_are_shown_set_and_used(fleet: Running) -> None:
    before = (await fleet.admin.get("/admin/weights")).json()
    assert before["weights"] == {"w_rtt": 0.5, "w_queue": 0.1}
    assert before["bounds"]["w_rtt"] == [0.05, 200.0]
    after = (await fleet.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.7}})).json()
    assert after["weights"] == {"w_rtt": 0.7, "w_queue": 0.1}
    assert after["version"] == before["version"] + 1
    response = await fleet.client.post(CHAT, content=chat(stream=True))
    assert response.headers["x-gorgo-weights-version"] == str(after["version"])


async def test_weights_set_live_are_in_the_terms_of_the_next_decision(start: Start) -> None:
    """Beside one request that decodes: each term is its weight times what the same decision expects."""
    quick = stream(delta("a"), USAGE, DONE)
    fleet = await start.fleet([hang(delta("a")), quick], proxy=replace(QUIET, policy="gorgo-ms"))
    usual = {"m_rtt": 1.0, "m_queue": 1.0, "lambda": 0.15, "delta": 25.0, "eta": 0.0}
    other = {"m_rtt": 3.0, "m_queue": 2.0, "lambda": 1.0, "delta": 10.0}
    async with fleet.client.stream("POST", CHAT, content=chat(stream=True)) as decoding:
        chunks = decoding.aiter_bytes()
        await anext(chunks)
        for weights in (usual, other):
            await fleet.admin.put("/admin/weights", json={"weights": weights})
            request_id = f"m_rtt-{weights['m_rtt']}"
            await fleet.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": request_id})
            await until(lambda: fleet.state.routing.router.in_flight == 1)
            (decision,) = (await fleet.admin.get(f"/admin/decisions/{request_id}")).json()["decisions"]
            (row,), outlook = decision["candidates"], decision["predicted_parts_ms"]
            assert row["terms"] == {
                # The outlook is a difference of times since the epoch, which are exact to a quarter of a microsecond.
                "rtt": pytest.approx(weights["m_rtt"] * outlook["network"], abs=2e-3),
                "queue": pytest.approx(weights["m_queue"] * outlook["queue"], abs=2e-3),
                "prefill": pytest.approx(outlook["prefill"]),
                "externality": pytest.approx(weights["lambda"] * outlook["prefill"] + weights["delta"]),
                "room": 0.0,
                "shared": 0.0,
            }
            assert min(row["terms"]["rtt"], row["terms"]["prefill"]) > 0.0
        fleet.replicas[0].release.set()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"weights": None},
        {"weights": {"w_rtt": "1"}},
        {"weights": {"w_rtt": True}},
        {"weights": {"w_rtt": 999}},
        {"weights": {"nope": 1}},
        [],
    ],
)
async def test_wrong_weights_change_nothing_and_say_what_was_expected(fleet: Running, body: Any) -> None:
    before = (await fleet.admin.get("/admin/weights")).json()
    response = await fleet.admin.put("/admin/weights", json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "expected" in message or "it has: w_rtt, w_queue" in message
    assert (await fleet.admin.get("/admin/weights")).json() == before


async def test_policy_is_shown_and_set(fleet: Running) -> None:
    assert (await fleet.admin.get("/admin/policy")).json()["policy"] == "gorgo"
    body = {"policy": "least-request"}
    assert (await fleet.admin.put("/admin/policy", json=body)).json()["policy"] == "least-request"
    response = await fleet.client.post(CHAT, content=chat(stream=True))
    assert response.headers["x-gorgo-policy"] == "least-request"
    back = {"policy": "gorgo", "weights": {"w_queue": 0.2}}
    assert (await fleet.admin.put("/admin/policy", json=back)).json()["weights"]["w_queue"] == 0.2


@pytest.mark.parametrize("body", [{}, {"policy": 7}, {"policy": "nope"}, {"policy": "gorgo", "weights": {"w_rtt": -1}}])
async def test_wrong_policy_changes_nothing(fleet: Running, body: Any) -> None:
    assert (await fleet.admin.put("/admin/policy", json=body)).status_code == 400
    assert (await fleet.admin.get("/admin/policy")).json()["policy"] == "gorgo"


async def test_unknown_policy_lists_those_that_there_are(fleet: Running) -> None:
    response = await fleet.admin.put("/admin/policy", json={"policy": "nope"})
    assert "round-robin" in response.json()["error"]["message"]


async def test_dates_follow_a_step_of_the_system_s_clock_and_durations_do_not(fleet: Running) -> None:
    """A machine that starts before its clock is set showed the wrong day for as long as the process ran."""
    clock = getattr(fleet.state.routing.clock, "__self__", None)
    assert isinstance(clock, EpochClock)
    wall = clock._wall
    clock._wall = lambda: wall() + 86_400.0
    await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.idle()
    found = (await fleet.admin.get("/admin/samples")).json()
    (sample,) = found["samples"]
    assert abs(sample["finished_s"] - wall() - 86_400.0) < 60
    assert 0 <= found["now_s"] - sample["finished_s"] < 60
    assert (sample["ttft_ms"] < 60_000, sample["e2e_s"] < 60) == (True, True)
    frozen = (await fleet.admin.post("/admin/freeze")).json()["frozen"]
    assert abs(datetime.fromisoformat(frozen["since"]).timestamp() - wall() - 86_400.0) < 60


async def test_samples_can_be_followed_by_number(fleet: Running) -> None:
    for _ in range(5):
        await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.idle()
    first = (await fleet.admin.get("/admin/samples", params={"after": 0, "limit": 3})).json()
    assert [sample["seq"] for sample in first["samples"]] == [1, 2, 3]
    rest = (await fleet.admin.get("/admin/samples?after=3")).json()
    assert [sample["seq"] for sample in rest["samples"]] == [4, 5]
    sample = rest["samples"][-1]
    assert (sample["input_tokens"], sample["cached_tokens"], sample["output_tokens"]) == (12, 8, 2)
    assert sample["ttft_ms"] > 0
    assert sample["policy"] == "gorgo"


@pytest.mark.parametrize("query", ["after=x", "after=-1", "limit=1.5", "after=" + "9" * 30])
async def test_wrong_numbers_are_a_400(fleet: Running, query: str) -> None:
    assert (
        "whole number" in checked(await fleet.admin.get(f"/admin/samples?{query}"), 400, "invalid_request")["message"]
    )


async def test_decision_shows_every_candidates_terms(fleet: Running) -> None:
    await fleet.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": "r:1"})
    shown = (await fleet.admin.get("/admin/decisions/r:1")).json()
    (decision,) = shown["decisions"]
    assert {row["replica"] for row in decision["candidates"]} == {"r0", "r1"}
    assert all(row["terms"] for row in decision["candidates"])
    assert list(decision["predicted_parts_ms"]) == ["router", "previous_attempts", "network", "queue", "prefill"]
    await fleet.idle()
    sample = (await fleet.admin.get("/admin/decisions/r:1")).json()["sample"]
    assert sample["request_id"] == "r:1"
    assert sum(sample["ttft_parts_ms"].values()) == pytest.approx(sample["ttft_ms"])
    checked(await fleet.admin.get("/admin/decisions/other"), 404, "decision_not_found")


async def test_decisions_are_listed_newest_first_by_replica_or_policy_and_at_most_so_many(fleet: Running) -> None:
    for number in range(4):
        if number == 2:
            await fleet.admin.put("/admin/policy", json={"policy": "round-robin"})
        await fleet.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": f"r{number}"})
        await fleet.idle()

    async def listed(**query: str) -> list[Any]:
        rows: list[Any] = (await fleet.admin.get("/admin/decisions", params=query)).json()["decisions"]
        return rows

    rows = await listed()
    assert [row["request_id"] for row in rows] == ["r3", "r2", "r1", "r0"]
    assert all(row["status"] == 200 and row["candidates"] == 2 and row["region"] == "here" for row in rows)
    assert [row["request_id"] for row in await listed(limit="1")] == ["r3"]
    assert [row["request_id"] for row in await listed(policy="gorgo")] == ["r1", "r0"]
    (late,) = await listed(policy="round-robin", replica=rows[0]["replica"])
    assert late == rows[0]
    assert await listed(replica="nobody") == await listed(limit="0") == await listed(client="nobody") == []
    assert await listed(limit="5000") == rows
    slowest = await listed(order="slowest")
    assert [row["ttft_ms"] for row in slowest] == sorted((row["ttft_ms"] for row in rows), reverse=True)
    wrong = await fleet.admin.get("/admin/decisions?order=oldest")
    assert "newest or slowest" in checked(wrong, 400, "invalid_request")["message"]


async def test_drained_replica_gets_nothing_new_until_it_is_undrained(fleet: Running) -> None:
    drained = (await fleet.admin.post("/admin/replicas/r0/drain")).json()
    assert drained == {"replica": "r0", "drain": True, "move": False, "in_flight": 0, "durable": False}
    for _ in range(4):
        response = await fleet.client.post(CHAT, content=chat(stream=True))
        assert response.headers["x-gorgo-replica"] == "r1"
    back = await fleet.admin.post("/admin/replicas/r0/drain", json={"drain": False})
    assert back.json()["drain"] is False
    checked(await fleet.admin.post("/admin/replicas/nobody/drain"), 404, "replica_not_found")
    checked(await fleet.admin.post("/admin/replicas/r0/drain", json={"drain": 1}), 400, "invalid_request")


async def test_flush_forgets_what_is_cached(fleet: Running) -> None:
    long = chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}])
    await fleet.client.post(CHAT, content=long)
    await fleet.idle()
    assert sum(row.index_blocks for row in fleet.state.routing.router.view.snapshots(now=0.0)) == 16
    assert (await fleet.admin.post("/admin/flush")).status_code == 200
    assert sum(row.index_blocks for row in fleet.state.routing.router.view.snapshots(now=0.0)) == 0
    checked(await fleet.admin.post("/admin/flush", json={"replica": "nobody"}), 404, "replica_not_found")
    checked(await fleet.admin.post("/admin/flush", json={"replica": 1}), 400, "invalid_request")
    assert (await fleet.admin.post("/admin/flush", json={"replica": "r1"})).status_code == 200


async def test_a_flush_of_a_large_cache_leaves_the_event_loop_to_others(fleet: Running) -> None:
    router = fleet.state.routing.router
    for replica in ("r0", "r1"):
        router.caches.on_snapshot(replica, CacheSnapshot(None, 16, list(range(20 * FLUSH_BLOCKS))), now=0.0)
    flushing, turns = asyncio.create_task(fleet.state.flush(None)), 0
    while not flushing.done():
        await asyncio.sleep(0)
        turns += 1
    await flushing
    assert turns >= 40
    assert sum(row.index_blocks for row in router.view.snapshots(now=0.0)) == 0
    assert router.caches.pushed_feed("r0", None, 16) is None


async def test_other_routes_and_methods_are_told_apart(fleet: Running) -> None:
    checked(await fleet.admin.get("/admin/nothing"), 404, "not_found")
    checked(await fleet.admin.get("/v1/models"), 404, "not_found")
    message = (await fleet.admin.get("/admin/weight")).json()["error"]["message"]
    assert message.startswith("no such route (did you mean '/admin/weights'?); there are: GET /admin/fleet, ")
    assert "PUT /admin/weights" in message
    response = await fleet.admin.post("/admin/weights")
    checked(response, 405, "method_not_allowed")


async def test_body_that_is_not_json_or_too_large_is_refused(fleet: Running) -> None:
    checked(await fleet.admin.put("/admin/weights", content=b"{"), 400, "invalid_json")
    checked(await fleet.admin.put("/admin/weights", content=b"x" * 100_000), 413, "request_too_large")


@pytest.mark.parametrize("path", ["/admin/replicas/r0/drain", "/admin/flush"])
async def test_misspelt_key_of_a_drain_or_a_flush_is_refused_and_does_nothing(fleet: Running, path: str) -> None:
    error = checked(await fleet.admin.post(path, json={"draining": False, "replicas": "r1"}), 400, "invalid_request")
    assert "'draining': unknown key" in error["message"]
    assert all(view.eligible for view in fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock()))


@pytest.mark.parametrize("digits", [309, 400, 640])
async def test_weight_of_more_digits_than_a_float_holds_is_refused(fleet: Running, digits: int) -> None:
    body = b'{"weights": {"w_rtt": %b}, "allow_out_of_range": true}' % (b"9" * digits)
    for method, path in (("PUT", "/admin/weights"), ("POST", "/admin/freeze")):
        checked(await fleet.admin.request(method, path, content=body), 400, "invalid_request")
    assert fleet.state.routing.router.settings.weights.version == 1


async def test_words_with_half_a_surrogate_pair_are_refused_since_no_page_could_show_them(fleet: Running) -> None:
    for key in ("reason", "by"):
        body = b'{"weights": {"w_rtt": 1.0}, "%b": "\\ud800"}' % key.encode()
        checked(await fleet.admin.put("/admin/weights", content=body), 400, "invalid_request")
    assert fleet.state.routing.router.settings.weights.version == 1


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (0, 1000)),
        ("?after=7", (7, 1000)),
        ("?after=7&limit=999", (7, 999)),
        ("?limit=1001", (0, 1000)),
        ("?limit=0", (0, 0)),
        ("?after=999999999999999999", (10**18 - 1, 1000)),
    ],
)
async def test_an_answer_has_at_most_a_thousand_samples(
    fleet: Running, query: str, asked: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def after(_samples: object, after: int, limit: int, *, ahead_s: float) -> dict[str, list[object]]:
        seen.append((after, limit))
        return {"samples": []}

    monkeypatch.setattr(type(fleet.state.routing.router.samples), "after", after)
    answer = (await fleet.admin.get(f"/admin/samples{query}")).json()
    assert answer.pop("now_s") <= fleet.state.routing.clock() + 1.0
    assert answer == {"samples": []}
    assert seen == [asked]


COMPLETIONS = "/v1/completions"
#: Two blocks of the prefix index.
ASKED = {"prompt": "long " * 120, "stream": True}


@pytest.fixture
async def fleet_self_check(start: Start) -> Running:
    replicas = [await start.replica(stream(event({"choices": [{"text": "a"}]}), DONE)) for _ in range(2)]
    return await start.proxy(config_for(replicas), replicas, environ={"GORGO_INTERNAL_ROUTES": "1"})


async def test_it_is_off_by_default(start: Start) -> None:
    fleet = await start.fleet([stream(DONE)])
    checked(await fleet.admin.get("/admin/check"), 404, "not_found")


async def test_an_idle_proxy_has_nothing_open_and_every_invariant_holds(fleet_self_check: Running) -> None:
    assert (await fleet_self_check.client.post(COMPLETIONS, json=ASKED)).status_code == 200
    await fleet_self_check.idle()
    inside = (await fleet_self_check.admin.get("/admin/check")).json()
    assert inside["violation"] is None
    assert (inside["in_flight"], inside["queued"], inside["exchanges"], inside["draining"]) == (0, 0, 0, 0)
    assert (inside["buffered_bytes"], inside["buffers"]) == (0, 0)
    assert set(inside["active"].values()) == set(inside["open_responses"].values()) == {0}
    assert inside["index"].keys() == {"blocks", "nodes"}
    assert min(inside["index"].values()) > 0
    assert inside["tasks"]["ReplicaMonitor.run"] == 2


async def test_an_index_that_miscounts_is_named(fleet_self_check: Running) -> None:
    await fleet_self_check.client.post(COMPLETIONS, json=ASKED)
    fleet_self_check.state.routing.router.index.stored_blocks += 1
    said = (await fleet_self_check.admin.get("/admin/check")).json()["violation"]
    assert "PrefixIndex.check, line" in said


async def test_buffered_bytes_without_a_request_are_named(fleet_self_check: Running) -> None:
    fleet_self_check.state.buffers.used_bytes += 1
    assert (await fleet_self_check.admin.get("/admin/check")).json()["violation"] == "buffered bytes in sum"
    fleet_self_check.state.buffers.used_bytes -= 1


async def test_a_reservation_without_an_attempt_is_named(fleet_self_check: Running) -> None:
    router = fleet_self_check.state.routing.router
    router._fleet.reserve(router._fleet.member("r1"), 7)
    said = (await fleet_self_check.admin.get("/admin/check")).json()["violation"]
    assert said.startswith("r1: ")
    assert "reserved for 0 open attempts" in said


# --- Wrong admin tokens are delayed, logged and counted; the right one passes at once.


class Guesses:
    """A check of a token at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counted = 0
        self.check = TokenCheck("the-right-token", lambda: self.now, self._count)

    def _count(self) -> None:
        self.counted += 1


def test_ten_wrong_tokens_a_minute_are_answered_at_once_and_further_ones_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.admin.calls.DELAY_S", 1.0)
    guesses = Guesses()
    delays = [guesses.check.delay_s() for _ in range(FREE + 2)]
    assert delays == [0.0] * FREE + [1.0, 1.0]
    assert guesses.counted == FREE + 2
    assert guesses.check.is_right(b"the-right-token")
    guesses.now = WINDOW_S + 1
    assert guesses.check.delay_s() == 0.0


def test_without_a_token_nothing_is_right() -> None:
    check = TokenCheck(None, lambda: 0.0, lambda: None)
    assert not check.is_right(b"")
    assert not check.is_right(b"None")


def test_a_line_tells_how_many_were_wrong_and_comes_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    guesses = Guesses()
    for second in range(int(LOG_S) + 1):
        guesses.now = float(second)
        guesses.check.delay_s()
    told = [record.fields for record in caplog.records if record.getMessage() == "admin_refused"]  # type: ignore[attr-defined]
    assert told == [{"wrong_tokens": 1}, {"wrong_tokens": int(LOG_S)}]


async def test_a_few_answers_wait_and_beyond_them_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    guesses = Guesses()
    for _ in range(FREE):
        await guesses.check.refuse()
    monkeypatch.setattr("gorgo.live.admin.calls.DELAY_S", 3600.0)
    waiting = [asyncio.create_task(guesses.check.refuse()) for _ in range(WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(NoAnswer):
        await guesses.check.refuse()
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    again = asyncio.create_task(guesses.check.refuse())
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_a_guess_beyond_those_that_wait_ends_its_connection_unanswered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start.fleet([answer(200)])
    for _ in range(FREE):
        assert (await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})).status_code == 401
    monkeypatch.setattr("gorgo.live.admin.calls.WAITING", 0)
    with pytest.raises(httpx.TransportError):
        await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})
    with pytest.raises(httpx.TransportError):
        await fleet.admin.post("/admin/page/login", content=b"token=guess")
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200


async def test_guesses_of_both_kinds_are_counted_and_leave_the_operator_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start.fleet([answer(200)])
    for _ in range(FREE):
        wrong = await fleet.admin.get("/admin/fleet", headers={"authorization": "Bearer guess"})
        assert wrong.status_code == 401
        assert (await fleet.admin.post("/admin/page/login", content=b"token=guess")).status_code == 403
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": ""})).status_code == 401  # no guess
    assert (await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
    assert fleet.state.telemetry.metrics.registry.get_sample_value("gorgo_admin_refused_total") == 2 * FREE


# --- Bodies and queries of the admin API, and their list in the reference, both ways.


# --- What a call of the admin API may hold in its body and its query.


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (is_count, [0, 1, 2**60], [-1, 1.0, "1", True, None, []]),
        (is_flag, [True, False], [0, 1, "true", None]),
        (
            is_text,
            ["", "x" * MAX_TEXT, "ü", "\U0001f408"],
            ["x" * (MAX_TEXT + 1), "\ud800", "a\udfffb", 1, None, ["a"]],
        ),
        (is_weights, [{}, {"a": 1, "b": 0.5}], [[1.0], {"a": "1"}, {"a": True}, {"a": float("nan")}, 1, "a", None]),
    ],
)
def test_value_is_of_its_kind(check: Check, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not check(value)] == []
    assert [value for value in bad if check(value)] == []


KEYS: dict[str, tuple[Check, str]] = {"draining": (is_flag, "true or false"), "by": (is_text, "a name")}


@pytest.mark.parametrize("body", [{}, {"draining": True}, {"draining": None, "by": "me"}])
def test_body_with_known_keys_is_taken(body: dict[str, Any]) -> None:
    parse_body(body, KEYS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"drain": True}, "'drain': unknown key; expected draining, by"),
        ({"draining": 1}, "draining: expected true or false"),
        ({"by": "me", "draining": "no"}, "draining: expected true or false"),
        ({"x" * 100: 1}, f"{'x' * 60!r}: unknown key; expected draining, by"),
    ],
)
def test_body_with_another_key_or_value_is_a_400_that_says_what_was_expected(
    body: dict[str, Any], message: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        parse_body(body, KEYS)
    assert (refusal.value.status, refusal.value.code, refusal.value.message) == (400, "invalid_request", message)


def request_of(*pieces: bytes, query: bytes = b"") -> Request:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": [], "query_string": query, "path": "/"}, receive)


@pytest.mark.parametrize(
    ("pieces", "parsed"),
    [((), {}), ((b" ", b"\n"), {}), ((b"{}",), {}), ((b'{"a"', b": 1}"), {"a": 1}), ((b" " * MAX_BODY_BYTES,), {})],
)
async def test_empty_body_is_an_empty_object(pieces: tuple[bytes, ...], parsed: dict[str, Any]) -> None:
    assert await read_body(request_of(*pieces)) == parsed


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ((b"[]",), 400, "invalid_json"),
        ((b"null",), 400, "invalid_json"),
        ((b"{",), 400, "invalid_json"),
        ((b"[" * 60_000,), 400, "invalid_json"),
        ((b" " * MAX_BODY_BYTES, b" "), 413, "request_too_large"),
    ],
)
async def test_body_that_is_no_object_or_too_large_is_refused(
    pieces: tuple[bytes, ...], status: int, code: str
) -> None:
    with pytest.raises(HttpError) as refusal:
        await read_body(request_of(*pieces))
    assert (refusal.value.status, refusal.value.code) == (status, code)


@pytest.mark.parametrize(("query", "count"), [(b"", 7), (b"n=0", 0), (b"n=" + b"9" * 18, 10**18 - 1)])
def test_number_in_the_query_is_whole(query: bytes, count: int) -> None:
    assert count_of(request_of(query=query), "n", 7) == count


@pytest.mark.parametrize("query", [b"n=", b"n=-1", b"n=1.0", b"n=%D9%A1", b"n=" + b"9" * 19, b"n=a"])
def test_other_numbers_in_the_query_are_a_400(query: bytes) -> None:
    with pytest.raises(HttpError) as refusal:
        count_of(request_of(query=query), "n", 7)
    assert (refusal.value.status, refusal.value.message) == (400, "n: expected a whole number")


def test_answer_is_json_with_its_status() -> None:
    response = json_response({"a": 1}, 201)
    assert (response.status_code, response.body, response.media_type) == (201, b'{"a": 1}', "application/json")


LENGTH = [(b"content-length", b"9")]


def bounded(headers: list[tuple[bytes, bytes]], pieces: list[float | bytes], *, reads: bool) -> tuple[float, int, int]:
    """When an app behind the bound ends, with which status (408 where it is out of time), and what is left unread."""

    async def run() -> tuple[float, int, int]:
        loop, messages = asyncio.get_running_loop(), asyncio.Queue[Message]()
        status = 0

        async def arrive() -> None:
            for step in pieces:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    messages.put_nowait({"type": "http.request", "body": step, "more_body": step != b"end"})

        async def app(_: Message, receive: Any, send: Any) -> None:
            while reads and (await receive())["more_body"]:
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(1.0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)

        arriving = asyncio.create_task(arrive())
        try:
            await BoundedBodies(app)({"type": "http", "headers": headers}, messages.get, send)
        except HttpError as refusal:
            status = refusal.status
        arriving.cancel()
        await asyncio.sleep(0)
        return round(loop.time(), 6), status, messages.qsize()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_body_has_its_time_in_all_however_it_comes() -> None:
    assert BODY_S == 10.0
    assert bounded(LENGTH, [b"a", 9.0, b"end"], reads=True) == (10.0, 200, 0)
    assert bounded(LENGTH, [b"a", 9.0, b"b", 9.0, b"end"], reads=True) == (10.0, 408, 0)
    assert bounded([(b"transfer-encoding", b"chunked")], [1000.0], reads=True) == (10.0, 408, 0)


def test_body_that_is_not_read_is_dropped_while_the_answer_goes_out() -> None:
    assert bounded(LENGTH, [b"a", b"b", b"end"], reads=False) == (1.0, 200, 0)


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
def test_request_without_a_body_is_the_apps_alone(headers: list[tuple[bytes, bytes]]) -> None:
    assert bounded(headers, [b"a", b"end"], reads=False) == (1.0, 200, 2)


# --- The bodies of the admin API as the reference lists them, against the routes: every key, both ways.


SECTION = section((DOCS / "reference.md").read_text(), "### Bodies of the admin listener")
ROUTES = {code(row[0])[0]: (code(row[1]), code(row[2])) for row in rows_of(SECTION, "route", "request", "answer")}
#: Answers that are no JSON of their own, or for tests alone.
LEFT_OUT = {"GET /", "GET /metrics", "GET /admin/check", "GET /admin/openapi.json"}
ENTRY = {"name": "w", "region": "here", "url": "http://127.0.0.1:1"}

PUSH: dict[str, Any] = {"worker_id": "a", "block_tokens": 16, "epoch": 1, "sequence": 0, "hashes": [1]}
PUSH_TOKEN = "token-of-a-replica"
#: Route, path and body of a call that succeeds, in order.
BODY_CALLS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET /admin/fleet", "/admin/fleet", None),
    ("GET /admin/status", "/admin/status", None),
    ("GET /admin/weights", "/admin/weights", None),
    ("PUT /admin/weights", "/admin/weights", {"weights": {}}),
    ("GET /admin/policy", "/admin/policy", None),
    ("PUT /admin/policy", "/admin/policy", {"policy": "gorgo-ms"}),
    ("GET /admin/model", "/admin/model", None),
    ("POST /admin/freeze", "/admin/freeze", {}),
    ("POST /admin/unfreeze", "/admin/unfreeze", {}),
    ("GET /admin/samples", "/admin/samples", None),
    ("GET /admin/decisions", "/admin/decisions", None),
    ("GET /admin/decisions/{request_id}", "/admin/decisions/one", None),
    ("POST /admin/replicas", "/admin/replicas", ENTRY),
    ("POST /admin/replicas/{name}/drain", "/admin/replicas/a/drain", {"drain": False}),
    ("DELETE /admin/replicas/{name}", "/admin/replicas/w", {}),
    ("POST /admin/flush", "/admin/flush", {}),
    ("POST /admin/reload", "/admin/reload", {}),
    ("POST /internal/sync", "/internal/sync", PUSH),
    ("POST /internal/eviction", "/internal/eviction", PUSH | {"sequence": 1}),
]


async def followed(start: Start, folder: Path) -> Followed:
    replica = await start.replica(stream(delta("x"), USAGE, DONE))
    text = regions({"a": {"url": replica.url, "push_token_env": "PUSH"}}, proxy={"policy": "gorgo-ms"})
    fleet = await follow(start, folder, text, [replica], environ={"PUSH": PUSH_TOKEN})
    await fleet.fleet.client.post("/v1/chat/completions", content=chat(stream=True), headers={"x-request-id": "one"})
    await fleet.fleet.idle()
    return fleet


def test_every_route_with_a_body_has_a_row() -> None:
    routes = Admin(
        cast(Any, SimpleNamespace(routing=None, replicas=None)), cast(Any, None), None, cast(Any, None)
    ).routes()
    found = {f"{method} {route.path}" for route in routes for method in (route.methods or set()) - {"HEAD"}}
    found = {route.replace(":path", "") for route in found if "/page" not in route} - LEFT_OUT
    assert set(ROUTES) == found == {route for route, *_ in BODY_CALLS}


async def test_answers_have_the_keys_of_the_reference(start: Start, tmp_path: Path) -> None:
    proxy = await followed(start, tmp_path)
    for route, path, body in BODY_CALLS:
        response = await _call(proxy, route, path, body)
        assert response.is_success, (route, response.text)
        shown = response.json()
        documented = ROUTES[route][1]
        assert list(shown) == documented, f"{route}: expected the answer {', '.join(f'`{key}`' for key in shown)}"


async def test_requests_have_the_keys_of_the_reference_and_no_others(start: Start, tmp_path: Path) -> None:
    """Every reader of a body names its keys in the error of an unknown one."""
    proxy = await followed(start, tmp_path)
    for route, path, body in BODY_CALLS:
        documented = ROUTES[route][0]
        if body is None:
            assert documented == [], route
            continue
        refused = await _call(proxy, route, path, {"odd": 1})
        assert refused.status_code == 400, (route, refused.text)
        message = refused.json()["error"]["message"]
        known = re.search(r"unknown key; expected (?:one of )?([\w, ]*)", message)
        assert known is not None, message
        assert known[1].split(", ") == (documented or ["none"]), route


async def test_rows_have_the_keys_of_the_reference(start: Start, tmp_path: Path) -> None:
    proxy = await followed(start, tmp_path)
    rows = {code(row[0])[0]: code(row[1]) for row in rows_of(SECTION, "row of", "keys")}
    signal = ScalingSignal(ScalingLimits(ttft_s=2.0))
    found = {
        "fleet_sources": FoundFleet([FleetSourceConfig(name="dns", kind="dns")]).as_rows(0.0)[0],
        "replicas": (await _call(proxy, "GET", "/admin/fleet", None)).json()["replicas"][0],
        "decisions": (await _call(proxy, "GET", "/admin/decisions", None)).json()["decisions"][0],
        "samples": (await _call(proxy, "GET", "/admin/samples", None)).json()["samples"][0],
        "history": (await _call(proxy, "GET", "/admin/weights", None)).json()["history"][0],
        "workers": WorkerRow(number=0, pid=1, state="ready").as_dict(),
        "scaling": signal.decide({Group("here", None): GroupEvidence(replicas=1)}, {}, now=0.0)[
            Group("here", None)
        ].as_dict(),
    }
    for name, row in found.items():
        assert list(row) == rows[name], f"{name}: expected {', '.join(f'`{key}`' for key in row)}"
    assert set(rows) == set(found)


async def _call(proxy: Followed, route: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
    more: dict[str, Any] = {} if body is None else {"json": body}
    if "/internal/" in route:
        more["headers"] = {"authorization": f"Bearer {PUSH_TOKEN}"}
    return await proxy.fleet.admin.request(route.split()[0], path, **more)
