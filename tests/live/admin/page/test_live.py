"""Updates: what is sent when, to how many, and to whom no more. Over sockets it is in `test_routes`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gorgo.live.admin.page.live import LiveUpdates, TakeSnapshot
from gorgo.live.admin.page.markup import Html
from tests.proxy.conftest import until


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
