"""The page over real sockets: signing in and out, headers, snapshot, status, and updates from a running proxy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gorgo.live.admin.page import routes
from gorgo.live.admin.page.charts import Html
from gorgo.live.admin.page.document import Sections, Writer
from gorgo.live.admin.page.routes import SESSION_S, SESSIONS, LiveUpdates, Sessions, TakeSnapshot
from gorgo.live.admin.page.snapshot import Snapshot
from gorgo.live.telemetry.health import MAX_PROBES, MAX_REPLICAS, ProbeHistory
from tests.proxy.conftest import QUIET, TOKEN, Running, Start, config_for, system_tls, until, with_replica
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, stream
from tests.proxy.raw import RawClient, connected
from tests.proxy.test_requests import checked

CHAT = "/v1/chat/completions"
PAGE = "/admin/page"
NASTY = "<script>alert(1)</script>"


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LiveUpdates]]:
    """The updates of each proxy that starts, faster than in earnest and for two at most."""
    made: list[LiveUpdates] = []

    def make(*arguments: Any) -> LiveUpdates:
        made.append(partial(LiveUpdates, interval_s=0.02, patience_s=0.3, listeners=2)(*arguments))
        return made[-1]

    monkeypatch.setattr(routes, "LiveUpdates", make)
    yield made
    assert [one.listeners for one in made] == [0] * len(made)


@pytest.fixture
async def fleet(lives: list[LiveUpdates], start: Start) -> Running:
    good = stream(delta("a"), USAGE, DONE)
    return await start.fleet([good], [good], proxy=replace(QUIET, policy="gorgo-ms"))


@asynccontextmanager
async def browser(fleet: Running) -> AsyncIterator[httpx.AsyncClient]:
    """A client without the token, which keeps cookies and follows nothing by itself."""
    async with httpx.AsyncClient(base_url=fleet.addresses.admin_url, timeout=20, verify=system_tls()) as client:
        yield client


async def signed_in(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post(f"{PAGE}/login", data={"token": TOKEN})


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    kind = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, line[6:]


# -- who may see it


async def test_stranger_is_asked_for_the_token_and_sees_nothing(fleet: Running) -> None:
    async with browser(fleet) as client:
        assert (await client.get("/")).headers["location"] == PAGE
        sent = await client.get(PAGE)
        assert (sent.status_code, sent.headers["location"]) == (303, f"{PAGE}/login")
        form = await client.get(f"{PAGE}/login")
        assert form.status_code == 200
        assert 'type="password"' in form.text
        assert "r0" not in form.text
        checked(await client.get(f"{PAGE}/events"), 401, "unauthorized")
        checked(await client.get("/admin/status"), 401, "unauthorized")


async def test_wrong_token_opens_nothing_and_says_so(fleet: Running) -> None:
    async with browser(fleet) as client:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        for body in ("", "token=", "token=let-me", "other=let-me-in", "token=%C3%A9", "a&b;c", "\xff"):
            refused = await client.post(f"{PAGE}/login", content=body.encode("latin-1"), headers=headers)
            assert refused.status_code == 403, body
            assert "Wrong token" in refused.text
            assert "set-cookie" not in refused.headers
        checked(await client.post(f"{PAGE}/login", content=b"token=" + b"x" * 5000), 413, "request_too_large")
        checked(await client.post(f"{PAGE}/login", content=b"a=1&" * 50), 400, "invalid_request")
        assert (await client.get(PAGE)).status_code == 303


async def test_token_opens_a_session_whose_cookie_shows_the_page_and_opens_nothing_else(fleet: Running) -> None:
    async with browser(fleet) as client:
        answered = await signed_in(client)
        assert (answered.status_code, answered.headers["location"]) == (303, PAGE)
        cookie = answered.headers["set-cookie"].lower()
        for word in ("httponly", "samesite=strict", "path=/admin/page", "max-age=43200"):
            assert word in cookie
        assert "secure" not in cookie
        assert TOKEN not in cookie
        page = await client.get(PAGE)
        assert page.status_code == 200
        assert 'data-replica="r0"' in page.text
        assert (await client.get(f"{PAGE}/login")).headers["location"] == PAGE
        sent = {"cookie": answered.headers["set-cookie"].split(";")[0]}
        for method, path in (("GET", "/admin/status"), ("GET", "/admin/fleet"), ("POST", "/admin/flush")):
            checked(await client.request(method, path, headers=sent), 401, "unauthorized")


async def test_signing_out_ends_the_session_itself_and_not_only_the_cookie(fleet: Running) -> None:
    async with browser(fleet) as client:
        kept = {"cookie": (await signed_in(client)).headers["set-cookie"].split(";")[0]}
        left = await client.post(f"{PAGE}/logout")
        assert left.headers["location"] == f"{PAGE}/login"
        cookie, *attributes = left.headers["set-cookie"].split("; ")
        assert cookie == 'gorgo_session=""'
        assert {"HttpOnly", "SameSite=strict", "Max-Age=0", f"Path={PAGE}"} <= set(attributes)
        assert (await client.get(PAGE, headers=kept)).status_code == 303


async def test_behind_tls_the_cookie_is_for_tls_alone(fleet: Running) -> None:
    async with browser(fleet) as client:
        headers = {"x-forwarded-proto": "https"}
        answered = await client.post(f"{PAGE}/login", data={"token": TOKEN}, headers=headers)
        assert "secure" in answered.headers["set-cookie"].lower()


async def test_without_a_configured_token_nobody_sees_anything(start: Start) -> None:
    replica = await start.replica(answer(200))
    fleet = await start.proxy(config_for([replica]), [replica], token=None)
    async with browser(fleet) as client:
        for method, path in (("GET", PAGE), ("GET", f"{PAGE}/login"), ("POST", f"{PAGE}/login")):
            refused = await client.request(method, path, data={"token": "None"} if method == "POST" else None)
            assert refused.status_code == 401
            assert "GORGO_ADMIN_TOKEN" in refused.text
        checked(await client.get(f"{PAGE}/events"), 401, "admin_off")
        assert (await client.post(f"{PAGE}/logout")).status_code == 303


async def test_every_answer_holds_the_browser_to_this_origin(fleet: Running) -> None:
    async with browser(fleet) as client:
        answers = [await client.get(f"{PAGE}/login"), await client.post(f"{PAGE}/login"), await signed_in(client)]
        answers += [await client.get(f"{PAGE}{path}") for path in ("", "/page.css", "/page.js", "/icon.svg")]
        for response in answers:
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert response.headers["x-frame-options"] == "DENY"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["referrer-policy"] == "no-referrer"
            assert response.headers["cache-control"] == "no-store"
        kinds = [response.headers["content-type"].split(";")[0] for response in answers[-3:]]
        assert kinds == ["text/css", "text/javascript", "image/svg+xml"]


def test_assets_ask_for_nothing_from_elsewhere() -> None:
    from importlib.resources import files

    for name in ("page.css", "page.js"):
        text = (files("gorgo.live.admin.page") / name).read_text()
        assert not re.search(r"https?://|@import|url\(|eval\(|fetch\(", text)


# -- what it shows


async def test_status_has_what_the_page_shows(fleet: Running) -> None:
    await fleet.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": "mine"})
    await fleet.idle()
    shown = (await fleet.admin.get("/admin/status")).json()
    assert [row["name"] for row in shown["replicas"]] == ["r0", "r1"]
    assert all(row["health_state"] == "ready" and len(row["probes"]) == 1 for row in shown["replicas"])
    (made,) = shown["decisions"]
    assert made["request_id"] == "mine"
    assert {row["replica"] for row in made["candidates"]} == {"r0", "r1"}
    assert set(made["candidates"][0]["terms"]) == {"rtt", "queue", "prefill", "externality", "room", "shared"}
    assert made["sample"]["ttft_ms"] > 0
    assert made["error_ms"] == pytest.approx(made["sample"]["ttft_ms"] - made["predicted_ttft_ms"])
    assert shown["recent_stats"]["n"] == 1
    assert shown["history"][0]["source"] == "configuration"
    assert shown["routing"]["frozen"] is None
    assert shown["alerts"] == []
    assert shown["region"] == "here"


async def test_failed_attempt_is_shown_as_one_that_went_on(lives: list[LiveUpdates], start: Start) -> None:
    fleet = await start.fleet([answer(500)], [stream(delta("a"), DONE)])
    await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.idle()
    newest, first = (await fleet.admin.get("/admin/status")).json()["decisions"]
    assert (first["replica"], first["followed"], first["sample"]) == ("r0", True, None)
    assert (newest["replica"], newest["attempt"], newest["sample"]["retries"]) == ("r1", 2, 1)


async def test_id_that_a_client_uses_again_tells_nothing_of_the_request_under_way(fleet: Running) -> None:
    headers = {"x-request-id": "again"}
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(stream=True), headers=headers)
    await fleet.idle()
    second, first = (await fleet.admin.get("/admin/status")).json()["decisions"]
    assert second["sample"]["seq"] == 2
    assert not first["followed"]


async def test_names_and_words_from_elsewhere_are_text_on_the_page(lives: list[LiveUpdates], start: Start) -> None:
    replicas = [await start.replica(stream(delta("a"), DONE))]
    config = with_replica(config_for(replicas, replace(QUIET, policy="gorgo")), 0, name=NASTY, models=(NASTY,))
    fleet = await start.proxy(config, replicas)
    set_by = {"weights": {"w_rtt": 0.7}, "reason": NASTY, "by": NASTY}
    assert (await fleet.admin.put("/admin/weights", json=set_by)).status_code == 200
    await fleet.client.post(CHAT, content=chat(stream=True, model=NASTY))
    async with browser(fleet) as client:
        await signed_in(client)
        text = (await client.get(PAGE)).text
    assert NASTY not in text
    assert text.count("&lt;script&gt;") >= 5


async def test_page_reloads_by_itself_within_bounds(fleet: Running) -> None:
    async with browser(fleet) as client:
        await signed_in(client)
        for every, status in (("10", 200), ("0", 200), ("1", 400), ("9999", 400), ("x", 400)):
            answered = await client.get(PAGE, params={"every": every})
            assert answered.status_code == status
            assert ('http-equiv="refresh"' in answered.text) == (every == "10")


# -- updates


async def test_updates_begin_with_every_part_and_go_on_with_what_changes(fleet: Running) -> None:
    async with browser(fleet) as client:
        await signed_in(client)
        async with client.stream("GET", f"{PAGE}/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            told = events(response)
            first = [json.loads(data)["name"] async for kind, data in _until_tick(told) if kind == "part"]
            assert first == [
                "alerts",
                "stats",
                "chart",
                "fleet",
                "scaling",
                "sources",
                "peers",
                "routes",
                "clients",
                "decisions",
                "weights",
            ]
            await fleet.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": "news"})
            async for kind, data in told:
                if kind == "part" and json.loads(data)["name"] == "decisions":
                    assert "news" in json.loads(data)["html"]
                    break
    await fleet.idle()


async def _until_tick(told: AsyncIterator[tuple[str, str]]) -> AsyncIterator[tuple[str, str]]:
    async for kind, data in told:
        if kind == "tick":
            return
        yield kind, data


async def test_token_itself_opens_the_updates_too(fleet: Running) -> None:
    async with fleet.admin.stream("GET", f"{PAGE}/events") as response:
        assert response.status_code == 200
        assert (await anext(events(response)))[0] == "part"


async def test_third_page_is_told_that_two_are_open(fleet: Running, lives: list[LiveUpdates]) -> None:
    async with fleet.admin.stream("GET", f"{PAGE}/events"), fleet.admin.stream("GET", f"{PAGE}/events"):
        checked(await fleet.admin.get(f"{PAGE}/events"), 503, "too_many_listeners")
    await until(lambda: lives[0].listeners == 0)
    async with fleet.admin.stream("GET", f"{PAGE}/events") as response:
        assert response.status_code == 200


async def test_browser_that_does_not_read_is_cut(
    fleet: Running, lives: list[LiveUpdates], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_of = iter(range(1_000_000))

    async def large(writer: Writer, status: Snapshot) -> Sections:
        return {"fleet": Html("x" * (1 << 20) + str(next(round_of)))}

    monkeypatch.setattr(Writer, "write", large)
    async with _asleep(fleet) as client:
        await until(lambda: lives[0].listeners == 1)
        await until(lambda: lives[0].listeners == 0)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
    assert (await fleet.admin.get("/admin/fleet")).status_code == 200


@asynccontextmanager
async def _asleep(fleet: Running) -> AsyncIterator[RawClient]:
    """A client that asks for the updates and reads none of them."""
    async with connected(fleet.addresses.admin) as client:
        client.writer.write(
            f"GET {PAGE}/events HTTP/1.1\r\nhost: gorgo\r\nauthorization: Bearer {quote(TOKEN)}\r\n\r\n".encode()
        )
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        yield client


async def test_shutdown_does_not_wait_for_an_open_page(fleet: Running) -> None:
    async with fleet.admin.stream("GET", f"{PAGE}/events") as response:
        told = events(response)
        await anext(told)
        started = asyncio.get_running_loop().time()
        fleet.shutdown.set()
        assert "end" in [kind async for kind, _ in told]
        await fleet.stop()
        assert asyncio.get_running_loop().time() - started < 5


class Client:
    """The ASGI side of one listener; `stuck` makes it stop reading."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()
        self.stuck = False
        self.aborted = False
        self.scope: dict[str, Any] = {"state": {"abort": self._abort}}

    async def receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.stuck:
            await asyncio.Event().wait()
        self.sent.append(message)

    def events(self) -> list[tuple[str, str]]:
        """Kind and data of each event so far."""
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        pairs = [event.split("\n") for event in text.split("\n\n") if event.startswith("event: ")]
        return [(kind[7:], data[6:]) for kind, data in pairs]

    def parts(self) -> list[dict[str, str]]:
        return [json.loads(data) for kind, data in self.events() if kind == "part"]

    def ticks(self) -> int:
        return sum(kind == "tick" for kind, _ in self.events())

    def _abort(self) -> None:
        self.aborted = True


class Page:
    """What is shown, made as often as somebody asks."""

    def __init__(self) -> None:
        self.parts: dict[str, Html] = {"a": Html("1"), "b": Html("1")}
        self.made = 0

    async def __call__(self) -> TakeSnapshot:
        self.made += 1
        return "12:00:00 UTC", dict(self.parts)


def live(page: Page, closing: asyncio.Event | None = None, **bounds: Any) -> LiveUpdates:
    return LiveUpdates(page, closing or asyncio.Event(), **{"interval_s": 0.01, "patience_s": 0.05, **bounds})


def listen(to: LiveUpdates, client: Client) -> asyncio.Task[None]:
    return asyncio.create_task(to(client.scope, client.receive, client.send))


async def test_first_everything_is_sent_and_then_what_has_changed() -> None:
    page, client = Page(), Client()
    task = listen(live(page), client)
    await until(lambda: client.ticks() >= 3)
    assert client.parts() == [{"name": "a", "html": "1"}, {"name": "b", "html": "1"}]
    page.parts["b"] = Html('2 "\n"')
    await until(lambda: len(client.parts()) == 3)
    assert client.parts()[-1] == {"name": "b", "html": '2 "\n"'}
    client.leaves.set()
    await task
    assert client.sent[0]["status"] == 200
    assert dict(client.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")


async def test_client_that_leaves_is_no_listener_any_more() -> None:
    served, client = live(Page(), interval_s=100.0), Client()
    task = listen(served, client)
    await until(lambda: client.ticks() == 1)
    assert served.listeners == 1
    client.leaves.set()
    await task
    assert served.listeners == 0


async def test_one_listener_too_many_is_refused_and_another_may_come_later() -> None:
    served, clients = live(Page(), listeners=2), [Client() for _ in range(4)]
    tasks = [listen(served, client) for client in clients[:2]]
    await until(lambda: served.listeners == 2)
    await listen(served, clients[2])
    assert clients[2].sent[0]["status"] == 503
    assert b"too_many_listeners" in clients[2].sent[1]["body"]
    clients[0].leaves.set()
    await tasks[0]
    last = listen(served, clients[3])
    await until(lambda: clients[3].ticks() >= 1)
    for client in clients:
        client.leaves.set()
    await asyncio.gather(tasks[1], last)


async def test_client_that_does_not_read_is_cut_and_keeps_no_other_waiting() -> None:
    page, slow, quick = Page(), Client(), Client()
    served = live(page)
    cut, other = listen(served, slow), listen(served, quick)
    await until(lambda: slow.ticks() >= 1)
    slow.stuck = True
    seen = quick.ticks()
    await cut
    assert slow.aborted
    assert served.listeners == 1
    assert quick.ticks() > seen
    assert not quick.aborted
    quick.leaves.set()
    await other


async def test_streams_end_in_order_when_the_listener_closes() -> None:
    closing, client = asyncio.Event(), Client()
    task = listen(live(Page(), closing, interval_s=100.0), client)
    await until(lambda: client.ticks() == 1)
    closing.set()
    await task
    assert client.events()[-1][0] == "end"
    assert client.sent[-1]["more_body"] is False


async def test_parts_are_made_once_per_interval_however_many_ask() -> None:
    now = [0.0]
    page = Page()
    served = live(page, interval_s=1.0, clock=lambda: now[0])
    await asyncio.gather(*(served.now() for _ in range(5)))
    assert page.made == 1
    now[0] = 0.95
    await served.now()
    assert page.made == 2


async def test_nothing_is_made_while_nobody_listens() -> None:
    page = Page()
    served, client = live(page), Client()
    client.leaves.set()
    task = listen(served, client)
    await task
    made = page.made
    await asyncio.sleep(0)
    assert page.made == made <= 1


async def test_a_listener_that_has_ended_leaves_no_task() -> None:
    closing, client = asyncio.Event(), Client()
    updates, before = live(Page(), closing), asyncio.all_tasks()
    first, second = listen(updates, client), listen(updates, Client())
    await until(lambda: client.ticks() >= 1)
    client.leaves.set()
    await first
    closing.set()
    await second
    await asyncio.sleep(0)
    assert (asyncio.all_tasks(), updates.listeners) == (before, 0)


def test_a_session_is_valid_for_its_key_alone() -> None:
    sessions = Sessions(lambda: 0.0)
    key = sessions.open()
    assert sessions.holds(key)
    assert not sessions.holds(None)
    assert not sessions.holds("")
    assert not sessions.holds(key + "x")


def test_session_ends_by_itself_and_by_signing_out() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    first, second = sessions.open(), sessions.open()
    sessions.end(first)
    sessions.end(first)
    sessions.end(None)
    assert not sessions.holds(first)
    now[0] = SESSION_S - 1
    assert sessions.holds(second)
    now[0] = SESSION_S
    assert not sessions.holds(second)


def test_one_session_too_many_ends_the_oldest() -> None:
    sessions = Sessions(lambda: 0.0)
    keys = [sessions.open() for _ in range(SESSIONS + 1)]
    assert [sessions.holds(key) for key in keys] == [False] + [True] * SESSIONS
    assert len(sessions) == SESSIONS


def test_round_trips_are_bounded_by_replica_and_in_all() -> None:
    trips = ProbeHistory()
    for second in range(MAX_PROBES + 5):
        trips.record("a", 0.001, now=float(second))
    assert (len(trips.for_replica("a")), trips.for_replica("a")[0][0]) == (MAX_PROBES, 5.0)
    for number in range(MAX_REPLICAS - 1):
        trips.record(f"r{number}", None, now=0.0)
    trips.record("a", 0.002, now=1e3)
    trips.record("new", 0.001, now=1e3)
    assert trips.for_replica("r0") == ()  # of whom nothing was heard for longest
    assert trips.for_replica("a")[-1] == (1e3, 0.002)


def test_a_session_lasts_a_shift_and_a_page_has_64() -> None:
    assert (SESSION_S, SESSIONS) == (12 * 60 * 60, 64)
