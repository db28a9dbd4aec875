"""Keys of clients: who gets in, how that is found out, and where a key never goes."""

from __future__ import annotations

import os
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.model import ClientsConfig
from gorgo.errors import ConfigError
from gorgo.live import request_options
from gorgo.live.http.errors import HttpError
from gorgo.live.request_options import MAX_KEYS, ClientKeys, read_client_keys
from tests.proxy.conftest import TOKEN, Running, Start, config_for
from tests.proxy.fakes import answer, chat

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
