"""What a failing replica means to the client: nothing, as long as there is another and no content was sent."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import re
import socket
from typing import Any

import httpx
import pytest
from aiohttp import web

from gorgo.config.model import Config
from gorgo.core.messages.actions import HealthChanged
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from tests.proxy.conftest import Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, ROLE, USAGE, Script, answer, chat, delta, event, hang, reset_after, stream
from tests.proxy.raw import connected

GOOD = stream(ROLE, delta("good"), DONE)
GOOD_BYTES = ROLE + delta("good") + DONE


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def ask(fleet: Running, **fields: object) -> httpx.Response:
    return await fleet.client.post("/v1/chat/completions", content=chat(stream=True, **fields))


BROKEN_BEFORE_CONTENT = {
    "500": answer(500),
    "502 with a large body": answer(502, b"x" * 1_000_000),
    "reset before the headers": reset_after(),
    "reset after the headers": reset_after(headers={"x-header": "1"}),
    "reset after the role": reset_after(ROLE),
    "closed after the role": stream(ROLE),
    "closed after nothing": stream(),
    "error event": stream(ROLE, event({"error": {"message": "out of memory", "code": 500}})),
    "error event without a code": stream(event({"error": {"message": "no"}})),
    "end without content for a whole answer": answer(200, b""),
    "login page": answer(200, b"<html>log in</html>", {"content-type": "text/html"}),
    "error object": answer(200, b'{"error": {"message": "out of memory"}}'),
    "busy in an error object": answer(200, b'{"error": {"message": "full", "code": 429}}'),
    "half an object": answer(200, b'{"choices": [{"message"'),
    "broken chunking": answer(200, b"", {"transfer-encoding": "chunked", "content-encoding": "identity"}),
}


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in BROKEN_BEFORE_CONTENT.items()])
async def test_failure_before_content_is_invisible(start: Start, script: Script) -> None:
    fleet = await start.fleet([script], [GOOD])
    response = await ask(fleet)
    assert (response.status_code, response.content) == (200, GOOD_BYTES)
    assert response.headers["x-gorgo-replica"] == "r1"
    await fleet.idle()
    sample = next(iter(fleet.state.routing.router.samples))
    assert (sample.replica, sample.retries) == ("r1", 1)


@pytest.mark.parametrize(
    "script", [answer(429, headers={"retry-after": "7"}), answer(503), stream(event({"error": {"code": 429}}))]
)
async def test_busy_replica_is_passed_over_and_not_blamed(start: Start, script: Script) -> None:
    fleet = await start.fleet([script], [GOOD])
    assert (await ask(fleet)).content == GOOD_BYTES
    await fleet.idle()
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures == 0


async def refused_config(start: Start) -> tuple[Config, list]:  # type: ignore[type-arg]
    good = await start.replica(GOOD)
    config = config_for([good, good])
    return with_replica(config, 0, url=f"http://127.0.0.1:{closed_port()}"), [good]


async def test_replica_that_refuses_connections_is_passed_over(start: Start) -> None:
    fleet = await start.proxy(*await refused_config(start))
    for _ in range(4):
        assert (await ask(fleet)).content == GOOD_BYTES
    await fleet.idle()


async def test_silent_replica_is_given_up_after_the_first_content_timeout(start: Start) -> None:
    fleet = await start.fleet([hang()], [GOOD], first_token_timeout_s=0.2)
    assert (await ask(fleet)).content == GOOD_BYTES
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_role_alone_does_not_stop_the_first_content_timeout(start: Start) -> None:
    fleet = await start.fleet([hang(ROLE)], [GOOD], first_token_timeout_s=0.2)
    assert (await ask(fleet)).content == GOOD_BYTES
    await until(fleet.replicas[0].dropped.is_set)


async def test_whole_answer_that_breaks_off_is_replaced(start: Start) -> None:
    half = reset_after(b'{"choices"', headers={"content-type": "application/json", "content-length": "1000"})
    fleet = await start.fleet([half], [answer(200, b'{"good":1}')])
    response = await fleet.client.post("/v1/chat/completions", content=chat())
    assert response.content == b'{"good":1}'
    await fleet.idle()


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (answer(503), 503, "replicas_busy"),
        (answer(429), 429, "replicas_busy"),
        (reset_after(), 502, "upstream_failed"),
    ],
)
async def test_last_failure_is_an_openai_shaped_error(start: Start, script: Script, status: int, code: str) -> None:
    fleet = await start.fleet([script], [script])
    response = await ask(fleet)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in response.headers) == (code == "replicas_busy")
    # A reset may be a kept connection that went stale, so it is tried once more on a new one.
    assert all(len(replica.seen) <= 2 for replica in fleet.replicas)
    await fleet.idle()


async def test_the_failure_of_the_only_replica_is_an_error_of_the_proxy(start: Start) -> None:
    fleet = await start.fleet([answer(500)])
    response = await ask(fleet)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_failed")
    await fleet.idle()


@pytest.mark.parametrize("status", [500, 501, 502])
async def test_what_several_replicas_answer_alike_is_the_request_s_fault_and_passes_as_the_engine_wrote_it(
    start: Start, status: int
) -> None:
    body = b'{"error":{"message":"this server does not support embeddings"}}'
    fleet = await start.fleet(*[[answer(status, body, {"content-type": "application/json"})] for _ in range(2)])
    for _ in range(5):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (status, body)
    await fleet.idle()
    assert set(fleet.state.routing.router.view.health_states().values()) == {"healthy"}


async def test_an_error_object_of_several_replicas_passes_too(start: Start) -> None:
    body = b'{"error": {"message": "out of memory"}}'
    fleet = await start.fleet([answer(200, body)], [answer(200, body)])
    response = await ask(fleet)
    assert response.content == body
    await fleet.idle()


async def test_timeout_everywhere_is_a_504(start: Start) -> None:
    fleet = await start.fleet([hang()], first_token_timeout_s=0.1)
    assert (await ask(fleet)).status_code == 504
    await fleet.idle()


async def test_no_more_replicas_are_asked_than_allowed(start: Start) -> None:
    fleet = await start.fleet(*[[answer(500)] for _ in range(5)], max_attempts=3)
    assert (await ask(fleet)).status_code == 500
    assert sum(len(replica.seen) for replica in fleet.replicas) == 3


@pytest.mark.parametrize("status", [400, 402, 413, 422])
async def test_other_4xx_passes_and_is_not_retried(start: Start, status: int) -> None:
    body = b'{"error":{"message":"your fault"}}'
    fleet = await start.fleet([answer(status, body, {"x-model": "1"})], [GOOD])
    response = await ask(fleet)
    assert (response.status_code, response.content) == (status, body)
    assert response.headers["x-model"] == "1"
    await fleet.idle()
    assert fleet.replicas[1].seen == []
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures_in_a_row == 0


@pytest.mark.parametrize("status", [401, 403, 404, 405])
@pytest.mark.parametrize("as_event", [False, True])
async def test_what_one_replica_refuses_and_another_answers_is_the_fault_of_the_first(
    start: Start, status: int, as_event: bool
) -> None:
    said = event({"error": {"message": "no", "code": status}})
    refuses = stream(said, DONE) if as_event else answer(status, b'{"error":{"message":"no"}}')
    fleet = await start.fleet([refuses], [GOOD])
    for _ in range(12):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (200, GOOD_BYTES)
    await fleet.idle()
    assert len(fleet.replicas[0].seen) == 3, "three such requests eject it"
    (view, _) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert (view.state, view.ejected_by, view.refusal, view.failures) == ("ejected", "refusals", status, 3)


@pytest.mark.parametrize("status", [401, 403, 404, 405])
async def test_what_every_replica_refuses_is_the_client_s_fault_and_ejects_none(start: Start, status: int) -> None:
    body = b'{"error":{"message":"your fault"}}'
    fleet = await start.fleet([answer(status, body, {"x-model": "1"})], [answer(status, body, {"x-model": "2"})])
    for _ in range(10):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (status, body)
        assert response.headers["x-model"] in ("1", "2")
    await fleet.idle()
    assert sum(len(replica.seen) for replica in fleet.replicas) <= 20, "once each"
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.state, view.failures, view.refusal) for view in views] == [("healthy", 0, None)] * 2


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_never_costs_a_request_while_another_is_open(start: Start, status: int) -> None:
    fleet = await start.fleet([answer(status)], [GOOD])
    for _ in range(60):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (200, GOOD_BYTES)
    await fleet.idle()
    assert 1 <= len(fleet.replicas[0].seen) <= 8
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"retry-after": "17"},
        {"retry-after": "Wed, 21 Oct 2026 07:28:17 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
    ],
)
async def test_retry_after_of_an_engine_reaches_the_client_if_there_is_no_other(
    start: Start, headers: dict[str, str]
) -> None:
    fleet = await start.fleet([answer(429, headers=headers)])
    response = await ask(fleet)
    assert (response.status_code, response.headers["retry-after"]) == (429, "17")
    await fleet.idle()


@pytest.mark.parametrize(
    "script",
    [
        stream(ROLE, delta("a")),
        reset_after(ROLE, delta("a")),
        stream(ROLE, delta("a"), event({"error": {"message": "out of memory", "code": 500}})),
        stream(ROLE, delta("a"), DONE),
        stream(ROLE, DONE),
        answer(200, b'{"choices": [{}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}'),
    ],
    ids=["truncated", "reset", "error after content", "one token", "no token", "one token in a body"],
)
async def test_a_replica_whose_answers_end_too_early_costs_three_requests_and_no_more(
    start: Start, script: Script
) -> None:
    long = stream(ROLE, delta("good"), delta(" and long"), DONE)
    fleet = await start.fleet([script], [long], continuations=0)
    got = [await ask(fleet) for _ in range(24)]
    lost = [response for response in got if b"long" not in response.content]
    assert 2 <= len(lost) <= 3
    assert all(b"long" in response.content for response in got[6:])
    await fleet.idle()
    (view, _) = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert (view.state, view.ejected_by) == ("ejected", "answers")


async def test_a_stream_without_its_end_tells_the_client(start: Start) -> None:
    fleet = await start.fleet([stream(ROLE, delta("a"))])
    response = await ask(fleet)
    assert response.content.startswith(ROLE + delta("a"))
    assert b'"code": "upstream_failed"' in response.content
    await fleet.idle()


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_completion_tokens": 1}, {"store": True}])
async def test_one_token_of_a_client_that_wants_no_more_is_a_good_answer(
    start: Start, fields: dict[str, object]
) -> None:
    short = stream(ROLE, delta("yes"), DONE)
    fleet = await start.fleet([short], [stream(ROLE, delta("yes"), delta(" or no"), DONE)])
    for _ in range(20):
        assert (await ask(fleet, **fields)).status_code == 200
    await fleet.idle()
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.state, view.failures, view.attempts) for view in views] == [("healthy", 0, 10)] * 2


async def test_one_token_everywhere_is_forwarded_unchanged(start: Start) -> None:
    fleet = await start.fleet(*[[stream(ROLE, delta("yes"), USAGE, DONE)] for _ in range(2)])
    for _ in range(20):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (200, ROLE + delta("yes") + USAGE + DONE)
        assert response.headers["x-gorgo-replica"] in ("r0", "r1")
    await fleet.idle()
    assert {view.state for view in fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())} == {
        "healthy"
    }


async def test_error_event_that_blames_the_request_passes(start: Start) -> None:
    said = event({"error": {"message": "too long", "code": 400}})
    fleet = await start.fleet([stream(said, DONE)], [GOOD])
    assert (await ask(fleet)).content == said + DONE
    await fleet.idle()
    assert fleet.replicas[1].seen == []


async def test_failure_after_content_ends_the_stream_with_an_error_event(start: Start) -> None:
    fleet = await start.fleet([reset_after(ROLE, delta("a"))], [GOOD], continuations=0)
    response = await ask(fleet)
    assert response.content.startswith(ROLE + delta("a"))
    last = response.content.rstrip().split(b"\n\n")[-1]
    assert b'"code": "upstream_failed"' in last
    assert last.startswith(b"data: ")
    await fleet.idle()
    assert fleet.replicas[1].seen == []
    assert next(iter(fleet.state.routing.router.samples)).status == 502


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


@pytest.mark.parametrize("end", [(STOP,), (STOP, USAGE), (USAGE,), (STOP, DONE)], ids=["stop", "both", "usage", "done"])
@pytest.mark.parametrize("breaks", [False, True], ids=["without its end", "broken"])
async def test_a_stream_whose_end_is_proven_gets_no_error_event(
    start: Start, end: tuple[bytes, ...], breaks: bool
) -> None:
    chunks = (ROLE, delta("a"), delta("b"), *end)
    fleet = await start.fleet([(reset_after if breaks else stream)(*chunks)], [GOOD])
    response = await ask(fleet)
    last_event = b"" if DONE in end else DONE
    assert response.content == b"".join(chunks) + last_event
    await fleet.idle()
    assert next(iter(fleet.state.routing.router.samples)).status == 200
    views = fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())
    assert [(view.failures, view.attempts) for view in views] == [(0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("route", "fields", "posts"),
    [
        ("/v1/chat/completions", {}, 2),
        ("/v1/chat/completions", {"store": True}, 1),
        ("/v1/responses", {"input": "hello"}, 1),
        ("/v1/responses", {"input": "hello", "store": False}, 2),
    ],
)
async def test_what_an_engine_stores_reaches_one_engine_once(
    start: Start, route: str, fields: dict[str, object], posts: int
) -> None:
    fleet = await start.fleet([reset_after()], [reset_after()])
    for number in (1, 2):  # the second one on connections that the first and the probes have left
        response = await fleet.client.post(route, content=chat(stream=True, **fields))
        assert response.status_code in (502, 503)
        assert sum(len(replica.seen) for replica in fleet.replicas) >= number * posts
    await fleet.idle()
    if posts == 1:
        assert sum(len(replica.seen) for replica in fleet.replicas) == 2


async def test_two_choices_of_which_one_is_cut_are_no_whole_answer(start: Start) -> None:
    cut = event({"choices": [{"index": 1, "delta": {"content": "b"}, "finish_reason": None}]})
    fleet = await start.fleet([stream(delta("a"), cut, STOP)])
    response = await ask(fleet, n=2)
    assert b'"code": "upstream_failed"' in response.content
    await fleet.idle()


async def test_silence_after_content_ends_the_stream_with_an_error_event(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"))], stream_idle_timeout_s=0.2)
    response = await ask(fleet)
    assert response.content.startswith(delta("a"))
    assert b"upstream_failed" in response.content
    await until(fleet.replicas[0].dropped.is_set)
    await fleet.idle()


async def test_body_of_declared_length_is_cut_when_its_replica_breaks_off(start: Start) -> None:
    headers = {"content-type": "application/json", "content-length": "2000000"}
    fleet = await start.fleet([reset_after(b"{" + b"x" * 100_000, headers=headers)])
    with pytest.raises(httpx.RemoteProtocolError):
        await fleet.client.post("/v1/chat/completions", content=chat())
    await fleet.idle()


async def test_replica_that_hangs_up_after_a_while_is_not_sent_the_request_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a kept connection: what it says no word to for so long it had, and it may be what it died of."""
    monkeypatch.setattr("gorgo.live.upstream.client.STALE_S", 0.0)
    fleet = await start.fleet([GOOD, GOOD, reset_after()], [GOOD])
    for _ in range(5):
        response = await ask(fleet)
        assert (response.status_code, response.content) == (200, GOOD_BYTES)
    assert len(fleet.replicas[0].seen) == 3
    await fleet.idle()


async def test_connection_that_the_server_closed_between_requests_is_nobodys_failure(start: Start) -> None:
    """A server that promises keep-alive and hangs up when the next request comes: as a keep-alive that just ran out."""
    requests = 0
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        connections.add(writer)
        served = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"POST"):
                    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                if served == 1 and head.startswith(b"POST"):
                    return
                served += head.startswith(b"POST")
                requests += head.startswith(b"POST")
                status = b"200 OK" if head.startswith((b"POST", b"GET /ping")) else b"404 Not Found"
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\n{}")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        good = await start.replica(GOOD)
        port = server.sockets[0].getsockname()[1]
        config = with_replica(config_for([good]), 0, url=f"http://127.0.0.1:{port}")
        fleet = await start.proxy(config, [good])
        for _ in range(6):
            response = await fleet.client.post("/v1/chat/completions", content=chat())
            assert (response.status_code, response.content) == (200, b"{}")
        await fleet.idle()
        assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures == 0
        assert all(sample.retries == 0 for sample in fleet.state.routing.router.samples)
        assert requests == 6


async def test_exhausted_connections_are_busy_not_broken(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"), rest=[DONE])], connections_per_replica=1)
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)):
        response = await ask(fleet)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replicas_busy")
        fleet.replicas[0].release.set()
    await fleet.idle()


async def test_sockets_that_this_process_has_not_are_no_failure_of_a_replica(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = await start.replica(GOOD)
    # Nobody listens there at the start, so that no connection is kept.
    fleet = await start.proxy(
        with_replica(config_for([replica]), 0, url=f"http://127.0.0.1:{closed_port()}"), [replica]
    )

    async def no_descriptor(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("gorgo.live.upstream.address.start_connection", no_descriptor)
    for _ in range(5):
        response = await ask(fleet)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "replicas_busy")
        assert response.headers["retry-after"] == "1"
    watcher = ReplicaMonitor(fleet.state, fleet.state.replicas.targets["r0"])
    for _ in range(5):
        await watcher.probe()
    assert fleet.state.routing.router.view.health_states() == {"r0": "healthy"}
    await fleet.idle()


async def test_too_many_in_flight_is_a_429_with_retry_after(start: Start) -> None:
    fleet = await start.fleet([hang(delta("a"), rest=[DONE])], max_in_flight=1)
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)):
        response = await ask(fleet)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        fleet.replicas[0].release.set()
    await fleet.idle()


async def test_connection_is_cut_after_a_stream_that_could_not_be_told(start: Start) -> None:
    """One that may go on elsewhere has no length, so that its client is told."""
    headers = {"content-length": "100000"}
    fleet = await start.fleet([reset_after(delta("a"), headers=headers)], continuations=0)
    async with connected(fleet.addresses.data) as client:
        await client.post("/v1/chat/completions", chat(stream=True))
        assert b"content-length: 100000" in await client.head()
        assert await client.rest() == delta("a")
    await fleet.idle()


async def test_error_event_too_late_to_be_hidden_is_still_the_replicas_failure(start: Start) -> None:
    comments = (b": " + b"x" * 1000 + b"\n\n") * 70
    said = event({"error": {"message": "no", "code": 500}})
    fleet = await start.fleet([hang(comments, rest=[said])], [GOOD])
    async with fleet.client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as response:
        fleet.replicas[0].release.set()
        assert (await response.aread()) == comments + said
    await fleet.idle()
    assert fleet.state.routing.router.view.snapshots(now=fleet.state.routing.clock())[0].failures == 1


LARGE = (
    b'{"choices":[{"message":{"content":"' + b"x" * 300_000 + b'"}}],"usage":{"prompt_tokens":3,"completion_tokens":9}}'
)


@pytest.mark.parametrize("length", [True, False])
async def test_a_large_answer_in_one_piece_that_breaks_off_is_asked_for_at_another_replica(
    start: Start, length: bool
) -> None:
    headers = {"content-type": "application/json", **({"content-length": str(len(LARGE))} if length else {})}
    half = [LARGE[at : at + 50_000] for at in range(0, 200_000, 50_000)]
    fleet = await start.fleet([reset_after(*half, headers=headers)], [answer(200, LARGE)])
    response = await fleet.client.post("/v1/chat/completions", content=chat())
    assert (response.status_code, response.content == LARGE) == (200, True)
    assert response.headers["x-gorgo-replica"] == "r1"
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    assert (sample.replica, sample.retries, sample.output_tokens) == ("r1", 1, 9)
    assert fleet.state.buffers.used_bytes == 0


async def test_an_answer_beyond_what_is_retained_is_passed_as_it_comes_and_cut_with_its_replica(start: Start) -> None:
    headers = {"content-type": "application/json"}
    large = [b'{"data":"', *[b"x" * 65_536] * 20]
    fleet = await start.fleet([reset_after(*large, headers=headers)], [answer(200, LARGE)])
    with pytest.raises(httpx.RemoteProtocolError):
        await fleet.client.post("/v1/chat/completions", content=chat())
    await fleet.idle()
    assert fleet.replicas[1].seen == []


# --- Why a replica was ejected: in the log, in status, in `explain` and in the client's 502, with no other's prompt.


CHAT = "/v1/chat/completions"
SECRET = "the launch code of client one is swordfish"


def echoing(status: int) -> Script:
    """Fails, and repeats the prompt in its error, with control characters."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        content = json.loads(body)["messages"][0]["content"]
        message = f"CUDA error: device-side assert\x1b[2J while serving {content}"
        return web.json_response({"error": {"message": message, "type": "server_error"}}, status=status)

    return script


async def ejected(start: Start, *scripts: Script) -> Any:
    fleet = await start.fleet([*scripts], [stream(delta("x"), DONE)])
    for _ in range(8):
        messages = [{"role": "user", "content": SECRET}]
        response = await fleet.client.post(CHAT, content=chat(stream=True, messages=messages))
        assert response.status_code == 200
    return fleet


async def test_log_status_and_explain_say_why_and_for_how_long(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await ejected(start, echoing(500))
    (said,) = [record for record in caplog.records if record.getMessage() == "replica_ejected"]
    fields = getattr(said, "fields", {})
    assert (fields["replica"], fields["by"], fields["for_s"]) == ("r0", "attempts", 5.0)
    words = r"status 500 after [0-9.e-]+ s: CUDA error: device-side assert\?\[2J while serving \[\.\.\.\]"
    assert re.fullmatch(words, fields["why"])
    status = (await fleet.admin.get("/admin/status")).json()
    (row,) = [row for row in status["replicas"] if row["name"] == "r0"]
    assert (row["ejected_by"], row["ejected_why"]) == ("attempts", fields["why"])
    assert row["reason"].startswith(f"requests to it failed ({fields['why']}); retried in ")
    assert any(fields["why"] in alert["text"] for alert in status["alerts"])
    decisions = (await fleet.admin.get("/admin/decisions")).json()["decisions"]
    newest = (await fleet.admin.get(f"/admin/decisions/{decisions[0]['request_id']}")).json()["decisions"][0]
    assert newest["excluded"] == {"r0": f"ejected: {fields['why']}"}
    everything = json.dumps([status, newest, caplog.text, (await fleet.admin.get("/admin/page")).text])
    assert "swordfish" not in everything
    assert "launch code" not in everything


async def test_client_s_502_names_each_attempt_with_its_time_and_the_engine_s_text(start: Start) -> None:
    fleet = await start.fleet([echoing(500)], [reset_after()], [answer(502, b'{"detail": "no worker"}')])
    response = await fleet.client.post(CHAT, content=chat(messages=[{"role": "user", "content": SECRET}]))
    assert response.status_code == 502
    message = response.json()["error"]["message"]
    assert message.startswith("no replica could answer (tried 3 replicas): ")
    assert "r0: status 500 after " in message
    assert "CUDA error: device-side assert?[2J while serving [...]" in message
    assert "r1: disconnected after " in message
    assert "r2: status 502 after " in message
    assert message.endswith(" s: no worker")
    assert "swordfish" not in message
    assert "\x1b" not in message


async def test_502_of_another_client_has_nothing_of_the_first_one_s_prompt(start: Start) -> None:
    fleet = await start.fleet([echoing(500)], [reset_after()])
    for prompt in (SECRET, "what is the weather"):
        response = await fleet.client.post(CHAT, content=chat(messages=[{"role": "user", "content": prompt}]))
        assert response.status_code == 502
    assert "swordfish" not in response.text


async def test_error_event_before_any_content_is_the_engine_s_text_too(start: Start) -> None:
    failing = stream(b'data: {"error": {"message": "KV cache is full", "code": 500}}\n\n', DONE)
    fleet = await start.fleet([failing], [reset_after()])
    response = await fleet.client.post(CHAT, content=chat(stream=True))
    assert "r0: status 500 after " in response.json()["error"]["message"]
    assert "KV cache is full" in response.json()["error"]["message"]


async def test_readmitted_replica_has_no_reason_left(start: Start) -> None:
    fleet = await ejected(start, echoing(500))
    router = fleet.state.routing.router
    for _ in range(2):
        router.handle_timer(now=fleet.state.routing.clock() + 60.0)
        router.replicas.on_probe("r0", 0.001, now=fleet.state.routing.clock() + 60.0)
    (view, _) = router.view.snapshots(now=fleet.state.routing.clock())
    assert (view.state, view.ejected_why) == ("healthy", None)
    assert not [event for event in router.fleet_events if isinstance(event, HealthChanged) and event.why]
