"""Replicas that register and leave by the admin API, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gorgo.config import registered
from gorgo.live.control.state_file import StateFile
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, answer, chat, delta, hang, stream
from tests.proxy.followed import Followed, follow, regions
from tests.proxy.test_requests import checked

CHAT = "/v1/chat/completions"
QUICK = stream(delta("x"), DONE)


async def post(followed: Followed, name: str, url: str, **keys: Any) -> httpx.Response:
    return await followed.fleet.admin.post(
        "/admin/replicas", json={"name": name, "region": "here", "engine": "sglang", "url": url, **keys}
    )


async def delete(followed: Followed, name: str) -> httpx.Response:
    return await followed.fleet.admin.delete(f"/admin/replicas/{name}")


async def chosen(followed: Followed, count: int = 6) -> set[str]:
    answers = [await followed.fleet.client.post(CHAT, content=chat(stream=True)) for _ in range(count)]
    assert all(found.status_code == 200 for found in answers)
    return {found.headers["x-gorgo-replica"] for found in answers}


async def rows(followed: Followed) -> dict[str, Any]:
    return {row["name"]: row for row in (await followed.fleet.admin.get("/admin/fleet")).json()["replicas"]}


async def test_registered_replica_is_probed_and_takes_requests_and_is_shown_as_registered(
    start: Start, tmp_path: Path
) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    done = await post(followed, "b", b.url)
    assert done.status_code == 201
    assert done.json() == {"replica": "b", "change": "added", "warnings": [], "durable": False}
    assert b.pings == 2
    assert await chosen(followed) == {"a", "b"}
    assert {name: row["registered"] for name, row in (await rows(followed)).items()} == {"a": False, "b": True}
    shown = (await followed.fleet.admin.get("/admin/status")).json()["replicas"]
    assert {row["name"]: row["registered"] for row in shown} == {"a": False, "b": True}


async def test_same_entry_again_changes_nothing_and_another_one_replaces_it(start: Start, tmp_path: Path) -> None:
    a, b, c = [await start.replica(QUICK) for _ in range(3)]
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b, c])
    await post(followed, "b", b.url)
    same = await post(followed, "b", b.url)
    assert (same.status_code, same.json()["change"]) == (200, "none")
    assert (await post(followed, "b", b.url, models=["m"])).json()["change"] == "updated"
    assert (await rows(followed))["b"]["models"] == ["m"]
    assert (await post(followed, "b", b.url, draining=True)).json()["change"] == "updated"
    assert await chosen(followed) == {"a"}
    assert (await post(followed, "b", c.url)).json()["change"] == "replaced"
    await chosen(followed)
    assert (len(b.seen), len(c.seen) > 0) == (0, True)
    assert list(followed.state.replicas.targets) == ["a", "b"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"url": "ftp://x"}, "url: "),
        (
            {"region": "heer"},
            "region: \"heer\" is not a region of this file (did you mean 'here'?); expected one of here",
        ),
        ({"engin": "vllm"}, "engin: unknown key (did you mean 'engine'?)"),
        ({"name": ".."}, "name: "),
        ({"client_cert": "c.pem"}, "client_cert: given for a url without TLS"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "the environment variable NOT_SET_ANYWHERE is not set"),
        ({"capacity": {"kv_tokens": 0}}, "capacity.kv_tokens: "),
    ],
)
async def test_entry_is_checked_as_one_of_the_file(
    start: Start, tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    a = await start.replica(QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    body = {"name": "b", "region": "here", "url": "http://127.0.0.1:1"} | entry
    refused = await followed.fleet.admin.post("/admin/replicas", json=body)
    assert message in checked(refused, 400, "invalid_request")["message"]
    assert list(await rows(followed)) == ["a"]


async def test_address_that_is_rarely_meant_is_a_warning_of_the_answer(start: Start, tmp_path: Path) -> None:
    a = await start.replica(QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    again = (await post(followed, "b", a.url)).json()["warnings"]
    assert again == [f"url: {a.url} is that of replicas[0] (a): one engine would count as two"]
    (path,) = (await post(followed, "b", "http://127.0.0.1:1/v1")).json()["warnings"]
    assert path == "url: http://127.0.0.1:1/v1 ends in /v1, which the proxy adds itself; write http://127.0.0.1:1"


async def test_replica_of_the_file_is_neither_registered_nor_removed(start: Start, tmp_path: Path) -> None:
    a = await start.replica(QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    again = checked(await post(followed, "a", a.url), 409, "replica_in_file")
    assert again["message"] == "regions.yaml names 'a': change it there"
    kept = checked(await delete(followed, "a"), 409, "replica_in_file")
    assert kept["message"] == "regions.yaml names 'a': remove it there"
    await post(followed, "worker-1", a.url)
    unknown = checked(await delete(followed, "worker-2"), 404, "replica_not_found")
    assert unknown["message"] == "no replica named 'worker-2' (did you mean 'worker-1'?)"


async def test_only_so_many_register(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.control.transactions.MAX_REGISTERED", 1)
    a = await start.replica(QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    await post(followed, "b", a.url)
    checked(await post(followed, "c", a.url), 409, "too_many_replicas")
    assert (await post(followed, "b", a.url, models=["m"])).status_code == 200
    assert registered.MAX_REGISTERED == 256


async def test_removed_replica_drains_and_leaves_after_its_last_request(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(QUICK), await start.replica(hang(delta("b"), rest=(DONE,)))
    followed = await follow(start, tmp_path, regions({"a": a}, proxy={"policy": "round-robin"}), [a, b])
    await post(followed, "b", b.url)
    async with (
        followed.fleet.client.stream("POST", CHAT, content=chat(stream=True, logprobs=True)) as one,
        followed.fleet.client.stream("POST", CHAT, content=chat(stream=True, logprobs=True)) as two,
    ):
        streams = {found.headers["x-gorgo-replica"]: found for found in (one, two)}
        done = await delete(followed, "b")
        assert (done.status_code, done.json()) == (202, {"replica": "b", "in_flight": 1, "durable": False})
        assert (await rows(followed))["b"]["state"] == "draining"
        assert (await delete(followed, "b")).status_code == 202
        assert await chosen(followed) == {"a"}
        b.release.set()
        assert b"[DONE]" in b"".join([chunk async for chunk in streams["b"].aiter_bytes()])
        await until(lambda: list(followed.state.replicas.targets) == ["a"])
    await until(lambda: not followed.state.replicas.draining_targets)
    checked(await delete(followed, "b"), 404, "replica_not_found")


async def test_a_replica_that_leaves_gives_its_streams_to_others(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("c"), DONE)), await start.replica(hang(delta("b")))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await post(followed, "b", b.url)
    await followed.fleet.admin.post("/admin/replicas/a/drain")
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as found:
        await followed.fleet.admin.post("/admin/replicas/a/drain", json={"drain": False})
        assert (await delete(followed, "b")).status_code == 202
        got = b"".join([chunk async for chunk in found.aiter_bytes()])
    assert got.startswith(delta("b"))
    assert (got.count(b'"c"'), got.count(b"[DONE]"), b'"error"' in got) == (1, 1, False)
    await until(lambda: list(followed.state.replicas.targets) == ["a"])
    await until(lambda: not followed.state.replicas.draining_targets)


async def test_removal_ends_after_the_grace_period_and_its_stream_goes_on(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(QUICK), await start.replica(hang(delta("b"), rest=(DONE,)))
    text = regions({"a": a}, limits={"shutdown_grace_s": 0.05})
    followed = await follow(start, tmp_path, text, [a, b])
    await post(followed, "b", b.url)
    await followed.fleet.admin.post("/admin/replicas/a/drain")
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True, logprobs=True)) as found:
        await followed.fleet.admin.post("/admin/replicas/a/drain", json={"drain": False})
        await delete(followed, "b")
        await until(lambda: list(followed.state.replicas.targets) == ["a"])
        b.release.set()
        assert b"[DONE]" in b"".join([chunk async for chunk in found.aiter_bytes()])


async def test_replica_that_registers_while_it_leaves_stays(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(QUICK), await start.replica(hang(delta("b"), rest=(DONE,)), QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await post(followed, "b", b.url)
    await followed.fleet.admin.post("/admin/replicas/a/drain")
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as found:
        await delete(followed, "b")
        assert (await post(followed, "b", b.url)).json()["change"] == "updated"
        b.release.set()
        await found.aread()
    await followed.fleet.admin.post("/admin/replicas/a/drain", json={"drain": False})
    assert await chosen(followed) == {"a", "b"}
    assert (await rows(followed))["b"]["registered"] is True


async def test_reload_neither_loses_nor_doubles_a_registered_replica(start: Start, tmp_path: Path) -> None:
    a, b, c = [await start.replica(QUICK) for _ in range(3)]
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b, c])
    await post(followed, "b", b.url)
    await followed.rewrite(regions({"a": a, "c": c}))
    assert {name: row["registered"] for name, row in (await rows(followed)).items()} == {
        "a": False,
        "c": False,
        "b": True,
    }
    await followed.rewrite(regions({"a": a, "b": b, "c": c}))  # the file names it now
    assert {name: row["registered"] for name, row in (await rows(followed)).items()} == dict.fromkeys("abc", False)
    checked(await delete(followed, "b"), 409, "replica_in_file")
    await followed.rewrite(regions({"a": a}))
    assert list(await rows(followed)) == ["a"]


async def test_replica_that_leaves_stays_if_the_file_names_it(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(QUICK), await start.replica(hang(delta("b"), rest=(DONE,)), QUICK)
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await post(followed, "b", b.url)
    await followed.fleet.admin.post("/admin/replicas/a/drain")
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as found:
        await delete(followed, "b")
        await followed.rewrite(regions({"a": a, "b": b}))
        b.release.set()
        await found.aread()
    await followed.fleet.admin.post("/admin/replicas/a/drain", json={"drain": False})
    assert await chosen(followed) == {"a", "b"}
    assert {name: row["registered"] for name, row in (await rows(followed)).items()} == {"a": False, "b": False}


async def test_file_without_the_region_of_a_registered_replica_is_refused(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(QUICK), await start.replica(QUICK)
    two = json.loads(regions({"a": a}))
    two["regions"].append({"name": "far"})
    followed = await follow(start, tmp_path, json.dumps(two).encode(), [a, b])
    await post(followed, "b", b.url, region="far")
    before = followed.file.reloads
    followed.path.write_bytes(regions({"a": a}))
    refused = await followed.fleet.admin.post("/admin/reload")
    assert "registered replica 'b' is there" in checked(refused, 400, "config_refused")["message"]
    await followed.file.reloaded(before)
    assert list(await rows(followed)) == ["a", "b"]


async def test_full_disk_refuses_a_registration(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    a, b = await start.replica(QUICK), await start.replica(answer(200))
    file = StateFile(tmp_path / "state.json")
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b], state_file=file)
    monkeypatch.setattr("gorgo.live.control.state_file.MAX_BYTES", 10)
    checked(await post(followed, "b", b.url), 507, "state_not_written")
    assert list(await rows(followed)) == ["a"]
    monkeypatch.undo()
    assert (await post(followed, "b", b.url)).json()["durable"] is True
