"""An operator's verbs against `gorgo serve` as a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, USAGE, chat, delta, stream
from tests.proxy.followed import regions
from tests.proxy.served import TOKEN, Served, served

CHAT = "/v1/chat/completions"


async def gorgo(proxy: Served, *words: str) -> Result:
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
    await gorgo(proxy, "policy", "round-robin")
    done = await gorgo(proxy, "drain", "left")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "left is draining: no new requests, 0 in flight\n"
    assert await chosen(proxy, 4) == {"right"}
    assert json.loads((tmp_path / "state.json").read_text())["draining"] == ["left"]
    undone = await gorgo(proxy, "drain", "left", "--undo")
    assert undone.stdout == "left gets new requests again\n"
    assert await chosen(proxy, 4) == {"left", "right"}
    unknown = await gorgo(proxy, "drain", "lefd")
    assert unknown.exit_code == 1
    assert "answered 404: no replica named 'lefd' (did you mean 'left'?)" in unknown.stderr


async def test_set_changes_the_named_weights_and_a_freeze_refuses_it(proxy: Served) -> None:
    done = await gorgo(proxy, "set", "m_rtt=2", "lambda=0.5", "--reason", "far clients")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "policy gorgo-ms m_rtt=2 m_queue=1 lambda=0.5 delta=25 eta=800, version 2, not frozen\n"
    last = (await proxy.weights())["history"][-1]
    assert (last["by"], last["reason"], last["source"]) == ("tester", "far clients", "admin")
    wrong = await gorgo(proxy, "set", "m_rt=2")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "'m_rt' is unknown to this policy (did you mean 'm_rtt'?)" in wrong.stderr
    far = await gorgo(proxy, "set", "m_rtt=1000")
    assert "expected a number in [" in far.stderr
    await gorgo(proxy, "freeze", "--reason", "release")
    frozen = await gorgo(proxy, "set", "m_rtt=1")
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
    shown = await gorgo(proxy, "policy")
    assert shown.stdout.startswith("policy gorgo-ms m_rtt=1 ")
    assert "\ngorgo-ms: " in shown.stdout
    done = await gorgo(proxy, "policy", "nearest")
    assert done.stdout == "policy nearest, version 2, not frozen\n"
    answer = await proxy.client.post(CHAT, content=chat(stream=True))
    assert answer.headers["x-gorgo-policy"] == "nearest"
    wrong = await gorgo(proxy, "policy", "nearst")
    assert wrong.exit_code == 1
    assert "no policy named 'nearst' (did you mean 'nearest'?); there are: gorgo, gorgo-ms," in wrong.stderr


async def test_explain_lists_recent_requests_and_shows_one_as_a_table(proxy: Served) -> None:
    empty = await gorgo(proxy, "explain")
    assert (empty.exit_code, empty.stdout) == (0, "no request has been routed yet\n")
    for name in ("first", "second"):
        await proxy.client.post(CHAT, content=chat(stream=True), headers={"x-request-id": name})
    recent = (await gorgo(proxy, "explain")).stdout.splitlines()
    assert recent[0].split()[:2] == ["request", "decided,"]
    assert [line.split()[0] for line in recent[1:]] == ["second", "first"]
    one = await gorgo(proxy, "explain", "second")
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
    unknown = await gorgo(proxy, "explain", "third")
    assert unknown.exit_code == 1
    assert "no stored decision has this request id; the last 1,000 decisions are stored" in unknown.stderr


async def test_reload_says_what_changed_or_why_the_file_is_refused(proxy: Served, tmp_path: Path) -> None:
    assert (await gorgo(proxy, "reload")).stdout == "applied: 2 replicas, nothing changed\n"
    path = tmp_path / "regions.yaml"
    file = json.loads(path.read_text())
    file["replicas"][1] |= {"draining": True}
    path.write_text(json.dumps(file))
    done = await gorgo(proxy, "reload")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == 'applied: 2 replicas\ndrains: {"right": true}\n'
    assert await chosen(proxy, 3) == {"left"}
    path.write_text(json.dumps(file | {"limts": {}}))
    wrong = await gorgo(proxy, "reload")
    assert wrong.exit_code == 1
    assert "unknown key (did you mean 'limits'?)" in wrong.stderr
    assert wrong.stderr.endswith("nothing changed\n")
    assert await chosen(proxy, 3) == {"left"}
