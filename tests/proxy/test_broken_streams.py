"""Answers of three engines on real sockets that break off anywhere: the client reads the uncut one, or an error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, OverloadConfig, RegionConfig
from gorgo.core.fleet.replica import OutlierDetector
from tests.proxy.breaking import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PROMPT_TOKENS,
    Break,
    Engine,
    Manner,
    Read,
    Said,
    breaking,
    pieces_of,
    read,
    request,
)
from tests.proxy.conftest import QUIET, Running, Start

ROUTES = {
    "vllm": (CHAT, COMPLETIONS, MESSAGES),
    "sglang": (CHAT, COMPLETIONS, GENERATE, MESSAGES),
    "llamacpp": (CHAT, COMPLETIONS, MESSAGES),
}
KINDS = [(kind, route) for kind, routes in ROUTES.items() for route in routes]
WAYS = ("reset", "close", "error", "abort", "eof")
SEED = 3
#: Bytes from one place to the next.
STEP = int(os.environ.get("GORGO_BREAK_STEP", "29"))


@dataclass
class Bench:
    """Three engines that send in one manner, and a proxy before them."""

    running: Running
    engines: list[Engine]
    manner: Manner

    async def ask(self, route: str, body: dict[str, Any], *breaks: Break) -> Read:
        """Ask, and let the first attempts break off, wherever they are made."""
        left = list(breaks)
        for target in self.running.state.replicas.targets.values():
            target.cut_ends = 0  # as whole answers in between would have it
        for engine in self.engines:
            engine.breaks = left
        response = await self.running.client.post(route, json=body)
        assert response.status_code == 200
        found = read(route, response.content)
        left.clear()
        return found


@pytest.fixture(autouse=True)
def replicas_stay_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of answers in a row break off here, which ejects a replica elsewhere."""
    for name in ("answer_broken", "attempt_failed"):
        monkeypatch.setattr(OutlierDetector, name, lambda *_, **__: None)
    # On a busy machine the engines are late to count, and the counts are compared.
    monkeypatch.setattr("gorgo.proxy.exchange.answer.TOKENIZE_TIMEOUT_S", 20.0)


@asynccontextmanager
async def bench(start: Start, kind: str, manner: Manner | None = None) -> AsyncIterator[Bench]:
    manner = manner or Manner()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(breaking(manner)) for _ in range(3)]
        rows = tuple(
            ReplicaConfig(name=f"r{n}", region="here", url=each.url, engine=kind) for n, each in enumerate(engines)
        )
        limits = LimitsConfig(shutdown_grace_s=5.0, continuations=4)
        config = Config(proxy=QUIET, regions=(RegionConfig(name="here"),), replicas=rows, limits=limits)
        running = await start.proxy(replace(config, overload=OverloadConfig(retry_budget_ratio=1.0)), [])
        yield Bench(running, engines, manner)
        await running.idle()


def counts(route: str) -> dict[str, Any]:
    """Ask for counts, where they have to be asked for."""
    return {"stream_options": {"include_usage": True}} if route in (CHAT, COMPLETIONS) else {"max_tokens": 1000}


def events_size(route: str, body: dict[str, Any], manner: Manner) -> int:
    return sum(map(len, Said(route, body, manner, "0" * 20).events()))


def assert_same(found: Read, whole: Read, place: object, *, slack: int = 0) -> None:
    assert found.is_whole, (place, found)
    assert found.text.encode("utf-16", "surrogatepass") == whole.text.encode("utf-16", "surrogatepass"), place
    assert (found.reasons, len(found.ids), found.roles, found.calls) == (whole.reasons, 1, whole.roles, whole.calls), (
        place
    )
    assert len(found.counts) == len(whole.counts), (place, found.counts, whole.counts)
    for mine, theirs in zip(found.counts[-1:], whole.counts[-1:], strict=True):
        assert all(abs(one - other) <= slack for one, other in zip(mine, theirs, strict=True)), (place, mine, theirs)


@pytest.mark.parametrize(("kind", "route"), KINDS)
async def test_an_answer_that_is_cut_at_any_byte_is_the_uncut_one(start: Start, kind: str, route: str) -> None:
    body = request(route, SEED, 6, **counts(route))
    async with bench(start, kind) as made:
        whole = await made.ask(route, body)
        assert whole.is_whole
        assert whole.counts == [(PROMPT_TOKENS, 7)]
        assert whole.text == "".join(pieces_of(SEED, 6))
        first = events_size(route, request(route, SEED, 0), made.manner) // 3
        for place in range(first, events_size(route, body, made.manner) + 1, STEP):
            found = await made.ask(route, body, Break(place, ("reset", "close")[place % 2]))
            assert_same(found, whole, place)


def a_manner(rng: random.Random, kind: str) -> Manner:
    manner = Manner(
        pieces_per_event=rng.choice((1, 1, 2, 3)),
        line_end=rng.choice((b"\n", b"\n", b"\r\n")),
        write_bytes=rng.choice((0, 0, 1, 7, 100)),
        comments=rng.random() < 0.3,
    )
    return replace(manner, counts_tokens=manner.pieces_per_event > 1 or rng.random() < 0.5)


def a_request(rng: random.Random, route: str) -> tuple[dict[str, Any], int]:
    """Return a request, and by how many tokens its counts may differ: those of a stop string are not sent."""
    count = rng.randrange(4, 14)
    more: dict[str, Any] = {"max_tokens": 1000} if route == MESSAGES else {}
    seed = rng.randrange(1000)
    text = "".join(pieces_of(seed, count))
    begin = rng.randrange(len(text) // 2, len(text))
    stop = text[begin : begin + rng.randrange(1, 6)] if rng.random() < 0.3 else None
    most = rng.randrange(2, 16) if stop is None and rng.random() < 0.7 else None
    if route == GENERATE:
        more["sampling_params"] = {"max_new_tokens": most or 1000, **({"stop": [stop]} if stop else {})}
    else:
        more |= {"max_tokens": most} if most else {}
        more |= {"stop_sequences" if route == MESSAGES else "stop": [stop]} if stop else {}
    if route in (CHAT, COMPLETIONS) and rng.random() < 0.8:
        more["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}
    return request(route, seed, count, **more), 6 if stop else 0


ROUNDS = int(os.environ.get("GORGO_BREAK_ROUNDS", "2"))


@pytest.mark.parametrize(("kind", "route"), KINDS)
async def test_an_answer_that_breaks_off_at_random_is_the_uncut_one(start: Start, kind: str, route: str) -> None:
    """Once or twice, in each manner of engines, with bounds of length, stop strings and counts."""
    for seed in range(SEED, SEED + ROUNDS):
        rng = random.Random(f"{kind} {route} {seed}")
        manner = a_manner(rng, kind)
        async with bench(start, kind, manner) as made:
            for number in range(8):
                body, slack = a_request(rng, route)
                whole = await made.ask(route, body)
                assert whole.is_whole, (seed, number, whole)
                size = events_size(route, body, manner)
                first = events_size(route, {**body, "max_tokens": 1, "sampling_params": {"max_new_tokens": 1}}, manner)
                breaks = []
                for _ in range(rng.randrange(1, 3)):
                    how = rng.choice(WAYS)
                    most = size - 200 if how == "eof" else size
                    breaks.append(Break(rng.randrange(min(first // 2, most), most + 1), how))
                found = await made.ask(route, body, *breaks)
                assert_same(found, whole, (seed, number, manner, body, breaks), slack=slack)


def assert_a_part(found: Read, whole: Read, place: object) -> None:
    """Check that an answer is the uncut one, maybe without counts, or a beginning of it with one error behind."""
    if not found.errors:
        assert_same(found, whole if found.counts else replace(whole, counts=[]), place)
        return
    assert (found.errors, found.reasons, found.counts) == (1, [], []), place
    for name in ("text", "calls", "thoughts"):
        assert getattr(whole, name).startswith(getattr(found, name)), place


@pytest.mark.parametrize("kind", ["vllm", "llamacpp"])
async def test_an_answer_with_a_thought_or_a_call_is_whole_or_ends_with_an_error(start: Start, kind: str) -> None:
    """Before the call has begun the answer goes on, and in it and behind a thought it does not."""
    whole_ones = 0
    for manner in (Manner(thinks=3), Manner(calls_tool=True)):
        body = request(CHAT, SEED, 5, tools=[{"type": "function", "function": {"name": "f"}}], **counts(CHAT))
        async with bench(start, kind, manner) as made:
            whole = await made.ask(CHAT, body)
            assert (whole.thoughts != "", whole.calls != "") == (manner.thinks > 0, manner.calls_tool)
            first = events_size(CHAT, request(CHAT, SEED, 0), manner) // 3
            for place in range(first, events_size(CHAT, body, manner), 4 * STEP):
                found = await made.ask(CHAT, body, Break(place))
                assert_a_part(found, whole, (manner, place))
                whole_ones += found.is_whole
                begun = manner.thinks or found.calls
                assert found.is_whole or begun, (manner, place)
    assert whole_ones > 0


@pytest.mark.parametrize(("kind", "route"), KINDS)
async def test_an_answer_in_one_piece_is_whole_wherever_it_breaks_off(start: Start, kind: str, route: str) -> None:
    body = {**request(route, SEED, 30, max_tokens=1000), "stream": False}
    async with bench(start, kind) as made:
        whole = (await made.running.client.post(route, json=body)).content
        for place in range(0, len(whole), 20 * STEP):
            left = [Break(place, "close")]
            for engine in made.engines:
                engine.breaks = left
            response = await made.running.client.post(route, json=body)
            assert response.status_code == 200
            found, expected = response.json(), json.loads(whole)
            for each in (found, expected):
                each.pop("id", None)
                each.get("meta_info", {}).pop("id", None)
            assert found == expected, place
