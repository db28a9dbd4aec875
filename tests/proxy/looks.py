"""What a key of the configuration does, looked at from outside: replicas that behave as requests say, and the looks."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from tests.proxy.authority import Authority
from tests.proxy.conftest import until
from tests.proxy.fakes import DONE, REPLICA, ROLE, FakeReplica, Script, chat, delta
from tests.proxy.followed import PROXY, Followed
from tests.proxy.raw import RawClient, connected

CHAT = "/v1/chat/completions"
#: Of clients.
KEY, OTHER_KEY = "sk-team", "sk-other"
ENVIRON = {"REPLICA_KEY": "sk-replica", "PUSH_TOKEN": "token-of-a-replica"}
SHORT_S, LONG_S = 0.05, 1000.0
#: A prompt of more than a few blocks of the prefix index.
LONG_PROMPT = "word " * 1000


def entry(name: str, key: str) -> str:
    return f"{name}:{sha256(key.encode()).hexdigest()}"


_numbers = iter(range(1_000_000))


def fresh(text: str) -> str:
    """One that was not sent yet, from its first words on."""
    return f"{text.split()[0]} {next(_numbers)} {text}"


# -- replicas


def scripted(name: str, told: dict[str, str]) -> Script:
    """A replica that behaves as the field `user` of the request says; `told` is which replica met such a user first."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        asked = json.loads(body) if body else {}
        user = asked.get("user", "")
        first = told.setdefault(user, name) == name
        if user.startswith("ill") and first:
            return web.json_response({"error": {"message": "ill"}}, status=500)
        if user == "mute" or (user.startswith("stuck") and first):
            await request.app[REPLICA].release.wait()
        if not asked.get("stream"):
            return web.json_response({"data": [{"id": f"of-{name}"}], "choices": [{"message": {"content": name}}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + delta(name))
        if user.startswith("torn") and first:
            assert request.transport is not None, "the client is connected"
            request.transport.abort()
            return response
        if user == "open":
            await request.app[REPLICA].release.wait()
        await response.write(delta(" and more") + DONE)  # one token alone would be doubtful
        return response

    return script


@dataclass
class Ground:
    """What the files of one test name."""

    folder: Path
    a: FakeReplica
    b: FakeReplica
    #: A port at which no connection is ever taken.
    deaf: int
    authority: Authority | None = None
    #: An engine behind TLS that shows a certificate of that authority, and one that asks for one besides.
    shows_url: str = ""
    asks_url: str = ""

    @property
    def ca(self) -> str:
        assert self.authority is not None, "this test has no certificates"
        return self.authority.ca

    def pair(self, name: str) -> tuple[str, str]:
        """Certificate and key."""
        assert self.authority is not None, "this test has no certificates"
        return self.authority.pair(name)

    def keys_file(self, **keys: str) -> str:
        path = self.folder / f"{'-'.join(keys.values())}.keys"
        path.write_text("\n".join(entry(name, key) for name, key in keys.items()))
        return str(path)


#: Path of a key as in the reference, `[]` for the first entry; a function is given the ground.
Edits = dict[str, Any]


def text_of(ground: Ground, edits: Edits) -> bytes:
    document: dict[str, Any] = {
        "proxy": dict(PROXY),
        "regions": [{"name": "here"}, {"name": "there"}],
        "replicas": [{"name": "a", "region": "here", "engine": "sglang", "url": ground.a.url}],
        "limits": {"shutdown_grace_s": 5.0},
    }
    for path, value in edits.items():
        place: Any = document
        *parents, last = path.split(".")
        for name in parents:
            place = place.setdefault(name.removesuffix("[]"), [{}] if name.endswith("[]") else {})
            place = place[0] if isinstance(place, list) else place
        place[last] = value(ground) if callable(value) else value
    return json.dumps(document).encode()


def second(region: str = "here", **more: Any) -> Edits:
    """With a second replica."""

    def both(ground: Ground) -> list[dict[str, Any]]:
        return [
            {"name": "a", "region": "here", "engine": "sglang", "url": ground.a.url},
            {"name": "b", "region": region, "engine": "sglang", "url": ground.b.url, **more},
        ]

    return {"replicas": both}


def replicas(count: int) -> Edits:
    """With so many replicas, all at one engine."""
    named = range(count)
    return {"replicas": lambda ground: [{"name": f"r{one}", "region": "here", "url": ground.a.url} for one in named]}


# -- what is looked at


class Rig:
    """The proxy, and where it is asked."""

    def __init__(self, ground: Ground, followed: Followed, edits: Edits) -> None:
        self.ground = ground
        self.followed = followed
        self.edits = edits
        self.client, self.admin = followed.fleet.client, followed.fleet.admin
        self.state = followed.state

    async def apply(self, edits: Edits) -> None:
        self.edits = edits
        applied = self.followed.count("applied")
        await self.followed.rewrite(text_of(self.ground, edits))
        assert self.followed.count("applied") == applied + 1, "the file was refused"

    async def ask(self, user: str = "", *, key: str | None = None, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {}) | ({} if key is None else {"authorization": f"Bearer {key}"})
        return await self.client.post(CHAT, content=chat(**{"stream": True, "user": user, **fields}), headers=headers)

    @asynccontextmanager
    async def open(self, count: int = 1, *, key: str | None = None) -> AsyncIterator[list[str]]:
        """As many streams have their first content and go on. Gives the replicas that serve them."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with AsyncExitStack() as stack:
            serving, reading = [], []
            for _ in range(count):
                body = chat(stream=True, user="open")
                stream = self.client.stream("POST", CHAT, content=body, headers=headers)
                response = await stack.enter_async_context(stream)
                reading.append(response.aiter_raw())  # one that is dropped closes its stream
                await anext(reading[-1])
                serving.append(response.headers.get("x-gorgo-replica", ""))
            yield serving
        await self.followed.fleet.idle()

    @asynccontextmanager
    async def asking(self, user: str, **fields: Any) -> AsyncIterator[asyncio.Task[httpx.Response]]:
        """A request on its way, whose client leaves at the end of the block if it has no answer by then."""
        held = self.state.routing.router.queued
        request = asyncio.create_task(self.ask(user, **fields))
        try:
            yield request
        finally:
            request.cancel()
            with suppress(asyncio.CancelledError):
                await request
            await until(lambda: self.state.routing.router.queued <= held)

    @property
    def seen(self) -> int:
        return len(self.ground.a.seen) + len(self.ground.b.seen)


Look = Callable[[Rig], Awaitable[object]]


def said(response: httpx.Response) -> str:
    """Status and the code of the error, if there is one, also of an error in a stream."""
    found = re.search(rb'"code": ?"(\w+)"', response.content)
    return f"{response.status_code}" + (f" {found[1].decode()}" if found else "")


def asked(user: str = "", **fields: Any) -> Look:
    async def look(rig: Rig) -> str:
        return said(await rig.ask(user, **fields))

    return look


def header(name: str, **fields: Any) -> Look:
    async def look(rig: Rig) -> str | None:
        response = await rig.ask(**fields)
        return response.headers.get(name) and str(response.headers[name])

    return look


def sent(what: Callable[[Any], object]) -> Look:
    """What of a request reaches the replica."""

    async def look(rig: Rig) -> object:
        await rig.ask()
        return what(rig.ground.a.seen[-1])

    return look


async def pushed(rig: Rig) -> str:
    """What an engine gets for a push that is no JSON, by its token."""
    headers = {"authorization": f"Bearer {ENVIRON['PUSH_TOKEN']}"}
    return said(await rig.admin.post("/internal/sync", content=b"-", headers=headers))


async def tenant_at_the_replica(rig: Rig) -> list[str]:
    """What the replica gets of a header that no list names."""
    await rig.ask(headers={"x-tenant-id": "t"})
    return rig.ground.a.seen[-1].header("x-tenant-id")


def served_by(count: int, **fields: Any) -> Look:
    """The replicas that so many requests go to."""

    async def look(rig: Rig) -> set[str]:
        return {(await rig.ask(**fields)).headers["x-gorgo-replica"] for _ in range(count)}

    return look


def beside(look: Look, count: int = 1, *, key: str | None = None) -> Look:
    """While streams are open."""

    async def beside_others(rig: Rig) -> object:
        async with rig.open(count, key=key):
            return await look(rig)

    return beside_others


def next_one(**fields: Any) -> Look:
    """What becomes of one more request: `goes` to a replica, `waits` at the proxy, or what it is told."""

    async def look(rig: Rig) -> str:
        seen, router = rig.seen, rig.state.routing.router
        held = router.queued
        async with rig.asking("open", **fields) as request:
            await until(lambda: rig.seen > seen or router.queued > held or request.done())
            if request.done():
                return said(request.result())
            return "waits" if router.queued > held else "goes"

    return look


def beside_one_that_waits(look: Look) -> Look:
    async def beside_another(rig: Rig) -> object:
        async with rig.asking("open"):
            await until(lambda: rig.state.routing.router.queued == 1)
            return await look(rig)

    return beside_another


async def next_after_a_long_prefill(rig: Rig) -> object:
    before = rig.seen
    async with rig.asking("mute", messages=[{"role": "user", "content": LONG_PROMPT * 20}]):
        await until(lambda: rig.seen > before)
        return await next_one()(rig)


def raw(send: Callable[[RawClient], Awaitable[None]]) -> Look:
    """Status of the answer to a request byte by byte; nothing where the connection is closed without one."""

    async def look(rig: Rig) -> str:
        async with connected(rig.followed.fleet.addresses.data) as client:
            await send(client)
            found = re.match(rb"HTTP/1.1 (\d+)", await client.rest())
            return found[1].decode() if found else ""

    return look


async def asked_of_one_that_fails(rig: Rig) -> str:
    return said(await rig.ask(fresh("ill")))


async def asked_of_one_that_breaks_off(rig: Rig) -> str:
    return said(await rig.client.post(CHAT, content=chat(stream=True, user=fresh("torn"))))


async def bounds_of_routes(rig: Rig) -> tuple[int, float]:
    found = rig.followed.fleet.state.routing.router.settings.route_stats(now=0.0)
    assert found is not None, "the policy has routes"
    return found.max_routes, found.ttl_s


async def share_that_explores(rig: Rig) -> float:
    return rig.followed.fleet.state.routing.router.settings.limits.explore


async def half_a_head(client: RawClient) -> None:
    client.writer.write(b"POST /v1")


async def half_a_body(client: RawClient) -> None:
    await client.post(CHAT, b"{", length=100)


def heads(*lines: str) -> Callable[[RawClient], Awaitable[None]]:
    async def send(client: RawClient) -> None:
        head = ["GET /health HTTP/1.1", "host: g", "connection: close", *lines]
        client.writer.write("\r\n".join(head).encode() + b"\r\n\r\n")

    return send


async def connection_beside_another(rig: Rig) -> str:
    """A connection without a request would make room."""
    async with rig.open():
        return str(await raw(heads())(rig))


async def common_name(rig: Rig) -> str:
    """Of the certificate that clients are shown."""
    context = ssl.create_default_context(cafile=rig.ground.ca)
    _, writer = await asyncio.open_connection(*rig.followed.fleet.addresses.data, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.transport.abort()
    return str(dict(pair for (pair,) in shown["subject"])["commonName"])


async def allowed_origin(rig: Rig) -> str | None:
    answer = await rig.client.get("/health", headers={"origin": "https://a.test"})
    found: str | None = answer.headers.get("access-control-allow-origin")
    return found


async def metrics_for_clients(rig: Rig) -> int:
    return (await rig.client.get("/metrics")).status_code


async def ready(rig: Rig) -> str:
    return said(await rig.client.get("/ready"))


async def probed(rig: Rig) -> bool:
    before = rig.ground.a.pings
    await until(lambda: rig.ground.a.pings > before + 2)
    return True


async def probed_by(rig: Rig) -> str:
    """The path of the last round trips: a replica that joins is asked for two at least."""
    last = rig.ground.a.monitored[-2:]
    return "/ping" if "/ping" in last else last[-1]


async def scraped(rig: Rig) -> bool:
    rig.ground.a.metrics = "sglang:num_running_reqs 7.0\n"
    await until(lambda: rig.followed.view("a").running_requests == 7.0)
    return True


async def events_from(rig: Rig) -> str:
    await until(lambda: any(feeds.endpoints for feeds in rig.state.replicas.kv_feed_stats.values()))
    return rig.state.replicas.kv_feed_stats["a"].endpoints[0]


async def region_of_the_proxy(rig: Rig) -> object:
    return (await rig.admin.get("/admin/fleet")).json()["region"]


async def counts_tokens(rig: Rig) -> bool:
    """Whether a prompt's tokens are counted, not estimated."""
    await rig.ask()
    name, counted = "gorgo_exact_prompts_total", {"result": "counted"}
    return bool(rig.state.telemetry.metrics.registry.get_sample_value(name, counted))


async def prompt_tokens(rig: Rig) -> int:
    request_id = (await rig.ask(messages=[{"role": "user", "content": "The replica"}])).headers["x-request-id"]
    found = (await rig.admin.get(f"/admin/decisions/{request_id}")).json()
    tokens: int = found["decisions"][0]["prompt_tokens"]
    return tokens


async def models(rig: Rig) -> list[str]:
    return [row["id"] for row in (await rig.client.get("/v1/models")).json()["data"]]


async def cut_off_by_failures_a_minute_apart(rig: Rig) -> bool:
    """Whether the region is, of which both replicas failed a probe."""
    router, now = rig.state.routing.router, rig.state.routing.clock()
    router.replicas.on_probe("a", None, now=now)
    router.replicas.on_probe("b", None, now=now + 60.0)
    found = router.view.unreachable_regions == {"here"}
    for name in ("a", "b"):
        router.replicas.on_probe(name, 0.001, now=now + 60.0)
    return found


def term(name: str) -> Look:
    """A term of the cost of replica `a`, a round trip of 100 ms away."""

    async def look(rig: Rig) -> float:
        for _ in range(100):  # the smoothed value is then the newest to the last digit
            rig.state.routing.router.replicas.on_probe("a", 0.1, now=rig.state.routing.clock())
        request_id = (await rig.ask()).headers["x-request-id"]
        found = (await rig.admin.get(f"/admin/decisions/{request_id}")).json()
        return float(round(found["decisions"][0]["candidates"][0]["terms"][name], 6))

    return look


async def compared(rig: Rig) -> int:
    """The candidates of a decision."""
    request_id = (await rig.ask()).headers["x-request-id"]
    found = (await rig.admin.get(f"/admin/decisions/{request_id}")).json()
    return len(found["decisions"][0]["candidates"])


async def scored_beside(rig: Rig) -> bool:
    await rig.ask()
    await rig.followed.fleet.idle()
    return (await rig.admin.get("/admin/samples")).json()["samples"][-1]["shadow_rank"] is not None


async def most_of_a_repeated_prompt_is_estimated(rig: Rig) -> bool:
    """Its 5,000 bytes are 1,250 tokens."""
    messages = [{"role": "user", "content": LONG_PROMPT}]
    for _ in range(2):
        response = await rig.ask(messages=messages)
        await rig.followed.fleet.idle()
    return int(response.headers["x-gorgo-estimated-cached-tokens"]) > 1000


async def predicted_to_take_minutes(rig: Rig) -> bool:
    """A prompt of 1,250 tokens that is cached nowhere."""
    messages = [{"role": "user", "content": fresh(LONG_PROMPT)}]
    return float((await rig.ask(messages=messages)).headers["x-gorgo-predicted-ttft-ms"]) > 100_000


async def two_requests(rig: Rig) -> list[str]:
    return [said(await rig.ask(key=KEY)) for _ in range(2)]


async def both_keys(rig: Rig) -> list[str]:
    return [said(await rig.ask(key=key)) for key in (KEY, OTHER_KEY)]


async def order_of_two_who_wait(rig: Rig) -> list[str]:
    before = len(rig.ground.a.seen)
    async with asyncio.TaskGroup() as clients, rig.open(key=OTHER_KEY):
        clients.create_task(rig.ask("team", key=KEY))
        await until(lambda: rig.state.routing.router.queued == 1)
        clients.create_task(rig.ask("other", key=OTHER_KEY))
        await until(lambda: rig.state.routing.router.queued == 2)
    return [json.loads(request.body)["user"] for request in rig.ground.a.seen[before + 1 :]]


async def late_request(rig: Rig) -> str:
    """`twice` if it is sent to a second replica."""
    for _ in range(4):  # of which a share may be
        await rig.ask()
    before = rig.seen
    async with rig.asking(fresh("stuck")) as request:
        await until(lambda: rig.seen > before)
        rig.state.routing.gateway.apply(rig.state.routing.router.handle_timer(now=rig.state.routing.clock() + 10.0))
        if rig.state.routing.router.in_flight == 1:
            return "once"
        assert said(await request) == "200"
        return "twice"


async def more_failures_than_the_least_of_retries(rig: Rig) -> bool:
    """Whether each request is tried again. Twenty would be in any case."""
    found = set()
    for _ in range(21):
        found.add(said(await rig.ask(fresh("ill"))))
        for _ in "abab":  # good answers in between, so that neither is ejected
            await rig.ask(fresh("well"))
    return found == {"200"}


async def first_load_of_a_newcomer(rig: Rig) -> int:
    edits = dict(rig.edits)
    await rig.apply(edits | second())
    async with rig.open(8) as serving:
        found = serving.count("b")
    await rig.apply(edits)
    return found


async def stopping(rig: Rig) -> str:
    async with rig.client.stream("POST", CHAT, content=chat(stream=True, user="open")) as response:
        parts = response.aiter_raw()
        got = await anext(parts)
        rig.followed.fleet.shutdown.set()
        got += b"".join([part async for part in parts])
    return "cut" if b'"code": "stopping"' in got else "finished"
