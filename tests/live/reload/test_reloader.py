"""A changed file under running streams, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from aiohttp import web

from gorgo.config.fleet import CapacityConfig, KvEventsConfig, ReplicaConfig
from gorgo.config.model import (
    ClientRuleConfig,
    ClientsConfig,
    Config,
    LimitsConfig,
    OverloadConfig,
    PickerConfig,
    ProxyConfig,
    RegionConfig,
    SharedConfig,
    TlsConfig,
    TracingConfig,
)
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.kv_events import CacheSnapshot
from gorgo.errors import ConfigError
from gorgo.live.http.tls import SharedTls
from gorgo.live.reload.file_watch import ConfigFile
from gorgo.live.reload.reloader import ConfigDiff, diff, keep_restart_only, refuse_loss
from gorgo.live.state import FLUSH_BLOCKS
from tests.core.routers import set_policy
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import DONE, REPLICA, answer, chat, delta, hang, stream
from tests.proxy.followed import Followed, follow, regions
from tests.proxy.raw import connected

CHAT = "/v1/chat/completions"
FLEET_OF = "x-gorgo-replica"


async def ask(followed: Followed, content: bytes | None = None) -> httpx.Response:
    response = await followed.fleet.client.post(CHAT, content=content or chat(stream=True))
    assert response.status_code == 200, response.text
    return response


async def break_off(request: web.Request, _: bytes) -> web.StreamResponse:
    """When released, resets the connection without a byte."""
    await request.app[REPLICA].release.wait()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.getMessage() == event]  # type: ignore[attr-defined]


async def test_added_replica_is_probed_and_then_takes_traffic(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("b"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await followed.rewrite(regions({"a": a, "b": b}))
    assert b.pings == 2
    assert followed.view("b").rtt_ms is not None
    assert {(await ask(followed)).headers[FLEET_OF] for _ in range(2)} == {"a", "b"}


async def test_last_connection_to_a_replica_that_left_the_fleet_closes_with_its_client(
    start: Start, tmp_path: Path
) -> None:
    a, b = await start.replica(hang(delta("a"))), await start.replica(stream(delta("b"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a, "b": b}), [a, b])
    async with connected(followed.fleet.addresses.data) as client:
        await client.post(CHAT, chat(stream=True))
        await a.arrived.wait()
        await followed.rewrite(regions({"b": b}))
        client.reset()
        await until(lambda: not followed.fleet.state.replicas.draining_targets)
    await asyncio.wait_for(a.dropped.wait(), 10)


async def test_added_replica_that_does_not_answer_joins_as_one_that_failed_a_probe(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    monkeypatch.setattr("gorgo.live.monitor.replica_monitor.FIRST_PROBE_TIMEOUT_S", 0.05)
    with socket.socket() as silent:  # accepts and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        await followed.rewrite(regions({"a": a, "b": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}"}}))
        assert followed.view("b").rtt_ms is None
        assert followed.view("b").failures_in_a_row == 1
        await followed.rewrite(regions({"a": a}))
        await until(lambda: not followed.state.replicas.draining_targets)


async def test_a_removed_replica_gives_its_streams_to_others_and_then_closes(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("c"), delta("d"), DONE)), await start.replica(hang(delta("b")))
    followed = await follow(start, tmp_path, regions({"b": b}), [a, b])
    target = followed.state.replicas.targets["b"]
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        await followed.rewrite(regions({"a": a}))
        got += b"".join([chunk async for chunk in raw])
    events = [json.loads(part[6:]) for part in got.split(b"\n\n") if part.startswith(b"data: {")]
    contents = [event["choices"][0]["delta"]["content"] for event in events if event["choices"]]
    assert contents == ["b", "c", "d"]
    assert b'"error"' not in got
    assert got.count(b"[DONE]") == 1
    await until(lambda: not followed.state.replicas.draining_targets)
    assert (target.active, target.upstream.connections) == (0, 0)
    await followed.fleet.idle()


async def test_a_removed_replica_finishes_a_stream_that_cannot_go_on_elsewhere_and_then_closes(
    start: Start, tmp_path: Path
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    b = await start.replica(hang(delta("b"), rest=[delta("c"), DONE]))
    followed = await follow(start, tmp_path, regions({"b": b}), [a, b])
    target = followed.state.replicas.targets["b"]
    body = chat(stream=True, logprobs=True)
    async with followed.fleet.client.stream("POST", CHAT, content=body) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        await followed.rewrite(regions({"a": a}))
        assert (await ask(followed)).headers[FLEET_OF] == "a"
        assert followed.state.replicas.draining_targets == {target}
        assert target.upstream.connections > 0
        assert 'replica="b"' in (await followed.fleet.client.get("/metrics")).text
        b.release.set()
        got += b"".join([chunk async for chunk in raw])
    assert got == delta("b") + delta("c") + DONE
    await until(lambda: not followed.state.replicas.draining_targets)
    assert (target.active, target.upstream.connections) == (0, 0)
    assert 'replica="b"' not in (await followed.fleet.client.get("/metrics")).text
    await followed.fleet.idle()


async def test_removed_replica_is_watched_no_more(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(answer(200)), await start.replica(answer(200))
    often = {"probe_interval_s": 0.01, "scrape_interval_s": 0.1}
    followed = await follow(start, tmp_path, regions({"a": a, "b": b}, proxy=often), [a, b])
    await until(lambda: a.pings > 10)
    await followed.rewrite(regions({"b": b}, proxy=often))
    await until(lambda: not followed.state.replicas.draining_targets)
    before = a.pings, b.pings
    await until(lambda: b.pings > before[1] + 10)
    assert a.pings == before[0]


async def test_client_that_leaves_a_removed_replica_lets_it_close(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(answer(200)), await start.replica(hang(delta("b")))
    followed = await follow(start, tmp_path, regions({"b": b}), [a, b])
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as response:
        await anext(response.aiter_raw())
        await followed.rewrite(regions({"a": a}))
    await until(lambda: not followed.state.replicas.draining_targets)
    assert b.dropped.is_set()
    await followed.fleet.idle()


async def test_failure_on_a_removed_replica_goes_to_the_fleet_as_it_is(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(break_off)
    followed = await follow(start, tmp_path, regions({"b": b}), [a, b])
    waiting = asyncio.create_task(ask(followed))
    await b.arrived.wait()
    await followed.rewrite(regions({"a": a}))
    b.release.set()
    assert (await waiting).headers[FLEET_OF] == "a"
    await followed.fleet.idle()


async def test_another_url_is_another_process_with_nothing_believed_of_it(start: Start, tmp_path: Path) -> None:
    old = await start.replica(hang(delta("old"), rest=[DONE]))
    new = await start.replica(stream(delta("new"), DONE))
    followed = await follow(start, tmp_path, regions({"a": old}), [old, new])
    followed.state.replicas.stored_responses.record(b'{"id": "resp_1"}', "a", client=None)
    long = chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}])
    async with followed.fleet.client.stream("POST", CHAT, content=long) as response:
        raw = response.aiter_raw()
        got = await anext(raw)
        assert followed.view("a").index_blocks > 0
        await followed.rewrite(regions({"a": new}))
        view = followed.view("a")
        assert (view.index_blocks, view.in_flight_requests, view.attempts) == (0, 0, 0)
        assert followed.state.replicas.stored_responses.find("resp_1", client=None) is None
        assert delta("new") in (await ask(followed, long)).content
        old.release.set()
        got += b"".join([chunk async for chunk in raw])
    assert got == delta("old") + DONE
    await until(lambda: not followed.state.replicas.draining_targets)
    await followed.fleet.idle()
    assert (
        'gorgo_attempts_total{region="here",replica="a",result="completed"} 2.0'
        in (await followed.fleet.client.get("/metrics")).text
    )


async def test_a_large_cache_of_a_replica_that_leaves_is_forgotten_in_steps(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await start.replica(), await start.replica()
    followed = await follow(start, tmp_path, regions({"a": a, "b": b}), [a, b])
    router = followed.fleet.state.routing.router
    router.caches.on_snapshot("b", CacheSnapshot(None, 16, list(range(20 * FLUSH_BLOCKS))), now=0.0)
    left: list[int] = []
    replace_fleet = router.replicas.set_fleet

    def counted(specs: Sequence[ReplicaSpec], *, now: float) -> None:
        left.extend(stats.blocks for name, stats in router.caches.sources(now=now).items() if name == "b")
        replace_fleet(specs, now=now)

    monkeypatch.setattr(router.replicas, "set_fleet", counted)
    await followed.rewrite(regions({"a": a}))
    assert left == [0]


async def test_a_fleet_of_one_that_moves_refuses_nobody(start: Start, tmp_path: Path) -> None:
    old, new = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": old}), [old, new])
    moved = asyncio.create_task(followed.rewrite(regions({"a": new})))
    while not moved.done():
        await ask(followed)
    await moved
    await ask(followed)
    assert new.seen


async def test_who_stays_keeps_what_is_believed_of_it(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("b"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await ask(followed, chat(stream=True, messages=[{"role": "user", "content": "x" * 4096}]))
    before, upstream = followed.view("a"), followed.state.replicas.targets["a"].upstream
    assert before.index_blocks > 0
    changed = {"url": a.url, "models": ["m"], "capacity": {"max_running_requests": 3}, "request_usage": True}
    await followed.rewrite(regions({"b": b, "a": changed}))
    after = followed.view("a")
    assert (after.index_blocks, after.attempts, after.rtt_ms) == (before.index_blocks, 1, before.rtt_ms)
    assert (after.models, after.max_running_requests) == (("m",), 3)
    assert followed.state.replicas.targets["a"].upstream is upstream
    assert followed.state.replicas.targets["a"].request_usage
    assert (await followed.fleet.client.get("/v1/models")).json()["data"][0]["id"] == "m"


async def test_draining_by_the_file_lets_streams_finish_and_sends_nothing_new(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(hang(delta("b"), rest=[DONE]))
    followed = await follow(start, tmp_path, regions({"b": b}), [a, b])
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True)) as response:
        raw = response.aiter_raw()
        await anext(raw)
        await followed.rewrite(regions({"a": a, "b": {"url": b.url, "draining": True}}))
        assert {(await ask(followed)).headers[FLEET_OF] for _ in range(4)} == {"a"}
        assert followed.view("b").in_flight_requests == 1
        b.release.set()
        assert b"".join([chunk async for chunk in raw]) == DONE
    await followed.rewrite(regions({"a": a, "b": b}))
    assert {(await ask(followed)).headers[FLEET_OF] for _ in range(4)} == {"a", "b"}


async def test_replica_that_drains_from_the_start_gets_nothing(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(answer(200))
    text = regions({"a": a, "b": {"url": b.url, "draining": True}})
    followed = await follow(start, tmp_path, text, [a, b])
    assert {(await ask(followed)).headers[FLEET_OF] for _ in range(3)} == {"a"}


async def test_drain_of_an_operator_stands_until_the_file_says_otherwise(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(answer(200)), await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])
    await followed.fleet.admin.post("/admin/replicas/a/drain")
    await followed.rewrite(regions({"a": a, "b": b}))
    assert followed.view("a").state == "draining"
    await followed.rewrite(regions({"a": b, "b": b}))  # another process under the name
    assert followed.view("a").state == "draining"
    await followed.rewrite(regions({"a": {"url": b.url, "draining": True}, "b": b}))
    await followed.rewrite(regions({"a": b, "b": b}))
    assert followed.view("a").state == "healthy"


async def test_live_weights_and_policy_outlive_an_edit_elsewhere(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(answer(200)), await start.replica(answer(200))
    paper = {"policy": "gorgo", "weights": {"w_rtt": 0.5}}
    followed = await follow(start, tmp_path, regions({"a": a}, proxy=paper), [a, b])
    router = followed.state.routing.router
    await followed.fleet.admin.put("/admin/weights", json={"weights": {"w_rtt": 1.5}})
    await followed.rewrite(regions({"a": a, "b": b}, proxy=paper))
    assert (router.settings.weights["w_rtt"], router.settings.weights.version) == (1.5, 2)
    await followed.rewrite(regions({"a": a, "b": b}, proxy=paper | {"weights": {"w_rtt": 0.7}}))
    assert (router.settings.weights["w_rtt"], router.settings.weights.version) == (0.7, 3)
    await followed.rewrite(regions({"a": a, "b": b}, proxy={"policy": "gorgo"}))
    assert router.settings.weights["w_rtt"] == 0.5  # a weight taken out of the file is the policy's default again
    await followed.fleet.admin.put("/admin/policy", json={"policy": "random"})
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo"}))
    assert router.settings.policy.name == "random"
    await followed.rewrite(regions({"a": a}, proxy=paper))
    assert router.settings.policy.name == "random"  # weights of another policy than the one in force
    await followed.rewrite(regions({"a": a}, proxy={"policy": "nearest"}))
    assert router.settings.policy.name == "nearest"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"proxy: [", "1 error"),
        (b"", "empty"),
        (regions({"a": {"url": "nowhere"}}), "replicas[0].url"),
        (regions({"a": {"url": "http://x", "api_key_env": "NOT_SET"}}), "NOT_SET"),
        (regions({"a": {"url": "http://x"}}, proxy={"policy": "no-such"}), "no policy named 'no-such'"),
        (regions({"a": {"url": "http://x"}}, proxy={"policy": "gorgo", "weights": {"w_rtt": 999}}), "w_rtt"),
    ],
)
async def test_invalid_file_is_refused_and_the_old_one_stays(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes, says: str
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    before = followed.state.config
    await followed.rewrite(text)
    assert followed.state.config is before
    assert followed.gauge("gorgo_config_reload_failed") == 1
    (refusal,) = [record for record in caplog.records if record.getMessage() == "config_refused"]
    assert refusal.levelno == logging.ERROR
    assert says in told(caplog, "config_refused")[0]["error"]
    await ask(followed)
    await followed.rewrite(regions({"a": a}))
    assert followed.gauge("gorgo_config_reload_failed") == 0
    assert (followed.count("applied"), followed.count("refused")) == (1, 1)
    assert (followed.gauge("gorgo_config_last_reload_timestamp_seconds") or 0) > 1e9


async def test_key_that_is_revoked_in_its_file_is_refused_once_the_proxy_is_asked_to_reload(
    start: Start, tmp_path: Path
) -> None:
    def write(key: str) -> None:
        keys.write_text(f"team:{sha256(key.encode()).hexdigest()}")

    async def statuses() -> list[int]:
        client, body = followed.fleet.client, chat()
        headers = [{"authorization": f"Bearer {key}"} for key in ("old", "new")]
        return [(await client.post(CHAT, content=body, headers=header)).status_code for header in headers]

    a, keys = await start.replica(answer(200)), tmp_path / "clients.keys"
    text = regions({"a": a}, clients={"keys_file": str(keys)})
    write("old")
    followed = await follow(start, tmp_path, text, [a])
    assert await statuses() == [200, 401]
    write("new")
    await followed.rewrite(text)
    assert await statuses() == [401, 200]


async def test_key_that_is_taken_out_of_its_file_is_refused_without_a_signal(start: Start, tmp_path: Path) -> None:
    def hashed(*keys: str) -> str:
        return "".join(f"team:{sha256(key.encode()).hexdigest()}\n" for key in keys)

    a, keys = await start.replica(answer(200)), tmp_path / "clients.keys"
    keys.write_text(hashed("leaked", "good"))
    text = regions({"a": a}, clients={"keys_file": str(keys)})
    followed = await follow(start, tmp_path, text, [a], poll_s=0.002)
    keys.write_text("half of a line")
    await until(lambda: followed.count("refused"))
    leaked, good = ({"authorization": f"Bearer {key}"} for key in ("leaked", "good"))
    assert (await followed.fleet.client.post(CHAT, content=chat(), headers=leaked)).status_code == 200
    keys.write_text(hashed("good"))
    await until(lambda: followed.count("applied"))
    assert (await followed.fleet.client.post(CHAT, content=chat(), headers=leaked)).status_code == 401
    assert (await followed.fleet.client.post(CHAT, content=chat(), headers=good)).status_code == 200


async def test_file_that_was_cut_before_its_keys_keeps_them(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, keys = await start.replica(answer(200)), tmp_path / "clients.keys"
    keys.write_text(f"team:{sha256(b'key').hexdigest()}\n")
    whole = regions({"a": a}, clients={"keys_file": str(keys)})
    followed = await follow(start, tmp_path, whole, [a])
    await followed.rewrite(regions({"a": a}))
    assert followed.count("refused") == 1
    assert (await followed.fleet.client.post(CHAT, content=chat())).status_code == 401
    refusal = told(caplog, "config_refused")[0]["error"]
    assert "less protection than the running configuration: without clients.keys_file" in refusal
    await followed.rewrite(regions({"a": a}, clients={"open": True}))
    assert (await followed.fleet.client.post(CHAT, content=chat())).status_code == 200


PROTECTED = {
    "replicas": {"api_key_env": "K", "push_token_env": "P", "ca_file": "f", "models": ("m",)},
    "clients": ClientsConfig(keys_file="k", rules=(ClientRuleConfig(name="a", priority=-1),)),
    "limits": LimitsConfig(max_body_bytes=1000),
}


@pytest.mark.parametrize("lost", ["api_key_env", "push_token_env", "ca_file", "models", "limits", "priority", None])
def test_a_file_that_was_cut_within_a_replica_or_its_bounds_is_refused(lost: str | None) -> None:
    keys = cast(dict[str, Any], PROTECTED["replicas"])
    clients, limits = cast(ClientsConfig, PROTECTED["clients"]), cast(LimitsConfig, PROTECTED["limits"])
    replica = ReplicaConfig(name="r", region="here", url="https://r", **keys)
    whole = Config(
        proxy=ProxyConfig(region="here"),
        regions=(RegionConfig(name="here"),),
        replicas=(replica,),
        clients=clients,
        limits=limits,
    )
    without: dict[str, Any] = {lost: () if lost == "models" else None} if lost in keys else {}
    cut = replace(
        whole,
        replicas=(replace(replica, **without),),
        limits=LimitsConfig() if lost == "limits" else replace(limits, max_attempts=2),
        clients=replace(clients, rules=(ClientRuleConfig(name="a"),)) if lost == "priority" else clients,
    )
    if lost is None:
        refuse_loss(whole, cut)
        return
    with pytest.raises(ConfigError, match=f"without {lost}"):
        refuse_loss(whole, cut)
    refuse_loss(whole, replace(cut, clients=replace(cut.clients, open=True)))
    refuse_loss(whole, replace(cut, replicas=(), clients=clients, limits=limits))


async def test_a_file_that_had_a_line_of_its_end_is_refused_without_it(tmp_path: Path) -> None:
    config = Config(proxy=ProxyConfig(region="here"), regions=(RegionConfig(name="here"),), replicas=())
    text = b"replicas: [{url: http://10.0.0.5:30000}]\n# end\n"
    file = ConfigFile(tmp_path / "regions.yaml", lambda _: config, b"replicas: []\n")
    assert await file.parse(b"url: 1") is config  # never had one
    assert await file.parse(text) is config
    for length in range(len(text) - 1):
        with pytest.raises(ConfigError, match="seems to be cut"):
            await file.parse(text[:length])
    assert await file.parse(text.rstrip()) is config


async def test_files_of_authorities_are_read_while_streams_go_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    readers: list[threading.Thread] = []

    def read(_: object, shared: SharedTls) -> ssl.SSLContext:
        readers.append(threading.current_thread())
        return shared()

    monkeypatch.setattr("gorgo.live.reload.reloader.upstream_tls", read)
    await followed.rewrite(regions({"a": a}, limits={"max_attempts": 2}))
    assert readers
    assert threading.main_thread() not in readers


async def test_refused_file_is_told_once_however_often_it_is_looked_at(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await start.replica(answer(200)), await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b], poll_s=0.002)
    followed.path.write_bytes(b"proxy: [")
    await until(lambda: followed.count("refused"))
    for _ in range(3):  # of the same content: looked at again, nothing to tell
        os.utime(followed.path, (1, 1))
        await until(lambda: followed.file._read_stamp == followed.file._polled)
    (tmp_path / "new").write_bytes(regions({"a": a, "b": b}))
    os.replace(tmp_path / "new", followed.path)  # as editors do, and nobody asks
    await until(lambda: "b" in followed.state.replicas.targets)
    assert len(told(caplog, "config_refused")) == 1


async def test_fault_of_our_own_in_a_reload_is_a_refusal_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": a}), [a, b])

    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("gorgo.live.monitor.replica_monitor.ReplicaMonitor._measure", fails)
        await followed.rewrite(regions({"a": a, "b": b}))
    assert list(followed.state.replicas.targets) == ["a"]
    assert told(caplog, "config_refused")[0]["error"] == "ExceptionGroup"
    await ask(followed)
    await followed.rewrite(regions({"a": a, "b": b}))
    assert list(followed.state.replicas.targets) == ["a", "b"]


async def test_addresses_need_a_new_start_and_the_log_says_so(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    await followed.rewrite(regions({"a": a}, proxy={"bind": "127.0.0.1:1"}, limits={"max_attempts": 1}))
    (fields,) = told(caplog, "config_reloaded")
    assert (fields["restart_needed"], fields["settings"]) == (["proxy.bind"], ["limits.max_attempts"])
    await ask(followed)


async def test_a_url_with_a_path_is_warned_of_at_the_reload(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    await followed.rewrite(regions({"a": a, "b": {"url": f"{a.url}/v1"}}))
    warnings = [fields["warning"] for fields in told(caplog, "config_warning")]
    assert [text.split(": ")[0] for text in warnings] == ["replicas[1].url"] * 2
    assert warnings[0].endswith(f"which the proxy adds itself; write {a.url}")


async def test_limits_and_intervals_hold_at_once(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    limits = {"max_body_bytes": 100, "max_attempts": 2, "connections_per_replica": 7, "prefix_index_blocks": 10}
    proxy = {"probe_interval_s": 0.01, "scrape_interval_s": 20.0}
    await followed.rewrite(regions({"a": a}, proxy=proxy, limits=limits))
    too_large = await followed.fleet.client.post(CHAT, content=chat(user="x" * 100))
    assert too_large.status_code == 413
    found = followed.state.routing.router.settings.limits
    assert (found.max_attempts, found.max_index_blocks, found.stale_after_s) == (2, 10, 60.0)
    await until(lambda: a.pings > 10)


async def test_stopping_while_a_newcomer_is_probed_leaves_nothing_open(start: Start, tmp_path: Path) -> None:
    a = await start.replica(answer(200))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        followed.path.write_bytes(regions({"a": a, "b": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}"}}))
        followed.file.request_reload()
        probing, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
        followed.fleet.shutdown.set()
        await asyncio.wait_for(followed.fleet.task, 10)
        with probing:
            probing.settimeout(10)
            while probing.recv(1 << 16):  # what it was asked, then the end
                pass
    assert list(followed.state.replicas.targets) == ["a"]


async def test_stopping_ends_streams_on_replicas_that_have_left(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(answer(200)), await start.replica(hang(delta("b")))
    text = regions({"b": b}, limits={"shutdown_grace_s": 0.1})
    followed = await follow(start, tmp_path, text, [a, b])
    target = followed.state.replicas.targets["b"]
    async with followed.fleet.client.stream("POST", CHAT, content=chat(stream=True, logprobs=True)) as response:
        raw = response.aiter_raw()
        await anext(raw)
        await followed.rewrite(regions({"a": a}, limits={"shutdown_grace_s": 0.1}))
        followed.fleet.shutdown.set()
        assert b'"code": "stopping"' in b"".join([chunk async for chunk in raw])
    await asyncio.wait_for(followed.fleet.task, 10)
    assert target.upstream.connections == 0


async def test_shadow_policy_in_the_file_scores_from_the_next_decision_on(start: Start, tmp_path: Path) -> None:
    a, b = await start.replica(stream(delta("a"), DONE)), await start.replica(stream(delta("b"), DONE))
    rows = {"a": a, "b": b}
    followed = await follow(start, tmp_path, regions(rows), [a, b])
    await ask(followed)
    await followed.rewrite(regions(rows, proxy={"shadow_policy": "gorgo-ms"}))
    await ask(followed)
    await followed.rewrite(regions(rows))
    await ask(followed)
    await followed.fleet.idle()
    samples = list(followed.state.routing.router.samples)
    assert [sample.shadow_policy for sample in samples] == [None, "gorgo-ms", None]
    assert samples[1].shadow_rank in (1, 2)


async def test_policy_and_its_shadow_can_change_in_one_edit(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    text = regions({"a": a}, proxy={"policy": "gorgo-ms", "shadow_policy": "gorgo-ms"})
    followed = await follow(start, tmp_path, text, [a])
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo", "shadow_policy": "gorgo"}))
    router = followed.state.routing.router
    assert followed.count("applied") == 1
    assert (
        router.settings.policy.name,
        router.settings.shadow and router.settings.shadow.name,
        router.index.bounded,
    ) == ("gorgo", "gorgo", False)


async def test_shadow_that_cannot_go_with_the_policy_is_a_refused_file(start: Start, tmp_path: Path) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    await followed.rewrite(regions({"a": a}, proxy={"policy": "gorgo", "shadow_policy": "gorgo-ms"}))
    assert followed.count("refused") == 1
    assert (followed.state.routing.router.settings.policy.name, followed.state.routing.router.settings.shadow) == (
        "round-robin",
        None,
    )


async def test_shadow_that_cannot_go_with_a_policy_set_live_is_left_out_and_told(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a = await start.replica(stream(delta("a"), DONE))
    followed = await follow(start, tmp_path, regions({"a": a}), [a])
    set_policy(followed.state.routing.router, "gorgo", now=followed.state.routing.clock())
    with caplog.at_level(logging.INFO, logger="gorgo"):
        await followed.rewrite(regions({"a": a}, proxy={"shadow_policy": "gorgo-ms"}))
    assert [row["error"] for row in told(caplog, "shadow_not_set")] != []
    assert followed.state.routing.router.settings.shadow is None


OLD = Config(
    proxy=ProxyConfig(region="here", weights={"w_rtt": 0.5}),
    regions=(RegionConfig(name="here"), RegionConfig(name="there")),
    replicas=(
        ReplicaConfig(name="a", region="here", url="http://a:1"),
        ReplicaConfig(name="b", region="here", url="http://b:1", draining=True),
    ),
)


def with_a(**changes: Any) -> Config:
    return replace(OLD, replicas=(replace(OLD.replicas[0], **changes), OLD.replicas[1]))


def with_proxy(**changes: Any) -> Config:
    return replace(OLD, proxy=replace(OLD.proxy, **changes))


def test_same_file_asks_for_nothing() -> None:
    changes = diff(OLD, replace(OLD, replicas=OLD.replicas[::-1]))
    assert changes == ConfigDiff()
    assert not changes.fleet
    assert changes.as_log() == {}


def test_replica_comes_and_another_goes() -> None:
    new = ReplicaConfig(name="c", region="there", url="http://c:1", draining=True)
    changes = diff(OLD, replace(OLD, replicas=(OLD.replicas[0], new)))
    assert changes == ConfigDiff(added=(new,), removed=("b",), drains={"c": True})
    assert changes.as_log() == {"added": ["c"], "removed": ["b"], "drains": {"c": True}}


@pytest.mark.parametrize("change", [{"url": "http://a:2"}, {"engine": "vllm"}])
def test_another_url_or_engine_is_another_process(change: dict[str, Any]) -> None:
    new = with_a(**change)
    assert diff(OLD, new) == ConfigDiff(replaced=(new.replicas[0],))


def test_slash_at_the_end_of_a_url_is_no_other_process() -> None:
    assert not diff(OLD, with_a(url="http://a:1/")).replaced


@pytest.mark.parametrize(
    "change",
    [
        {"models": ("m",)},
        {"region": "there"},
        {"capacity": CapacityConfig(kv_tokens=5)},
        {"api_key_env": "KEY"},
        {"request_usage": True},
        {"kv_events": KvEventsConfig()},
    ],
)
def test_other_words_about_a_replica_leave_it_the_same_process(change: dict[str, Any]) -> None:
    new = with_a(**change)
    assert diff(OLD, new) == ConfigDiff(updated=(new.replicas[0],))


def test_only_a_changed_drain_mark_is_one() -> None:
    assert diff(OLD, with_a(draining=True)) == ConfigDiff(drains={"a": True})
    back = replace(OLD, replicas=(OLD.replicas[0], replace(OLD.replicas[1], draining=False)))
    assert diff(OLD, back) == ConfigDiff(drains={"b": False})
    assert diff(OLD, with_a(models=("m",))).drains == {}


def test_policy_and_weights_count_when_the_file_changed_them() -> None:
    changes = diff(OLD, with_proxy(policy="random", weights={}))
    assert (changes.policy, changes.weights) == (True, True)
    assert diff(OLD, with_proxy(weights={"w_rtt": 0.5})) == ConfigDiff()


def test_settings_are_named_and_intervals_told_apart() -> None:
    new = replace(with_proxy(probe_interval_s=1.0, min_ready_replicas=2), limits=LimitsConfig(max_attempts=2))
    expected = ("proxy.probe_interval_s", "proxy.min_ready_replicas", "limits.max_attempts")
    assert diff(OLD, new) == ConfigDiff(intervals=True, settings=expected)


def test_tls_turned_on_or_off_needs_a_new_start_and_another_certificate_does_not() -> None:
    encrypted = with_proxy(tls=TlsConfig(cert="a.crt", key="a.key"))
    for running, new in ((OLD, encrypted), (encrypted, OLD)):
        assert diff(running, new) == ConfigDiff(restart=("proxy.tls",))
        assert keep_restart_only(running, new).proxy.tls == running.proxy.tls
    renewed = with_proxy(tls=TlsConfig(cert="b.crt", key="b.key"))
    assert diff(encrypted, renewed) == ConfigDiff(settings=("proxy.tls",))
    assert keep_restart_only(encrypted, renewed) == renewed


def test_addresses_need_a_new_start_and_are_named_each_time() -> None:
    new = with_proxy(bind="127.0.0.1:1", admin_bind="127.0.0.1:2")
    for running in (OLD, keep_restart_only(OLD, new)):
        assert diff(running, new) == ConfigDiff(restart=("proxy.bind", "proxy.admin_bind"))
    assert keep_restart_only(OLD, replace(new, replicas=())).replicas == ()


@pytest.mark.parametrize("name", ["ca_file", "client_cert", "client_key"])
def test_other_files_of_tls_are_another_process(name: str) -> None:
    new = with_a(**{name: "a.pem"})
    changes = diff(OLD, new)
    assert changes == ConfigDiff(replaced=(new.replicas[0],))
    assert changes.fleet


@pytest.mark.parametrize("name", ["probe_interval_s", "scrape_interval_s"])
def test_each_interval_counts(name: str) -> None:
    assert diff(OLD, with_proxy(**{name: 1.5})) == ConfigDiff(intervals=True, settings=(f"proxy.{name}",))


def test_shadow_and_settings_of_every_section_are_named() -> None:
    assert diff(OLD, with_proxy(shadow_policy="random")) == ConfigDiff(shadow=True, settings=("proxy.shadow_policy",))
    assert diff(OLD, replace(OLD, clients=ClientsConfig(keys_file="KEYS"))).settings == ("clients.keys_file",)
    assert diff(OLD, replace(OLD, overload=OverloadConfig(queue_max_requests=7))).settings == (
        "overload.queue_max_requests",
    )
    assert diff(OLD, replace(OLD, regions=OLD.regions[:1])).settings == ("regions",)


def test_where_spans_go_needs_a_new_start() -> None:
    new = with_proxy(tracing=TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces"))
    assert diff(OLD, new) == ConfigDiff(restart=("proxy.tracing",))
    assert diff(OLD, new).as_log() == {"restart_needed": ["proxy.tracing"]}
    assert keep_restart_only(OLD, new) == OLD


@pytest.mark.parametrize(
    ("change", "fleet"),
    [
        (replace(OLD, replicas=OLD.replicas[:1]), True),
        (replace(OLD, replicas=(*OLD.replicas, ReplicaConfig(name="c", region="here", url="http://c:1"))), True),
        (with_a(models=("m",)), True),
        (with_a(draining=True), False),
        (with_proxy(policy="random"), False),
    ],
)
def test_fleet_differs_when_a_replica_comes_goes_or_is_another(change: Config, fleet: bool) -> None:
    assert diff(OLD, change).fleet is fleet


def test_another_store_needs_a_restart() -> None:
    assert diff(OLD, replace(OLD, picker=PickerConfig(hold_s=5.0))) == ConfigDiff(restart=("picker",))
    new = replace(OLD, shared=SharedConfig(url="redis://s", group="g", key_env="KEY"))
    assert diff(OLD, new) == ConfigDiff(restart=("shared",))
    assert keep_restart_only(OLD, new) == OLD
