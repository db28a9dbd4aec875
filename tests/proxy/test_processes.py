"""`gorgo serve` as a process: killed, restarted, frozen, with an operator's verbs, registered replicas and moved
streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from typer.testing import CliRunner, Result

from gorgo.cli import app
from gorgo.config.weights_file import read_weights_file
from gorgo.live.control.state_file import StateFile
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, ROLE, USAGE, FakeReplica, answer, chat, delta, hang, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import TOKEN, Served, environ, gorgo, served

# --- Session affinity over a restart of `gorgo serve` and over two of them, for clients without a session id.


SESSIONS = [f"You are assistant number {number}. " * 40 for number in range(12)]


async def homes(proxy: Served) -> list[str]:
    """The replica of each session."""
    found = []
    for system in SESSIONS:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        response = await proxy.client.post("/v1/chat/completions", json={"messages": messages, "stream": True})
        assert response.status_code == 200
        found.append(response.headers["x-gorgo-replica"])
    return found


async def test_restart_moves_no_session_and_two_proxies_agree(start: Start, tmp_path: Path) -> None:
    replicas = {name: await start.replica(*[stream(delta("a"), DONE)] * 40) for name in ("a", "b", "c")}
    (tmp_path / "regions.yaml").write_bytes(regions(replicas, proxy={"policy": "simple-session-affinity"}))
    async with served(tmp_path) as first, served(tmp_path) as second:
        before = await homes(first)
        assert await homes(second) == before
    async with served(tmp_path) as restarted:
        assert await homes(restarted) == before
    assert len(set(before)) > 1


# --- `gorgo serve --state` as a process that is killed at any moment, and the commands around it.


#: Each is a start of a process; `make test-system` kills more often.
KILLS = 6
KILLS_LONG = 200


@pytest.fixture
async def folder(start: Start, tmp_path: Path) -> Path:
    replica: FakeReplica = await start.replica(stream(delta("a"), DONE))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, proxy={"policy": "gorgo"}))
    return tmp_path


async def killed_while_freezing(folder: Path, kills: int) -> None:
    """Unfreeze and freeze as fast as it goes, kill, start: what was answered holds, or what was asked last."""
    chance = random.Random(5)
    file = StateFile(folder / "state.json")
    frozen, version, acknowledged, asked = 0, 1, 0.5, 0.5
    for number in range(kills):
        # So many are answered before it is killed, at some moment of the next: at once every third time.
        answered, enough = number % 3 and chance.randrange(1, 4), asyncio.Event()
        async with served(folder, "--state", str(file.path)) as proxy:
            found = await proxy.weights()
            assert found["weights"]["w_rtt"] in (acknowledged, asked)
            assert found["version"] >= version
            acknowledged = asked = found["weights"]["w_rtt"]
            version, at_rest = found["version"], False

            async def freeze_again_and_again(wanted: int, enough: asyncio.Event) -> None:
                nonlocal frozen, acknowledged, asked, version, at_rest
                while not at_rest:
                    if frozen >= wanted:
                        enough.set()
                    await proxy.admin.post("/admin/unfreeze")
                    asked = round(0.05 + (frozen + 1) % 1000 / 1000, 3)
                    body = {"weights": {"w_rtt": asked}, "reason": "x" * chance.randrange(900)}
                    version = (await proxy.admin.post("/admin/freeze", json=body)).json()["version"]
                    acknowledged = asked
                    frozen += 1
                    at_rest = chance.random() < 0.1  # now and then it is killed at rest, frozen

            freezing = asyncio.create_task(freeze_again_and_again(frozen + answered, enough))
            waiting = asyncio.create_task(enough.wait())
            await asyncio.wait((freezing, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await asyncio.wait((freezing,), timeout=chance.uniform(0.0, 0.02))
            proxy.process.kill()
            await asyncio.wait((freezing,))
            assert at_rest or isinstance(freezing.exception(), httpx.HTTPError)
        kept = file.read()
        assert kept is not None
        assert kept.version >= version
        assert kept.weights["w_rtt"] in (acknowledged, asked)
        if at_rest:
            assert (kept.frozen is not None, kept.weights["w_rtt"]) == (True, acknowledged)
    assert frozen > kills / 2, "changes were made"


@pytest.mark.timeout(180)  # six starts of a process, on a core that others share
@pytest.mark.system
async def test_kill_at_any_moment_leaves_what_was_acknowledged_or_in_flight(folder: Path) -> None:
    await killed_while_freezing(folder, KILLS)


@pytest.mark.system
@pytest.mark.timeout(1200)
async def test_two_hundred_kills_leave_what_was_acknowledged_or_in_flight(folder: Path) -> None:
    await killed_while_freezing(folder, KILLS_LONG)


def weights_file(path: Path, value: float) -> str:
    """Write weights of the policy `gorgo` and return the path as a word of a command."""
    path.write_text(json.dumps({"policy": "gorgo", "weights": {"w_rtt": value}}))
    return str(path)


async def test_a_freeze_by_command_is_said_shown_and_exported(folder: Path) -> None:
    exported, weights = folder / "found.json", weights_file(folder / "tuned.json", 0.7)
    async with served(folder, "--state", str(folder / "state.json")) as proxy:
        at = ("--url", proxy.admin_url)
        done = await gorgo("freeze", *at, "--weights", weights, "--reason", "held-out", "--export", str(exported))
        assert done.returncode == 0, done.stderr
        line = r"policy gorgo w_rtt=0.7 w_queue=0.1, version 2, frozen since \S+ by tester: held-out\n"
        assert re.fullmatch(line, done.stdout)
        assert done.stderr == ""
        status = await gorgo("status", *at)
        assert re.search(line, " ".join(status.stdout.split()) + "\n"), "its lines are as wide as a terminal"
        refused = await gorgo("freeze", *at, "--weights", str(folder / "regions.yaml"))
        assert refused.returncode == 2
    file = read_weights_file(exported)
    assert (file.policy, dict(file.weights), file.note) == ("gorgo", {"w_rtt": 0.7, "w_queue": 0.1}, "held-out")


@pytest.mark.system
async def test_frozen_weights_outlive_a_kill_and_another_policy_until_they_are_unfrozen(folder: Path) -> None:
    state = ("--state", str(folder / "state.json"))
    async with served(folder, *state) as proxy:
        body = {"policy": "gorgo", "weights": {"w_rtt": 0.7}, "by": "tester"}
        assert (await proxy.admin.post("/admin/freeze", json=body)).json()["version"] == 2
        proxy.process.send_signal(signal.SIGKILL)
    async with served(folder, *state, "--policy", "nearest") as proxy:
        at = ("--url", proxy.admin_url)
        found = await proxy.weights()
        assert (found["policy"], found["weights"], found["version"]) == ("gorgo", {"w_rtt": 0.7, "w_queue": 0.1}, 2)
        response = await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.5}})
        assert response.status_code == 409
        refused = await gorgo("freeze", *at, "--weights", weights_file(folder / "other.json", 0.9))
        assert refused.returncode == 1
        assert "answered 409: the weights are frozen since" in refused.stderr
        unfrozen = await gorgo("unfreeze", *at, "--json")
        assert json.loads(unfrozen.stdout)["frozen"] is None


async def test_a_freeze_without_a_state_file_warns_that_it_ends_with_its_process(folder: Path) -> None:
    async with served(folder, "--weights", weights_file(folder / "tuned.json", 0.7)) as proxy:
        assert (await proxy.weights())["weights"]["w_rtt"] == 0.7
        done = await gorgo("freeze", "--url", proxy.admin_url)
        assert "without --state: the freeze ends with its process" in done.stderr


@pytest.mark.parametrize("text", ['{"gorgo_state": 1', '{"gorgo_state": 2}'])
async def test_state_that_cannot_be_read_ends_the_start_with_its_reason(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)
    done = await gorgo("serve", "--config", str(folder / "regions.yaml"), "--state", str(folder / "state.json"))
    assert done.returncode == 2
    assert f"{folder / 'state.json'}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "state.json").read_text() == text


async def test_request_log_that_cannot_be_written_ends_the_start(folder: Path) -> None:
    words = ("serve", "--config", str(folder / "regions.yaml"), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")
    done = await gorgo(*words, "--request-log", str(folder / "nowhere" / "log"))
    assert done.returncode == 2
    assert "cannot write a request log: No such file or directory" in done.stderr


# --- Replicas that register at `gorgo serve` as a process, over a kill and a start.


CHAT = "/v1/chat/completions"


async def fleet(proxy: Served) -> dict[str, bool]:
    rows = (await proxy.admin.get("/admin/fleet")).json()["replicas"]
    return {row["name"]: row["registered"] for row in rows}


@pytest.mark.system
async def test_registered_replica_outlives_a_kill_and_a_removed_one_does_not_come_back(
    start: Start, tmp_path: Path
) -> None:
    quick = stream(delta("x"), DONE)
    a, b, c = await start.replica(quick), await start.replica(quick), await start.replica(hang(delta("c")))
    only_a = {"url": a.url, "models": ["a"]}
    (tmp_path / "regions.yaml").write_bytes(regions({"a": only_a}))
    state = ("--state", str(tmp_path / "state.json"))
    async with served(tmp_path, *state) as proxy:
        for name, replica in {"b": b, "c": c}.items():
            entry = {"name": name, "region": "here", "url": replica.url, "models": [name]}
            done = await proxy.admin.post("/admin/replicas", json=entry)
            assert (done.status_code, done.json()["durable"]) == (201, True)
        async with proxy.client.stream("POST", CHAT, content=chat(stream=True, model="c")) as found:
            assert found.headers["x-gorgo-replica"] == "c"
            removed = await proxy.admin.delete("/admin/replicas/c")
            assert (removed.status_code, removed.json()["in_flight"]) == (202, 1)
            assert await fleet(proxy) == {"a": False, "b": True, "c": True}  # it drains
            proxy.process.send_signal(signal.SIGKILL)
            await proxy.process.wait()
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False, "b": True}
        answer = await proxy.client.post(CHAT, content=chat(stream=True, model="b"))
        assert answer.headers["x-gorgo-replica"] == "b"
    (tmp_path / "regions.yaml").write_bytes(regions({"a": only_a, "b": b}))
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False, "b": False}
    assert "registered" not in json.loads((tmp_path / "state.json").read_text())


async def test_registered_replica_whose_region_is_no_longer_in_the_file_is_left_out_at_the_start(
    start: Start, tmp_path: Path
) -> None:
    a = await start.replica(stream(delta("x"), DONE))
    file = json.loads(regions({"a": a}))
    file["regions"].append({"name": "far"})
    (tmp_path / "regions.yaml").write_text(json.dumps(file))
    state = ("--state", str(tmp_path / "state.json"))
    async with served(tmp_path, *state) as proxy:
        entry = {"name": "b", "region": "far", "url": a.url}
        assert (await proxy.admin.post("/admin/replicas", json=entry)).status_code == 201
    (tmp_path / "regions.yaml").write_bytes(regions({"a": a}))
    async with served(tmp_path, *state) as proxy:
        assert await fleet(proxy) == {"a": False}


# --- An operator's verbs against `gorgo serve` as a process.


async def gorgo_verbs_process(proxy: Served, *words: str) -> Result:
    """Run a command against the admin listener of `proxy`."""
    environ = {"GORGO_ADMIN_TOKEN": TOKEN, "GORGO_ADMIN_URL": proxy.admin_url, "LOGNAME": "tester"}
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, words, env=environ))


@pytest.fixture
async def proxy(start: Start, tmp_path: Path) -> AsyncIterator[Served]:
    quick = stream(delta("x"), USAGE, DONE)
    left, right = await start.replica(quick), await start.replica(quick)
    (tmp_path / "regions.yaml").write_bytes(regions({"left": left, "right": right}, proxy={"policy": "gorgo-ms"}))
    async with served(tmp_path, "--state", str(tmp_path / "state.json")) as found:
        yield found


async def chosen(proxy: Served, count: int) -> set[str]:
    answers = [await proxy.client.post(CHAT, content=chat(stream=True)) for _ in range(count)]
    return {answer.headers["x-gorgo-replica"] for answer in answers}


async def test_drain_ends_new_requests_to_a_replica_until_it_is_undone(proxy: Served, tmp_path: Path) -> None:
    await gorgo_verbs_process(proxy, "policy", "round-robin")
    done = await gorgo_verbs_process(proxy, "drain", "left")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "left is draining: no new requests, 0 in flight\n"
    assert await chosen(proxy, 4) == {"right"}
    assert json.loads((tmp_path / "state.json").read_text())["draining"] == ["left"]
    undone = await gorgo_verbs_process(proxy, "drain", "left", "--undo")
    assert undone.stdout == "left gets new requests again\n"
    assert await chosen(proxy, 4) == {"left", "right"}
    unknown = await gorgo_verbs_process(proxy, "drain", "lefd")
    assert unknown.exit_code == 1
    assert "answered 404: no replica named 'lefd' (did you mean 'left'?)" in unknown.stderr


async def test_set_changes_the_named_weights_and_a_freeze_refuses_it(proxy: Served) -> None:
    done = await gorgo_verbs_process(proxy, "set", "m_rtt=2", "lambda=0.5", "--reason", "far clients")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "policy gorgo-ms m_rtt=2 m_queue=1 lambda=0.5 delta=25 eta=800, version 2, not frozen\n"
    last = (await proxy.weights())["history"][-1]
    assert (last["by"], last["reason"], last["source"]) == ("tester", "far clients", "admin")
    wrong = await gorgo_verbs_process(proxy, "set", "m_rt=2")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "'m_rt' is unknown to this policy (did you mean 'm_rtt'?)" in wrong.stderr
    far = await gorgo_verbs_process(proxy, "set", "m_rtt=1000")
    assert "expected a number in [" in far.stderr
    await gorgo_verbs_process(proxy, "freeze", "--reason", "release")
    frozen = await gorgo_verbs_process(proxy, "set", "m_rtt=1")
    assert frozen.exit_code == 1
    assert "answered 409: the weights are frozen since" in frozen.stderr
    assert "by tester (release); unfreeze them first (`gorgo unfreeze`)" in frozen.stderr
    assert (await proxy.weights())["weights"]["m_rtt"] == 2.0


@pytest.mark.parametrize("word", ["m_rtt", "m_rtt=", "=2", "m_rtt=fast", "m_rtt=nan", "m_rtt=inf"])
def test_word_that_sets_no_weight_is_a_usage_error(word: str) -> None:
    done = CliRunner().invoke(app, ["set", word, "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 2
    assert "expected NAME=NUMBER" in done.stderr


async def test_policy_is_shown_without_a_name_and_set_with_one(proxy: Served) -> None:
    shown = await gorgo_verbs_process(proxy, "policy")
    assert shown.stdout.startswith("policy gorgo-ms m_rtt=1 ")
    assert "\ngorgo-ms: " in shown.stdout
    done = await gorgo_verbs_process(proxy, "policy", "nearest")
    assert done.stdout == "policy nearest, version 2, not frozen\n"
    answer = await proxy.client.post(CHAT, content=chat(stream=True))
    assert answer.headers["x-gorgo-policy"] == "nearest"
    wrong = await gorgo_verbs_process(proxy, "policy", "nearst")
    assert wrong.exit_code == 1
    assert "no policy named 'nearst' (did you mean 'nearest'?); there are: gorgo, gorgo-ms," in wrong.stderr


async def test_explain_lists_recent_requests_and_shows_one_as_a_table(proxy: Served) -> None:
    empty = await gorgo_verbs_process(proxy, "explain")
    assert (empty.exit_code, empty.stdout) == (0, "no request has been routed yet\n")
    for name in ("first", "second"):
        await proxy.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": name})
    recent = (await gorgo_verbs_process(proxy, "explain")).stdout.splitlines()
    assert recent[0].split()[:2] == ["request", "decided,"]
    assert [line.split()[0] for line in recent[1:]] == ["second", "first"]
    one = await gorgo_verbs_process(proxy, "explain", "second")
    assert one.exit_code == 0, one.stderr
    lines = one.stdout.splitlines()
    assert lines[0].startswith("second: ")
    assert lines[0].endswith(", the lowest cost of gorgo-ms")
    assert lines[1:3] == ["client -, model m", "weights version 1: m_rtt=1 m_queue=1 lambda=0.15 delta=25 eta=800"]
    assert lines[3].split() == ["candidate", "rtt", "queue", "prefill", "externality", "room", "shared", "cost,", "ms"]
    rows = [line.split() for line in lines[4:6]]
    assert (rows[0][0], {rows[0][1], rows[1][0]}) == ("*", {"left", "right"})
    assert lines[-2].startswith("observed TTFT: ")
    assert lines[-1].startswith("status 200, ")
    unknown = await gorgo_verbs_process(proxy, "explain", "third")
    assert unknown.exit_code == 1
    assert "no stored decision has this request id; the last 1,000 decisions are stored" in unknown.stderr


async def test_reload_says_what_changed_or_why_the_file_is_refused(proxy: Served, tmp_path: Path) -> None:
    assert (await gorgo_verbs_process(proxy, "reload")).stdout == "applied: 2 replicas, nothing changed\n"
    path = tmp_path / "regions.yaml"
    file = json.loads(path.read_text())
    file["replicas"][1] |= {"draining": True}
    path.write_text(json.dumps(file))
    done = await gorgo_verbs_process(proxy, "reload")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == 'applied: 2 replicas\ndrains: {"right": true}\n'
    assert await chosen(proxy, 3) == {"left"}
    path.write_text(json.dumps(file | {"limts": {}}))
    wrong = await gorgo_verbs_process(proxy, "reload")
    assert wrong.exit_code == 1
    assert "unknown key (did you mean 'limits'?)" in wrong.stderr
    assert wrong.stderr.endswith("nothing changed\n")
    assert await chosen(proxy, 3) == {"left"}


# --- Streams before three engines, of which one is killed: real processes, and answers to the last character.


STREAMS = 12
TOKENS = 120


@dataclass
class Read:
    """One answer, as its client read it."""

    text: str = ""
    ids: set[str] = field(default_factory=set)
    finished: int = 0
    done: int = 0
    seams: int = 0
    errors: int = 0
    usage: list[dict[str, Any]] = field(default_factory=list)


def regions_continuation_process(ports: list[int], kind: str) -> str:
    replicas = [
        {"name": f"r{number}", "region": "here", "engine": kind, "url": f"http://127.0.0.1:{port}"}
        for number, port in enumerate(ports)
    ]
    return json.dumps(
        {
            "proxy": {"region": "here", "policy": "round-robin", "probe_interval_s": 1},
            "regions": [{"name": "here"}],
            "simulation": {"rtt_ms": {"here": 1}},
            "replicas": replicas,
        }
    )


@asynccontextmanager
async def engine(config: Path, name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    words = ("engine", "--config", str(config), "--replica", name, "--host", "127.0.0.1", "--port", "0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gorgo", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environ(),
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        url = next(word for word in line.decode().split() if word.startswith("http://"))
        yield process, int(url.rstrip("/,").rpartition(":")[2])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> Read:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"question {number} " * 20}],
        "max_tokens": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    found = Read()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            found.seams += line.startswith(": x-gorgo-continued ")
            if line == "data: [DONE]":
                found.done += 1
            elif line.startswith("data: "):
                _add(found, json.loads(line[6:]))
                if len(found.text) in range(40, 44):
                    begun.release()
    return found


def _add(found: Read, event: dict[str, Any]) -> None:
    found.errors += "error" in event
    if "choices" not in event:
        return
    found.ids.add(event["id"])
    if event.get("usage"):
        found.usage.append(event["usage"])
    for choice in event["choices"]:
        found.text += choice["delta"].get("content") or ""
        found.finished += choice["finish_reason"] is not None


@pytest.mark.system
@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
async def test_a_killed_engine_costs_no_character(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions_continuation_process([1, 2, 3], kind))
    async with engine(config, "r0") as (_, a), engine(config, "r1") as (victim, b), engine(config, "r2") as (_, c):
        config.write_text(regions_continuation_process([a, b, c], kind))
        async with served(tmp_path) as proxy:
            begun = asyncio.Semaphore(0)
            whole = await asyncio.gather(*(ask(proxy.client, number, begun) for number in range(STREAMS)))
            begun = asyncio.Semaphore(0)
            asking = asyncio.gather(*(ask(proxy.client, number, begun) for number in range(STREAMS)))
            for _ in range(STREAMS):
                await asyncio.wait_for(begun.acquire(), 30)
            victim.kill()
            found = await asking
    assert [each.text for each in found] == [each.text for each in whole]
    assert sum(each.seams for each in found) >= STREAMS // 3 - 1
    for before, after in zip(whole, found, strict=True):
        assert (len(after.ids), after.finished, after.done, after.errors, len(after.usage)) == (1, 1, 1, 0, 1)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert after.usage[0][name] == before.usage[0][name]


@pytest.mark.system
async def test_the_openai_client_reads_one_answer_over_a_seam(tmp_path: Path) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions_continuation_process([1, 2], "vllm"))
    async with engine(config, "r0") as (victim, a), engine(config, "r1") as (_, b):
        config.write_text(regions_continuation_process([a, b], "vllm"))
        async with served(tmp_path) as proxy:
            client = AsyncOpenAI(base_url=f"{proxy.client.base_url}/v1", api_key="none", max_retries=0)

            async def read(*, kill: bool) -> tuple[str, set[str], str | None]:
                text, ids, finish = "", set(), None
                messages: list[Any] = [{"role": "user", "content": "a question " * 20}]
                stream = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=TOKENS, stream=True
                )
                async for chunk in stream:
                    ids.add(chunk.id)
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        finish = choice.finish_reason or finish
                    if kill and len(text) == 40:
                        victim.kill()
                return text, ids, finish

            # Round robin: the first and the third are the victim's.
            whole, _, _ = await read(kill=False)
            await read(kill=False)
            text, ids, finish = await read(kill=True)
            await client.close()
    assert (text, len(ids), finish) == (whole, 1, "length")


@pytest.mark.system
@pytest.mark.parametrize("kind", ["llamacpp", "vllm"])
async def test_the_anthropic_client_reads_one_message_over_a_seam(tmp_path: Path, kind: str) -> None:
    config = tmp_path / "regions.yaml"
    config.write_text(regions_continuation_process([1, 2], kind))
    async with engine(config, "r0") as (victim, a), engine(config, "r1") as (_, b):
        config.write_text(regions_continuation_process([a, b], kind))
        async with served(tmp_path) as proxy:
            client = AsyncAnthropic(base_url=str(proxy.client.base_url), api_key="none", max_retries=0)

            async def read(*, kill: bool) -> tuple[list[str], str, str | None, int]:
                kinds: list[str] = []
                text = ""
                said: Any = [{"role": "user", "content": "a question " * 20}]
                async with client.messages.stream(model="m", max_tokens=TOKENS, messages=said) as stream:
                    async for event in stream:
                        kinds.append(event.type)
                        text += event.text if event.type == "text" else ""
                        if kill and event.type == "text" and len(text) == 40:
                            victim.kill()
                    made = await stream.get_final_message()
                assert "".join(getattr(block, "text", "") for block in made.content) == text
                return kinds, text, made.stop_reason, made.usage.output_tokens

            # Round robin: the first and the third are the victim's.
            whole = await read(kill=False)
            await read(kill=False)
            over_a_seam = await read(kill=True)
            metrics = (await proxy.admin.get("/metrics")).text
            await client.close()
    assert whole[2:] == ("max_tokens", TOKENS)
    assert over_a_seam == whole
    counts = [line.split()[-1] for line in metrics.splitlines() if line.startswith("gorgo_streams_continued_total{")]
    assert sum(map(float, counts)) == 1


# --- `gorgo serve --plain` as a process in which httptools and uvloop cannot be imported.


#: What Python runs: `gorgo`, without the two.
WITHOUT = "import sys; sys.modules['httptools'] = sys.modules['uvloop'] = None; from gorgo.cli import main; main()"
REGIONS = """
proxy: {{region: here, policy: round-robin}}
regions: [{{name: here}}]
replicas: [{{name: r0, region: here, url: "{url}", engine: sglang}}]
"""


async def test_plain_serves_answers_and_streams_without_httptools_and_uvloop(tmp_path: Path) -> None:
    chunks = (ROLE, delta("one"), delta("two"), DONE)
    async with running(answer(200, b'{"choices": [{"message": {"content": "hi"}}]}'), stream(*chunks)) as replica:
        (tmp_path / "regions.yaml").write_text(REGIONS.format(url=replica.url))
        async with served(tmp_path, "--plain", program=("-c", WITHOUT)) as proxy:
            whole = await proxy.client.post("/v1/chat/completions", content=chat())
            streamed = await proxy.client.post("/v1/chat/completions", content=chat(stream=True))
            weights = await proxy.weights()
            proxy.process.terminate()
            assert await proxy.process.wait() == 0
    assert (whole.status_code, whole.content) == (200, b'{"choices": [{"message": {"content": "hi"}}]}')
    assert (streamed.status_code, streamed.content) == (200, b"".join(chunks))
    assert whole.headers["x-gorgo-replica"] == "r0"
    assert weights["policy"] == "round-robin"
    assert [seen.body for seen in replica.seen] == [chat(), chat(stream=True)]


def test_without_them_and_without_plain_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "regions.yaml").write_text(REGIONS.format(url="http://127.0.0.1:9"))
    command = (sys.executable, "-c", WITHOUT, "serve", "--config", str(tmp_path / "regions.yaml"))
    found = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2
    assert "httptools" in found.stderr
    assert "gorgo serve --plain" in found.stderr
