"""The wanted replicas of a running router, and the warming of a replica that serves anew."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.load import parse_config
from gorgo.config.model import ScalingConfig
from gorgo.errors import ConfigError
from gorgo.live.monitor.fleet_monitor import warm_replica
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.scaling import CHAT, COUNTED, MOST_BODY_BYTES, HotPrompts, ScalingService, shared_prompt
from tests.proxy.conftest import TOKEN, Running, Start, config_for, until
from tests.proxy.fakes import DONE, delta, hang, reset_after, stream


@pytest.fixture(autouse=True)
def no_second_passes_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.scaling.JOIN_INTERVAL_S", 0.01)


AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}
SYSTEM = {"role": "system", "content": "You are the assistant of a bank. " * 40}


def chat(question: str, system: Any = SYSTEM, **more: Any) -> bytes:
    return json.dumps({"messages": [system, {"role": "user", "content": question}], **more}).encode()


async def started(start: Start, scaling: ScalingConfig, *, replicas: int = 1) -> Running:
    fakes = [await start.replica(stream(delta("hi"))) for _ in range(replicas)]
    return await start.proxy(replace(config_for(fakes), scaling=scaling), fakes)


async def test_metrics_status_and_page_say_the_wanted_replicas(start: Start) -> None:
    proxy = await started(start, ScalingConfig(ttft_ms=2000.0, max_replicas=8), replicas=2)
    assert "gorgo_replicas_wanted{" not in (await proxy.client.get("/metrics")).text, "no decision yet"
    proxy.state.routing.scaling.decide()
    assert 'gorgo_replicas_wanted{model="none",region="here"} 2.0' in (await proxy.client.get("/metrics")).text
    status = (await proxy.admin.get("/admin/status", headers=AUTHORIZED)).json()
    (row,) = status["scaling"]
    assert (row["region"], row["model"], row["wanted"], row["replicas"]) == ("here", None, 2, 2)


async def test_without_an_objective_no_number_is_said_and_no_prompt_retained(start: Start) -> None:
    proxy = await started(start, ScalingConfig())
    proxy.state.routing.scaling.decide()
    assert "gorgo_replicas_wanted{" not in (await proxy.client.get("/metrics")).text
    assert (await proxy.admin.get("/admin/status", headers=AUTHORIZED)).json()["scaling"] == []
    assert proxy.state.routing.scaling.hot_prompts is None


async def test_decisions_come_by_themselves_some_in_each_start_up(start: Start) -> None:
    proxy = await started(start, ScalingConfig(ttft_ms=2000.0, startup_s=0.08))
    await until(lambda: bool(proxy.state.routing.scaling.wanted()))


def has_hot_prompts(scaling: ScalingService) -> bool:
    return scaling.hot_prompts is not None


async def test_a_reload_sets_replaces_and_ends_it(start: Start) -> None:
    scaling = (await started(start, ScalingConfig())).state.routing.scaling
    scaling.set_scaling(ScalingConfig(ttft_ms=2000.0, min_replicas=3, warm_prompts=2))
    scaling.decide()
    assert [one.wanted for one in scaling.wanted()] == [3]
    assert has_hot_prompts(scaling)
    scaling.set_scaling(ScalingConfig(ttft_ms=2000.0, min_replicas=5, max_replicas=9))
    scaling.decide()
    assert [one.wanted for one in scaling.wanted()] == [5]
    assert not has_hot_prompts(scaling)
    scaling.set_scaling(ScalingConfig())
    assert scaling.wanted() == ()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("{min_replicas: 4, max_replicas: 2}", "max_replicas of at least min_replicas"),
        ("{share: 1.0}", "scaling.share"),
        ("{warm_prompts: 65}", "scaling.warm_prompts"),
    ],
)
def test_a_wrong_section_is_refused_with_its_place(section: str, words: str) -> None:
    replicas = "replicas: [{name: r, region: a, url: 'http://a:1'}]"
    text = f"proxy: {{region: a}}\nregions: [{{name: a}}]\n{replicas}\nscaling: {section}\n"
    with pytest.raises(ConfigError, match="scaling") as refused:
        parse_config(text.encode(), environ={})
    assert words in str(refused.value)


# --- Warming.


async def test_a_replica_that_serves_anew_is_sent_what_chats_share_with_one_token(start: Start) -> None:
    proxy = await started(start, ScalingConfig(warm_prompts=1))
    replica, scaling = proxy.replicas[0], proxy.state.routing.scaling
    for question in ("What is my balance?", "Where is my card?"):
        await proxy.client.post(CHAT, content=chat(question, temperature=0.5))
    await proxy.idle()
    before = len(replica.seen)
    assert scaling.hot_prompts is not None
    await warm_replica(proxy.state, "r0", scaling.hot_prompts.hottest())
    (warmed,) = replica.seen[before:]
    sent = json.loads(warmed.body)
    assert sent == {"messages": [SYSTEM, {"role": "user", "content": "."}], "max_tokens": 1, "stream": False}
    assert proxy.state.routing.router.in_flight == 0, "it is no request of a client"


async def test_a_replica_is_warmed_when_it_answers_again_and_not_at_the_start(start: Start) -> None:
    proxy = await started(start, ScalingConfig(warm_prompts=1, startup_s=60.0), replicas=2)
    router, now = proxy.state.routing.router, proxy.state.routing.clock
    await until(lambda: proxy.state.routing.scaling._healthy is not None)
    for question in ("What is my balance?", "Where is my card?"):
        await proxy.client.post(CHAT, content=chat(question))
    await proxy.idle()
    before = len(proxy.replicas[1].seen)
    for _ in range(3):
        router.replicas.on_probe("r1", None, now=now())
    await until(lambda: proxy.state.routing.scaling._healthy == frozenset({"r0"}))
    router.replicas.on_probe("r1", 0.001, now=now())
    router.replicas.on_probe("r1", 0.001, now=now())
    await until(lambda: len(proxy.replicas[1].seen) > before)
    assert json.loads(proxy.replicas[1].seen[-1].body)["max_tokens"] == 1


async def test_requests_go_to_others_until_a_replica_is_warmed_and_its_prompt_is_known_then(start: Start) -> None:
    """Fault: the first requests of a new replica waited behind its prompts, and none was sent there for their sake."""
    fakes = [await start.replica(stream(delta("hi"), DONE)), await start.replica(hang(rest=[delta("hi"), DONE]))]
    proxy = await start.proxy(replace(config_for(fakes), scaling=ScalingConfig(warm_prompts=1)), fakes)
    routing, long = proxy.state.routing, {"role": "system", "content": SYSTEM["content"] * 10}
    prompt = shared_prompt(chat("Why?", long), chat("How?", long))
    warming = asyncio.create_task(warm_replica(proxy.state, "r1", [(None, prompt)]))
    await until(lambda: len(fakes[1].seen) == 1)
    for number in range(4):
        await proxy.client.post(CHAT, content=chat("?", {"role": "system", "content": f"Nothing in common: {number}"}))
    assert (len(fakes[0].seen), len(fakes[1].seen)) == (4, 1)
    fakes[1].release.set()
    await warming
    sketch = read_fields(CHAT, chat("What is my balance?", long), routing.fingerprinter).sketch
    matched = routing.router.index.match(routing.fingerprinter.hash_sketch(sketch).blocks, 2)
    assert matched[0] == 0 < matched[1]
    await proxy.client.post(CHAT, content=chat("?"))
    await proxy.client.post(CHAT, content=chat("?"))
    assert len(fakes[1].seen) > 1, "in turn again"


async def test_a_replica_that_fails_while_it_is_warmed_is_sent_no_more(start: Start) -> None:
    fake = await start.replica(reset_after())
    proxy = await start.proxy(replace(config_for([fake]), scaling=ScalingConfig(warm_prompts=4)), [fake])
    await warm_replica(proxy.state, "r0", [(None, b"{}")] * 4)
    assert len(fake.seen) <= 2, "the first one, and its retry on a new connection"
    await warm_replica(proxy.state, "gone", [(None, b"{}")])


def test_no_text_is_retained_behind_what_two_requests_share() -> None:
    hot = HotPrompts(4)
    for secret in ("my account is 1234", "my account is 5678"):
        hot.add(CHAT, None, 1, chat(secret))
    retained = b"".join(head.body + head.prompt for head in hot._heads.values())
    assert b"account is" not in retained
    assert SYSTEM["content"].encode() in retained


def test_bodies_that_are_long_or_no_chats_are_not_retained() -> None:
    hot = HotPrompts(1)
    hot.add(CHAT, None, 1, b"x" * (MOST_BODY_BYTES + 1))
    hot.add("/v1/completions", None, 1, b"{}")
    assert not hot._heads


@pytest.mark.parametrize(
    "second", [b"no json", b"[]", b'{"messages": 3}', chat("a", {"role": "system", "content": "B"})]
)
def test_bodies_that_share_no_message_warm_nothing(second: bytes) -> None:
    assert shared_prompt(chat("a"), second) == b""


def test_tools_are_a_part_of_the_beginning_and_other_tools_are_another_one() -> None:
    assert json.loads(shared_prompt(chat("a", tools=[1]), chat("b", tools=[1])))["tools"] == [1]
    assert shared_prompt(chat("a", tools=[1]), chat("b", tools=[2])) == b""
    assert shared_prompt(chat("a", tools=[1]), chat("b")) == b""


def test_the_hottest_are_found_among_many_and_the_bounds_hold() -> None:
    rng, hot = random.Random(3), HotPrompts(3)
    for number in range(4000):
        head = rng.randrange(3) if rng.random() < 0.5 else 10 + rng.randrange(1000)
        hot.add(
            CHAT, "m", head, chat(f"{number}" + "x" * rng.randrange(20_000), {"role": "system", "content": f"{head}"})
        )
        if number % 100 == 0:
            hot.check()
    assert len(hot._heads) <= COUNTED * 3
    assert {json.loads(prompt)["messages"][0]["content"] for _, prompt in hot.hottest()} == {"0", "1", "2"}
