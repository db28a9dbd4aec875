"""Keys and secrets: who gets in, what belongs to whom, odd names, and what never comes out."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.config.load import parse_config
from gorgo.config.model import ClientRuleConfig, ClientsConfig, ModelConfig, RegionConfig
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.datasets import read_shape
from gorgo.live import request_options
from gorgo.live.control.state_file import StateFile
from gorgo.live.http.errors import HttpError
from gorgo.live.logs import FORMATS, JsonLines
from gorgo.live.parsing.json_body import ENGINE_FIELDS
from gorgo.live.request_options import MAX_KEYS, ClientKeys, read_client_keys
from tests.proxy.conftest import TOKEN, Running, Start, config_for
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, reset_after, stream
from tests.proxy.raw import connected

# --- Keys of clients: who gets in, how that is found out, and where a key never goes.


#: Also on the HTTP of `gorgo serve --plain`.
IN_BOTH_FORMS = True

CHAT = "/v1/chat/completions"
KEY, OTHER = "sk-the-first-key", "sk-the-second-key"


def entry(name: str, key: str) -> str:
    return f"{name}:{sha256(key.encode()).hexdigest()}"


async def guarded(start: Start, folder: Path, **options: Any) -> Running:
    replica = await start.replica(answer(200))
    path = folder / "clients.keys"
    path.write_text(f"{entry('team-a', KEY)}\n{entry('team-b', OTHER)}\n")
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(path)))
    return await start.proxy(config, [replica], **options)


# -- over HTTP
async def test_request_without_a_known_key_is_a_401_in_openai_s_shape(start: Start, tmp_path: Path) -> None:
    fleet = await guarded(start, tmp_path)
    for headers in (
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {sha256(KEY.encode()).hexdigest()}"},
        {"authorization": "Bearer \xff\xfe"},
        {"x-api-key": "no"},
        {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
        {"cookie": f"authorization={KEY}"},
    ):
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        response = await fleet.client.post(CHAT, content=chat(), headers=raw)
        assert response.status_code == 401, headers
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEY not in response.text
    assert fleet.replicas[0].seen == []


async def test_two_authorizations_are_one_too_many(start: Start, tmp_path: Path) -> None:
    fleet = await guarded(start, tmp_path)
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {OTHER}")]
    assert (await fleet.client.post(CHAT, content=chat(), headers=headers)).status_code == 401


@pytest.mark.parametrize("headers", [{"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}, {"api-key": OTHER}])
async def test_known_key_gets_in_and_stays_here(start: Start, tmp_path: Path, headers: dict[str, str]) -> None:
    fleet = await guarded(start, tmp_path)
    response = await fleet.client.post(CHAT, content=chat(), headers=headers)
    assert response.status_code == 200
    (seen,) = fleet.replicas[0].seen
    sent = b" ".join(value for _, value in seen.headers)
    assert KEY.encode() not in sent
    assert OTHER.encode() not in sent


async def test_routes_of_load_balancers_need_no_key_and_those_of_clients_do(start: Start, tmp_path: Path) -> None:
    fleet = await guarded(start, tmp_path)
    for path in ("/health", "/ready", "/metrics"):
        assert (await fleet.client.get(path)).status_code == 200
    for path in ("/v1/models", "/nowhere", "/v1/%63hat/completions"):
        assert (await fleet.client.get(path)).status_code in (401, 404)
    assert (await fleet.client.get("/v1/models")).status_code == 401


async def test_key_of_a_client_is_none_of_an_operator(start: Start, tmp_path: Path) -> None:
    fleet = await guarded(start, tmp_path)
    response = await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {KEY}"})
    assert response.status_code == 401
    assert (await fleet.admin.get("/admin/fleet")).status_code == 200


async def test_name_of_the_client_reaches_the_router(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await guarded(start, tmp_path)
    clients = []
    submit = fleet.state.routing.router.submit

    def noted(request: Any, **options: Any) -> Any:
        clients.append(request.client)
        return submit(request, **options)

    monkeypatch.setattr(fleet.state.routing.router, "submit", noted)
    for key in (KEY, OTHER):
        await fleet.client.post(CHAT, content=chat(), headers={"authorization": f"Bearer {key}"})
    assert clients == ["team-a", "team-b"]


async def test_without_a_list_the_client_s_key_is_for_the_replica(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    await fleet.client.post(CHAT, content=chat(), headers={"authorization": f"Bearer {KEY}"})
    assert fleet.replicas[0].seen[0].header("authorization") == [f"Bearer {KEY}"]


async def test_replica_s_key_takes_the_place_of_the_client_s(start: Start) -> None:
    replica = await start.replica(answer(200))
    config = config_for([replica])
    config = replace(config, replicas=(replace(config.replicas[0], api_key_env="ENGINE"),))
    fleet = await start.proxy(config, [replica], environ={"ENGINE": "engine-key"})
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "api-key": KEY}
    response = await fleet.client.post(CHAT, content=chat(), headers=headers)
    (seen,) = replica.seen
    assert seen.header("authorization") == ["Bearer engine-key"]
    assert not seen.header("x-api-key")
    assert not seen.header("api-key")
    assert "engine-key" not in str(response.headers) + response.text


# -- the list
def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clients.keys"
    path.write_text(f"# who may\n\n{entry('a', KEY)}  # since May\n{entry('b', OTHER)}\n")
    keys = read_client_keys(ClientsConfig(keys_file=str(path)))
    assert keys is not None
    assert [keys.name_of(word.encode()) for word in (KEY, OTHER, "x", "")] == ["a", "b", None, None]


def test_no_list_is_no_check() -> None:
    assert read_client_keys(ClientsConfig()) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 keys; expected 1 to 1024"),
        (b"# nobody\n", "0 keys"),
        (KEY.encode(), "line 1 is no entry; expected NAME:SHA256"),
        (f"\n{KEY}:{KEY}".encode(), "line 2 is no entry; expected NAME:SHA256"),
        (b"team-a:" + b"0" * 63, "line 1 is no entry; expected NAME:SHA256"),
        (b"\xff\xfe:" + b"0" * 64, "line 1 is no entry; expected NAME:SHA256"),
        (b"x" * (1 << 21), "larger than"),
        (b"a:" + b"0" * 64 + b"\n", None),
        (b"\n".join(b"a:%064x" % n for n in range(MAX_KEYS + 1)), f"{MAX_KEYS + 1} keys"),
    ],
    ids=range(9),
)
def test_list_that_is_none_is_an_error_that_repeats_no_key(tmp_path: Path, content: bytes, said: str | None) -> None:
    path = tmp_path / "clients.keys"
    path.write_bytes(content)
    clients = ClientsConfig(keys_file=str(path))
    if said is None:
        assert read_client_keys(clients) is not None
        return
    with pytest.raises(ConfigError) as raised:
        read_client_keys(clients)
    assert said in str(raised.value)
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("path", ["/nowhere/clients.keys", "/", "a\0b"])
def test_file_that_cannot_be_read_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="keys_file"):
        read_client_keys(ClientsConfig(keys_file=path))


# -- time
def test_every_known_key_is_compared_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def counted(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(request_options, "compare_digest", counted)
    words = [b"first", b"middle", b"last"]
    keys = ClientKeys((word.decode(), sha256(word).digest()) for word in words)
    for given in (*words, b"unknown", b""):
        compared.clear()
        keys.name_of(given)
        assert len(compared) == len(words)


@pytest.mark.parametrize("equal", [False, True])
async def test_compare_digest_alone_decides_on_every_secret(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equal: bool
) -> None:
    """A comparison beside it would refuse a wrong secret that it takes, or take the right one that it refuses."""
    fleet = await guarded(start, tmp_path)
    key, token = ("wrong", "wrong") if equal else (KEY, TOKEN)
    monkeypatch.setattr(request_options, "compare_digest", lambda *_: equal)
    monkeypatch.setattr("hmac.compare_digest", lambda *_: equal)
    answers = [
        await fleet.client.post(CHAT, content=chat(), headers={"authorization": f"Bearer {key}"}),
        await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {token}"}),
    ]
    assert [answer.status_code for answer in answers] == [200 if equal else 401] * 2
    signed_in = await fleet.admin.post("/admin/page/login", content=f"token={token}".encode())
    assert (signed_in.status_code == 303) == equal


def test_refusal_says_the_same_whatever_is_wrong() -> None:
    keys = ClientKeys([("a", sha256(KEY.encode()).digest())])
    said = set()
    for headers in ([], [(b"authorization", b"Bearer x")], [(b"authorization", b"Basic x")], [(b"x-api-key", b"")]):
        with pytest.raises(HttpError) as raised:
            keys.admit(headers)
        said.add((raised.value.status, raised.value.code, raised.value.message))
    assert len(said) == 1


def test_pipe_is_no_list_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigError, match=r"keys_file: .*/keys': is a pipe; expected a file of client keys"):
        read_client_keys(ClientsConfig(keys_file=str(tmp_path / "keys")))


@pytest.mark.parametrize(("length", "taken"), [(1, True), (63, True), (64, False)])
def test_a_client_s_name_has_at_most_63_characters(length: int, taken: bool, tmp_path: Path) -> None:
    path = tmp_path / "clients.keys"
    path.write_text(entry("a" * length, KEY))
    clients = ClientsConfig(keys_file=str(path))
    if taken:
        keys = read_client_keys(clients)
        assert keys is not None
        assert keys.name_of(KEY.encode()) == "a" * length
        return
    with pytest.raises(ConfigError, match="line 1 is no entry; expected"):
        read_client_keys(clients)


@pytest.mark.parametrize(("more", "taken"), [(0, True), (1, False)])
def test_a_list_of_client_keys_may_be_a_mebibyte(more: int, taken: bool, tmp_path: Path) -> None:
    path = tmp_path / "clients.keys"
    line = f"{entry('a', KEY)}\n#"
    path.write_text(line + "x" * (1_048_576 - len(line) + more))
    clients = ClientsConfig(keys_file=str(path))
    if taken:
        keys = read_client_keys(clients)
        assert keys is not None
        assert len(keys) == 1
        return
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        read_client_keys(clients)


@pytest.mark.parametrize("empty", [b"", b"\n", b"\r\n", b" "])
def test_the_hash_of_nothing_is_no_key(empty: bytes, tmp_path: Path) -> None:
    """As a recipe writes it whose variable was not set."""
    path = tmp_path / "clients.keys"
    path.write_text(f"{entry('a', KEY)}\nb:{sha256(empty).hexdigest()}\n")
    with pytest.raises(ConfigError, match="line 2 has the hash of an empty key"):
        read_client_keys(ClientsConfig(keys_file=str(path)))


@pytest.mark.parametrize("header", [(b"authorization", b"Basic x"), (b"authorization", b"Bearer"), (b"x-api-key", b"")])
def test_a_header_without_a_key_is_never_looked_up(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(HttpError):
        ClientKeys([("everybody", sha256(b"").digest())]).admit([header])


def test_a_list_has_at_most_1024_keys(tmp_path: Path) -> None:
    path = tmp_path / "clients.keys"
    clients = ClientsConfig(keys_file=str(path))
    path.write_text("\n".join(entry(f"n{n}", f"k{n}") for n in range(1024)))
    keys = read_client_keys(clients)
    assert keys is not None
    assert (len(keys), keys.name_of(b"k999"), keys.name_of(b"k1024")) == (1024, "n999", None)
    path.write_text("\n".join(entry(f"n{n}", f"k{n}") for n in range(1025)))
    with pytest.raises(ConfigError, match="1025 keys; expected 1 to 1024"):
        read_client_keys(clients)


# --- What belongs to one client is none of another's: stored responses, hints of prompts, workers, regions of models.


#: Also on the HTTP of `gorgo serve --plain`.

RESPONSES = "/v1/responses"


async def two_clients(start: Start, folder: Path, *rules: ClientRuleConfig, body: bytes = b"{}") -> Running:
    replica = await start.replica(answer(200, body))
    path = folder / "clients.keys"
    path.write_text(f"{entry('alice', KEY)}\n{entry('bob', OTHER)}\n")
    config = replace(config_for([replica]), clients=ClientsConfig(keys_file=str(path), rules=rules))
    return await start.proxy(config, [replica])


async def post(
    fleet: Running, key: str | None, fields: Mapping[str, Any] | None = None, *, route: str = CHAT, **more: Any
) -> httpx.Response:
    fields = {**(fields or {}), **more}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    if route == CHAT:
        return await fleet.client.post(route, content=chat(**fields), headers=headers)
    return await fleet.client.post(route, json={"model": "m", "input": "hello", **fields}, headers=headers)


async def test_a_client_continues_no_stored_response_of_another(start: Start, tmp_path: Path) -> None:
    fleet = await two_clients(start, tmp_path, body=b'{"id": "resp_1", "object": "response"}')
    assert (await post(fleet, KEY, route=RESPONSES)).status_code == 200
    stolen = await post(fleet, OTHER, route=RESPONSES, previous_response_id="resp_1")
    unknown = await post(fleet, OTHER, route=RESPONSES, previous_response_id="resp_2")
    assert (stolen.status_code, stolen.content) == (404, unknown.content)
    assert (await post(fleet, KEY, route=RESPONSES, previous_response_id="resp_1")).status_code == 200


ESTIMATES = {"x-gorgo-estimated-cached-tokens", "x-gorgo-predicted-ttft-ms", "x-gorgo-replica", "x-gorgo-region"}


async def test_hints_of_prompts_of_others_need_a_rule(start: Start, tmp_path: Path) -> None:
    fleet = await two_clients(start, tmp_path, ClientRuleConfig(name="bob", estimates=True))
    assert not ESTIMATES & set((await post(fleet, KEY)).headers)
    shown = {"x-gorgo-estimated-cached-tokens", "x-gorgo-replica", "x-gorgo-region"}
    assert shown <= set((await post(fleet, OTHER)).headers)


async def test_hints_need_no_rule_without_keys(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert "x-gorgo-estimated-cached-tokens" in (await post(fleet, None)).headers


@pytest.mark.parametrize("field", sorted(ENGINE_FIELDS))
async def test_a_field_that_steers_the_engine_needs_a_rule(start: Start, tmp_path: Path, field: str) -> None:
    fleet = await two_clients(start, tmp_path, ClientRuleConfig(name="bob", engine_fields=(field,)))
    refused = await post(fleet, KEY, {field: 1})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "field_not_allowed")
    assert field in refused.json()["error"]["message"]
    assert (await post(fleet, KEY, {field: None})).status_code == 200
    assert (await post(fleet, OTHER, {field: 1})).status_code == 200


async def test_a_field_that_steers_the_engine_passes_without_keys(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    assert (await post(fleet, None, data_parallel_rank=1)).status_code == 200


@pytest.mark.parametrize("name", ["EU-ONLY", "eu-only ", " eu-only", "eu_only", "", None, "\u0435u-only"])
async def test_a_restricted_model_has_one_spelling_and_no_default_leads_round_it(
    start: Start, name: str | None
) -> None:
    near, far = await start.replica(answer(200)), await start.replica(answer(200))
    config = config_for([near, far])
    rows = (config.replicas[0], replace(config.replicas[1], region="there"))
    model = ModelConfig(name="eu-only", allowed_regions=("there",))
    config = replace(
        config,
        regions=(*config.regions, RegionConfig(name="there")),
        replicas=rows,
        models=(model, ModelConfig(name="m")),
    )
    fleet = await start.proxy(config, [near, far])
    refused = await post(fleet, None, model=name)
    assert refused.status_code == (400 if not name else 404)
    assert near.seen == far.seen == []
    for _ in range(3):
        assert (await post(fleet, None, model="eu-only")).headers["x-gorgo-region"] == "there"
    assert (await post(fleet, None, model="m")).status_code == 200


# --- Marked secrets go in; everything that comes out is searched for them.


#: Also on the HTTP of `gorgo serve --plain`.
PROMPT, CLIENT_KEY, ENGINE_KEY = "MARKED-PROMPT-5f1c", "MARKED-CLIENT-KEY-77aa", "MARKED-ENGINE-KEY-90bb"
WRONG_KEY, HEADER, ANSWER = "MARKED-WRONG-KEY-12cd", "MARKED-HEADER-34ef", "MARKED-ANSWER-56ab"
SECRETS = (PROMPT, CLIENT_KEY, ENGINE_KEY, WRONG_KEY, HEADER, ANSWER, TOKEN)
CLIENT_HASH = sha256(CLIENT_KEY.encode()).hexdigest()


async def test_no_secret_is_in_logs_metrics_decisions_samples_files_or_errors(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replicas = [
        await start.replica(
            stream(delta(ANSWER), USAGE, DONE), answer(500, ANSWER.encode()), answer(200, ANSWER.encode())
        ),
        await start.replica(reset_after(), reset_after(delta(ANSWER)), answer(503, ANSWER.encode())),
    ]
    config = config_for(replicas)
    rows = tuple(replace(row, api_key_env="ENGINE") for row in config.replicas)
    keys = tmp_path / "clients.keys"
    keys.write_text(f"team:{CLIENT_HASH}")
    config = replace(config, replicas=rows, clients=ClientsConfig(keys_file=str(keys)))
    fleet = await start.proxy(
        config,
        replicas,
        environ={"ENGINE": ENGINE_KEY},
        state_file=StateFile(tmp_path / "state.json"),
        request_log=tmp_path / "requests.jsonl",
    )
    keys.unlink()  # the one file that may hold a hash of a key
    good = {"authorization": f"Bearer {CLIENT_KEY}", "x-odd": HEADER, "cookie": HEADER, "x-session-id": HEADER}
    wrong = good | {"authorization": f"Bearer {WRONG_KEY}"}
    said: list[str] = []
    for n in range(8):
        for body in (
            json.dumps({"model": "m", "stream": n % 2 == 0, "messages": [{"role": "user", "content": PROMPT}]}),
            f'{{"messages": "{PROMPT}',
            json.dumps({"messages": PROMPT}),
            json.dumps({"model": "m", "messages": [{"role": PROMPT, "content": {PROMPT: 1}}]}),
        ):
            response = await fleet.client.post(CHAT, content=body, headers=good | {"x-request-id": f"id-{n}"})
            # What a replica answers is the client's own; what the proxy says itself is searched.
            said.append(str(response.headers) + (response.text if ANSWER not in response.text else ""))
        for path in (CHAT, "/v1/models", f"/{PROMPT}?key={CLIENT_KEY}"):
            response = await fleet.client.post(path, content=PROMPT, headers=wrong)
            said.append(str(response.headers) + response.text)
    paths = ("/admin/fleet", "/admin/samples", "/admin/weights", "/admin/policy", "/admin/decisions/id-0")
    said.extend([(await fleet.admin.get(path)).text for path in paths])
    said.append((await fleet.admin.get("/admin/fleet", headers={"authorization": f"Bearer {WRONG_KEY}"})).text)
    said.append((await fleet.admin.put("/admin/weights", content=json.dumps({PROMPT: WRONG_KEY})[:-1])).text)
    said.append((await fleet.client.get("/metrics")).text)
    await fleet.idle()
    await fleet.stop()
    await fleet.stop()
    lines = [JsonLines().format(record) for record in caplog.records if record.name.startswith("gorgo")]
    assert sum('"event": "request"' in line for line in lines) >= 32
    files = [path.read_text() for path in tmp_path.iterdir()]
    assert files
    for text in (*said, *lines, *files):
        for secret in (*SECRETS, CLIENT_HASH):
            assert secret not in text, text
    for replica in replicas:
        for seen in replica.seen:
            sent = b" ".join(value for _, value in seen.headers).decode("latin-1")
            assert CLIENT_KEY not in sent
            assert seen.header("authorization") == [f"Bearer {ENGINE_KEY}"]


def test_configuration_and_targets_do_not_show_keys() -> None:
    from gorgo.live.replica_secrets import ReplicaSecrets

    assert repr(ReplicaSecrets("sk-engine", "token-of-a-replica")) == "ReplicaSecrets()"


# --- Names from elsewhere in every script and with every mark: what is logged, counted and shown of them.


#: Also on the HTTP of `gorgo serve --plain`.
NAMES = {
    "right to left": "gpt\u202efdp.exe",
    "isolate": "a\u2066b",
    "NUL": "a\x00b",
    "newline": 'm"\nlevel=error event=forged',
    "escape": "\x1b]0;x\x07\x1b[2J",
    "C1": "a\x9b31mb",
    "homoglyph": "\u0430dmin",
    "four bytes": "\U0001f600" * 60,
    "half a pair": "\ud83d",
    "line separator": "a\u2028b",
    "label": 'm"} 1\nforged{x="',
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
async def test_a_model_of_any_name_is_one_line_one_label_and_text_on_the_page(
    start: Start, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    fleet = await start.fleet([stream(delta("good"), DONE)])
    body = {"model": name, "messages": [{"role": "user", "content": name}], "user": name, "stream": True}
    answer = await fleet.client.post(CHAT, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400)
    for record in caplog.records:
        json.loads(FORMATS["json"]().format(record))
        first, *more = FORMATS["text"]().format(record).split("\n")
        assert first.isprintable()
        assert all(line.startswith("  ") and line.isprintable() for line in more)
    metrics = (await fleet.admin.get("/metrics")).text
    assert not [family for family in text_string_to_metric_families(metrics) if family.name == "forged"]
    await fleet.admin.post("/admin/page/login", data={"token": TOKEN})
    page = await fleet.admin.get("/admin/page")
    assert page.status_code == 200
    assert not set(page.text) & set("\x00\x07\x1b\x9b\u202e\u2066")
    assert (await fleet.admin.get("/admin/status")).status_code == 200


@pytest.mark.parametrize("name", [name for name in NAMES.values() if not name.isprintable()])
@pytest.mark.parametrize("key", ["region", "replica", "model", "policy"])
def test_a_name_of_the_configuration_is_printable(key: str, name: str) -> None:
    names = {"region": "here", "replica": "r", "model": "m", "policy": "round-robin"} | {key: name}
    document = {
        "proxy": {"region": names["region"], "policy": names["policy"]},
        "regions": [{"name": names["region"]}],
        "replicas": [
            {"name": names["replica"], "region": names["region"], "url": "http://h:1", "models": [names["model"]]}
        ],
    }
    with pytest.raises(ConfigError) as refused:
        parse_config(json.dumps(document).encode())
    assert all(line.isprintable() for line in str(refused.value).split("\n"))


@pytest.mark.parametrize("text", ["x = " + "[" * 8000, "x = " + "9" * 8000, "a" + ".a" * 4000 + " = 1", "x = nan"])
def test_a_shape_that_no_one_writes_is_refused_by_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "shape.toml").write_text(text)
    with pytest.raises(TraceError, match=r"shape\.toml: "):
        read_shape(tmp_path / "shape.toml")


async def test_a_thousand_that_ask_for_live_pages_get_eight_and_the_operator_is_answered(start: Start) -> None:
    fleet = await start.fleet([stream(delta("good"), DONE)])
    ask = f"GET /admin/page/events HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {TOKEN}\r\n\r\n".encode()
    heads = []
    async with AsyncExitStack() as opened:
        for _ in range(1000):
            client = await opened.enter_async_context(connected(fleet.addresses.admin))
            client.writer.write(ask)
            with suppress(EOFError, ConnectionError):
                heads.append(await client.head())
        statuses = Counter(head.split(b" ")[1] for head in heads)
        assert statuses.keys() == {b"200", b"503"}
        assert statuses[b"200"] <= 8
        assert (await fleet.admin.get("/admin/status")).status_code == 200
    await fleet.idle()
