"""What the proxy refuses before any replica is asked, what it strips and adds, and whose request it was."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config.model import ClientRuleConfig, ClientsConfig
from gorgo.live.request.record import RequestRecord
from tests.proxy.conftest import QUIET, Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, answer, chat, delta, event, stream
from tests.proxy.raw import connected

# --- What the proxy refuses before any replica is asked, and what it strips and adds on the way.


CHAT = "/v1/chat/completions"


def checked(response: Any, status: int, code: str, *details: str) -> dict[str, Any]:
    """An OpenAI-shaped error with that status and code."""
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", *details}
    assert error["code"] == code
    return dict(error)


@pytest.fixture
async def fleet(start: Start) -> Running:
    return await start.fleet([answer(200, b'{"ok":1}')], max_body_bytes=100_000)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"not json", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b'"text"', "invalid_json"),
        (b'{"a":', "invalid_json"),
        (b"\xff\xfe\xfd", "invalid_json"),
        (b'{"a":' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "invalid_json"),
        (b'{"model": "m"}', "invalid_request"),
        (b'{"model": "m", "messages": 7}', "invalid_request"),
    ],
)
async def test_body_that_cannot_be_read_is_a_400(fleet: Running, content: bytes, code: str) -> None:
    checked(await fleet.client.post(CHAT, content=content), 400, code)
    assert fleet.replicas[0].seen == []
    await fleet.idle()


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_a_415(fleet: Running, kind: str) -> None:
    response = await fleet.client.post(CHAT, content=chat(), headers={"content-type": kind})
    checked(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/x+json"])
async def test_json_by_any_name_is_taken(fleet: Running, kind: str) -> None:
    assert (await fleet.client.post(CHAT, content=chat(), headers={"content-type": kind})).status_code == 200


async def test_body_above_the_limit_is_a_413(fleet: Running) -> None:
    checked(await fleet.client.post(CHAT, content=b"x" * 150_000), 413, "request_too_large")
    assert (await fleet.client.post(CHAT, content=chat())).status_code == 200


async def test_chunked_body_above_the_limit_is_a_413(fleet: Running) -> None:
    async def pieces() -> Any:
        for _ in range(15):
            yield b"x" * 10_000

    checked(await fleet.client.post(CHAT, content=pieces()), 413, "request_too_large")


async def test_endless_body_is_a_413_and_does_not_hang(fleet: Running) -> None:
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, b"", length=10_000_000_000)

        async def pour() -> None:
            try:
                while True:
                    client.writer.write(b"x" * 65_536)
                    await client.writer.drain()
            except ConnectionError:
                return

        pouring = asyncio.create_task(pour())
        assert (await client.head()).startswith(b"HTTP/1.1 413")
        pouring.cancel()
    await fleet.idle()


async def test_body_that_never_comes_is_a_408(start: Start) -> None:
    fleet = await start.fleet([answer(200)], body_timeout_s=0.05)
    async with connected(fleet.addresses.data) as client:
        await client.post(CHAT, b"{", length=100)
        assert (await client.head()).startswith(b"HTTP/1.1 408")
    await fleet.idle()


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat/completions/", "/admin/fleet"])
async def test_other_routes_are_a_404(fleet: Running, path: str) -> None:
    checked(await fleet.client.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/metric", "/metrics"),
    ],
)
async def test_404_of_a_route_names_the_nearest_one_and_all_others(fleet: Running, path: str, near: str) -> None:
    message = (await fleet.client.post(path, content=chat())).json()["error"]["message"]
    assert message.startswith(f"no such route (did you mean '{near}'?); there are: /v1/chat/completions, /v1/comple")
    assert message.endswith("/metrics, /v1/models, /v1/models/{model}, /openapi.json")


async def test_path_like_no_route_has_no_hint_and_is_not_repeated(fleet: Running) -> None:
    for path in ("/", "/" + "canary" * 1000):
        message = (await fleet.client.get(path)).json()["error"]["message"]
        assert message.startswith("no such route; there are: /v1/chat/completions, ")
        assert len(message) < 400


async def test_large_body_to_nowhere_does_not_block_the_connection(fleet: Running) -> None:
    for _ in range(2):
        checked(await fleet.client.post("/nowhere", content=b"x" * 3_000_000), 404, "not_found")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
async def test_wrong_method_is_a_405_that_names_the_right_one(fleet: Running, method: str) -> None:
    response = await fleet.client.request(method, CHAT)
    checked(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert response.headers["x-request-id"]


async def test_post_to_a_get_route_is_a_405(fleet: Running) -> None:
    response = await fleet.client.post("/health", content=b"x" * 1_000_000)
    checked(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET, HEAD"


async def test_client_headers_that_pick_a_target_are_stripped(fleet: Running) -> None:
    targets = {
        "x-gateway-destination-endpoint": "10.0.0.1",
        "x-gateway-destination-endpoint-subset": "a",
        "x-smg-target-worker": "1",
        "x-dynamo-worker-instance-id": "1",
        "x-dynamo-dp-rank": "1",
        "x-data-parallel-rank": "1",
        "X-Override-Rid": "1",
        "x-gorgo-replica": "r7",
    }
    hop = {"connection": "x-mine", "x-mine": "1", "te": "trailers", "proxy-authorization": "x", "keep-alive": "5"}
    kept = {"openai-project": "t", "traceparent": "00-1-2-01", "authorization": "Bearer client"}
    await fleet.client.post(CHAT, content=chat(), headers={**targets, **hop, **kept})
    seen = fleet.replicas[0].seen[0]
    names = {name.decode().lower() for name, _ in seen.headers}
    assert not names & {name.lower() for name in targets}
    assert not names & {"x-mine", "te", "proxy-authorization", "keep-alive", "transfer-encoding"}
    assert {name: seen.header(name) for name in kept} == {name: [value] for name, value in kept.items()}
    assert seen.header("host") == [fleet.replicas[0].url.removeprefix("http://")]
    assert seen.header("content-length") == [str(len(chat()))]


async def test_headers_of_the_answer_keep_order_and_duplicates(start: Start) -> None:
    async def twice(request: Any, body: bytes) -> Any:
        from aiohttp import web

        response = web.Response(body=b"{}", headers={"content-type": "application/json"})
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Openai-Part", "a=1")
        response.headers.add("Openai-Part", "b=2")
        response.headers.add("Connection", "x-private")
        response.headers.add("X-Private", "1")
        response.headers.add("X-Gorgo-Replica", "forged")
        return response

    fleet = await start.fleet([twice])
    response = await fleet.client.post(CHAT, content=chat())
    assert response.headers.get_list("openai-part") == ["a=1", "b=2"]
    assert "set-cookie" not in response.headers
    assert "x-private" not in response.headers
    assert response.headers.get_list("x-gorgo-replica") == ["r0"]
    await fleet.client.post(CHAT, content=chat(), headers={"cookie": "a=1"})
    assert fleet.replicas[0].seen[1].header("cookie") == []


async def test_replica_key_replaces_the_clients_and_is_never_shown(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="gorgo")
    replica = await start.replica(answer(200))
    config = with_replica(config_for([replica]), 0, api_key_env="R0_KEY")
    fleet = await start.proxy(config, [replica], environ={"R0_KEY": "sk-upstream"})
    headers = {"authorization": "Bearer client", "x-api-key": "client", "api-key": "client"}
    response = await fleet.client.post(CHAT, content=chat(), headers=headers)
    seen = replica.seen[0]
    assert seen.header("authorization") == ["Bearer sk-upstream"]
    assert seen.header("x-api-key") == seen.header("api-key") == []
    shown = f"{response.headers} {(await fleet.admin.get('/admin/fleet')).text} {fleet.state.replicas.targets['r0']!r}"
    assert "sk-upstream" not in shown + caplog.text


async def test_request_id_is_kept_if_it_is_harmless_else_made(fleet: Running) -> None:
    given = await fleet.client.post(CHAT, content=chat(), headers={"x-request-id": "abc-123_4.5"})
    assert given.headers["x-request-id"] == "abc-123_4.5"
    assert fleet.replicas[0].seen[0].header("x-request-id") == ["abc-123_4.5"]
    for bad in ("", "a b", "x" * 129, '"quoted"', "a/b"):
        made = await fleet.client.post(CHAT, content=chat(), headers={"x-request-id": bad})
        assert len(made.headers["x-request-id"]) == 32


async def test_same_request_id_twice_at_once_is_served_twice(fleet: Running) -> None:
    calls = [fleet.client.post(CHAT, content=chat(), headers={"x-request-id": "same"}) for _ in range(8)]
    assert {response.status_code for response in await asyncio.gather(*calls)} == {200}
    await fleet.idle()
    assert len(fleet.state.routing.router.samples) == 8


async def test_answers_of_the_proxys_own_name_no_server_and_one_date(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    for response in (await fleet.client.get("/health"), await fleet.client.get("/nowhere")):
        assert "server" not in response.headers
        assert len(response.headers.get_list("date")) == 1


async def test_health_and_ready(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert (await fleet.client.get("/health")).status_code == 200
    assert (await fleet.client.get("/ready")).status_code == 200
    assert (await fleet.client.head("/health")).status_code == 200
    fleet.state.routing.router.replicas.drain("r0", now=fleet.state.routing.clock())
    checked(await fleet.client.get("/ready"), 503, "no_replica")
    assert (await fleet.client.get("/health")).status_code == 200


async def test_ready_waits_for_as_many_replicas_as_are_wanted(start: Start) -> None:
    fleet = await start.fleet([answer(200)], [answer(200)], proxy=replace(QUIET, min_ready_replicas=2))
    assert (await fleet.client.get("/ready")).status_code == 200
    now = fleet.state.routing.clock()
    fleet.state.routing.router.replicas.drain("r0", now=now)
    checked(await fleet.client.get("/ready"), 503, "too_few_replicas")
    fleet.state.routing.router.replicas.drain("r0", False, now=now)
    assert (await fleet.client.get("/ready")).status_code == 200
    for _ in range(3):
        fleet.state.routing.router.replicas.on_probe("r1", None, now=now)
    checked(await fleet.client.get("/ready"), 503, "too_few_replicas")
    assert (await fleet.client.post(CHAT, content=chat())).status_code == 200


async def test_replica_that_has_never_answered_is_not_counted_as_ready(start: Start) -> None:
    good = await start.replica(answer(200))
    config = config_for([good, good], replace(QUIET, min_ready_replicas=2))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        config = with_replica(config, 0, url=f"http://127.0.0.1:{unused.getsockname()[1]}")
        fleet = await start.proxy(config, [good])
    checked(await fleet.client.get("/ready"), 503, "too_few_replicas")
    fleet.state.routing.router.replicas.on_probe("r0", 0.01, now=fleet.state.routing.clock())
    assert (await fleet.client.get("/ready")).status_code == 200


async def test_models_are_those_of_the_configuration(start: Start) -> None:
    replica = await start.replica(answer(200))
    config = with_replica(config_for([replica, replica]), 0, models=("a", "b"))
    fleet = await start.proxy(with_replica(config, 1, models=("b", "c")), [replica])
    listed = (await fleet.client.get("/v1/models")).json()
    assert [row["id"] for row in listed["data"]] == ["a", "b", "c"]
    refused = await fleet.client.post(CHAT, content=chat(model="z"))
    checked(refused, 404, "model_not_found")
    assert refused.json()["error"]["message"] == "no replica serves the model 'z'; there are: a, b, c"
    assert (await fleet.client.post(CHAT, content=chat(model=""))).status_code == 200


async def test_404_of_a_model_is_bounded_and_has_the_nearest_name(start: Start) -> None:
    replica = await start.replica(answer(200))
    models = tuple(f"family/model-{n}" for n in range(12))
    fleet = await start.proxy(with_replica(config_for([replica]), 0, models=models), [replica])
    message = (await fleet.client.post(CHAT, content=chat(model="model-11"))).json()["error"]["message"]
    assert message == (
        "no replica serves the model 'model-11' (did you mean 'family/model-11'?); there are: "
        f"{', '.join(sorted(models)[:10])} and 2 more"
    )
    long = (await fleet.client.post(CHAT, content=chat(model="x" * 10_000))).json()["error"]["message"]
    assert long.startswith(f"no replica serves the model '{'x' * 80}...'; there are: ")


async def test_models_are_a_replicas_own_where_none_are_configured(start: Start) -> None:
    fleet = await start.fleet([answer(200, b'{"object":"list","data":[]}')])
    response = await fleet.client.get("/v1/models")
    assert response.content == b'{"object":"list","data":[]}'
    assert [target.active for target in fleet.state.replicas.targets.values()] == [0]


async def test_models_are_asked_for_whole_and_unpacked(start: Start) -> None:
    fleet = await start.fleet([answer(200, b'{"object": "list", "data": []}')])
    asked = {"accept-encoding": "gzip", "range": "bytes=0-1", "if-none-match": "*", "authorization": "Bearer own"}
    assert (await fleet.client.get("/v1/models", headers=asked)).json()["data"] == []
    (seen,) = fleet.replicas[0].seen
    names = {name.decode().lower() for name, _ in seen.headers}
    assert not {"accept", "accept-encoding", "range", "if-none-match"} & names
    assert seen.header("authorization") == ["Bearer own"]


async def test_models_without_any_replica_is_a_503(start: Start) -> None:
    fleet = await start.fleet([answer(500)])
    checked(await fleet.client.get("/v1/models"), 503, "no_replica")


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", {"model": "m", "prompt": "hello"}),
        ("/v1/completions", {"model": "m", "prompt": [1, 2, 3]}),
        ("/generate", {"text": "hello"}),
        ("/generate", {"input_ids": [1, 2, 3]}),
        ("/v1/embeddings", {"model": "m", "input": ["a", "b"]}),
        ("/v1/responses", {"model": "m", "input": "hello"}),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_every_route_is_relayed_to_the_same_route(fleet: Running, path: str, content: dict[str, Any]) -> None:
    response = await fleet.client.post(path, json=content)
    assert response.json() == {"ok": 1}
    assert fleet.replicas[0].seen[0].path == path
    assert json.loads(fleet.replicas[0].seen[0].body) == content
    await fleet.idle()


async def test_refused_client_that_keeps_its_connection_is_not_counted_as_gone(start: Start) -> None:
    fleet = await start.fleet([answer(500)])
    for _ in range(20):
        assert (await fleet.client.post(CHAT, content=chat())).status_code in (502, 503)
    await fleet.idle()
    assert "gorgo_client_aborts_total 0.0" in (await fleet.client.get("/metrics")).text


async def test_fault_of_the_proxy_itself_is_a_500_without_the_text(
    fleet: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise KeyError("my secret")

    monkeypatch.setattr(fleet.state.routing.router, "submit", fail)
    response = await fleet.client.post(CHAT, content=chat())
    checked(response, 500, "internal_error")
    (record,) = [record for record in caplog.records if record.getMessage() == "internal_error"]
    assert record.fields["error"] == "KeyError"  # type: ignore[attr-defined]
    assert "my secret" not in response.text + json.dumps(vars(record), default=str)


@pytest.mark.parametrize("accounting", ["attempt_started", "first_content", "attempt_ended"])
async def test_fault_in_the_accounts_leaves_nothing_reserved(
    fleet: Running, monkeypatch: pytest.MonkeyPatch, accounting: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise TypeError("a fault of the proxy itself")

    monkeypatch.setattr(RequestRecord, accounting, fail)
    # Whether it is told before or after the answer has begun, nothing may be left of it.
    with suppress(httpx.RemoteProtocolError):
        await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.idle()


# --- Two clients with a key each, over real sockets: whose request it was is in every record, and the key in none.


USAGE = event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})
KEYS = {"team-a": "KEY-OF-TEAM-A", "team-b": "KEY-OF-TEAM-B"}


async def served(
    start: Start, folder: Path, *rules: ClientRuleConfig, request_log: Path | None = None, usage: bytes = USAGE
) -> Running:
    path = folder / "clients.keys"
    path.write_text("".join(f"{name}:{sha256(key.encode()).hexdigest()}\n" for name, key in KEYS.items()))
    replica = await start.replica(stream(delta("a"), usage, DONE))
    config = with_replica(config_for([replica]), 0, models=("m", "n"))
    config = replace(config, clients=ClientsConfig(keys_file=str(path), rules=rules))
    return await start.proxy(config, [replica], request_log=request_log)


async def post(fleet: Running, client: str, **body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[client]}"}
    return await fleet.client.post(CHAT, content=chat(stream=True, **body), headers=headers)


async def test_name_and_model_are_in_each_record_and_the_key_in_none(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await served(start, tmp_path, request_log=tmp_path / "requests.jsonl")
    asked = [("team-a", "m"), ("team-b", "n"), ("team-a", "n")]
    answers = [await post(fleet, client, model=model) for client, model in asked]
    assert [answer.status_code for answer in answers] == [200, 200, 200]

    lines = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    assert [(line["client"], line["model"]) for line in lines] == asked
    samples = (await fleet.admin.get("/admin/samples")).json()["samples"]
    assert [(sample["client"], sample["model"]) for sample in samples] == asked
    listed = (await fleet.admin.get("/admin/decisions")).json()["decisions"]
    assert [(row["client"], row["model"]) for row in reversed(listed)] == asked
    one = await fleet.admin.get(f"/admin/decisions/{answers[1].headers['x-request-id']}")
    assert (one.json()["decisions"][0]["client"], one.json()["decisions"][0]["model"]) == ("team-b", "n")
    await until(lambda: len((tmp_path / "requests.jsonl").read_text().splitlines()) == 4)
    _, *written = map(json.loads, (tmp_path / "requests.jsonl").read_text().splitlines())
    assert [(line["client"], line["model"]) for line in written] == asked

    shown = [json.dumps(lines), json.dumps(samples), one.text, (tmp_path / "requests.jsonl").read_text()]
    shown.append((await fleet.admin.get("/admin/status")).text)
    assert not [key for key in KEYS.values() for text in shown if key in text]


async def test_tokens_and_429s_of_each_client_are_metrics_and_in_the_status(start: Start, tmp_path: Path) -> None:
    fleet = await served(start, tmp_path, ClientRuleConfig(name="team-b", requests_per_minute=6.0))
    for client, model, status in (
        ("team-a", "m", 200),
        ("team-a", "n", 200),
        ("team-b", "m", 200),
        ("team-b", "m", 429),
        ("team-a", "canary", 404),
    ):
        assert (await post(fleet, client, model=model)).status_code == status
    text = (await fleet.client.get("/metrics")).text
    lines = {line for line in text.splitlines() if line.startswith("gorgo_client_") and "_created" not in line}
    assert {line for line in lines if "aborts" not in line} == {
        'gorgo_client_requests_total{client="team-a",model="m",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-a",model="n",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-a",model="other",status="4xx"} 1.0',
        'gorgo_client_requests_total{client="team-b",model="m",status="2xx"} 1.0',
        'gorgo_client_requests_total{client="team-b",model="m",status="4xx"} 1.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="m"} 20.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="n"} 20.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="m"} 100.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="n"} 100.0',
        'gorgo_client_tokens_total{client="team-a",kind="output",model="other"} 0.0',
        'gorgo_client_tokens_total{client="team-a",kind="prompt",model="other"} 0.0',
        'gorgo_client_tokens_total{client="team-b",kind="output",model="m"} 20.0',
        'gorgo_client_tokens_total{client="team-b",kind="prompt",model="m"} 100.0',
        'gorgo_client_rejects_total{client="team-b",reason="client_rate"} 1.0',
    }
    shown = (await fleet.admin.get("/admin/status")).json()["clients"]
    assert shown == [
        {"name": "team-a", "requests": 3, "tokens": 240, "rejected": 0},
        {"name": "team-b", "requests": 2, "tokens": 120, "rejected": 1},
    ]


async def test_a_client_over_its_tokens_per_minute_gets_a_429_with_retry_after_and_others_do_not(
    start: Start, tmp_path: Path
) -> None:
    """The engine reports 120 tokens against 10 at once: it can leave a debt of a minute, at one a second."""
    fleet = await served(start, tmp_path, ClientRuleConfig(name="team-a", tokens_per_minute=60.0))
    assert (await post(fleet, "team-a", model="m")).status_code == 200
    await until(lambda: fleet.state.routing.router.in_flight == 0)
    refused = await post(fleet, "team-a", model="m")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_tokens")
    assert refused.json()["error"]["message"] == ("this key may use 60 tokens a minute, prompts and answers together")
    assert 50 < int(refused.headers["retry-after"]) <= 60
    assert [(await post(fleet, "team-b", model="m")).status_code for _ in range(3)] == [200, 200, 200]
    rows = {row["name"]: row for row in (await fleet.admin.get("/admin/status")).json()["clients"]}
    assert (rows["team-a"]["rejected"], rows["team-b"]["rejected"], rows["team-b"]["tokens"]) == (1, 0, 360)


async def test_a_client_is_charged_no_more_than_an_answer_can_have(start: Start, tmp_path: Path) -> None:
    """600,000 tokens a minute, 100,000 of them at once; the answer has some hundred bytes, or a limit of ten."""
    lie = event(
        {"choices": [], "usage": {"prompt_tokens": 10**15, "cached_tokens": 10**15, "completion_tokens": 10**15}}
    )
    rule = ClientRuleConfig(name="team-a", tokens_per_minute=600_000.0)
    fleet = await served(start, tmp_path, rule, usage=lie)
    for limit, most in (({}, 5000), ({"max_tokens": 10}, 10)):
        assert (await post(fleet, "team-a", model="m", **limit)).status_code == 200
        await until(lambda: fleet.state.routing.router.in_flight == 0)
        sample = (await fleet.admin.get("/admin/samples")).json()["samples"][-1]
        assert sample["output_tokens"] <= most
        assert sample["cached_tokens"] <= sample["input_tokens"] <= 5000
    assert (await post(fleet, "team-a", model="m")).status_code == 200
