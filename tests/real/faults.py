"""What must hold when a real engine dies: many streams at once through a router, how each ended, and what is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from gorgo.lab.prompt_text import prompt_text
from tests.real.served import Served, eventually_so

#: Longer than any of these streams takes on a busy machine: beyond it something hangs.
_PATIENCE_S = 240.0
EMPTY_LEDGER = {"in_flight_requests": 0, "in_flight_tokens": 0, "queued_prefill_tokens": 0}


def chat(number: int, *, max_tokens: int) -> dict[str, Any]:
    """A stream of a certain length, for a prompt that no other has."""
    text = prompt_text([], 60, rest=f"fault {number}").decode().rstrip()
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
    return body | {"temperature": 0, "ignore_eos": True, "stream": True}


@dataclass(slots=True)
class Asked:
    """One stream, and what came of it."""

    number: int
    status: int = 0
    replica: str = ""
    body: bytes = b""
    #: Set by the first content.
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def events(self) -> list[Any]:
        """What its events say. One that is not whole is no JSON, and an error here."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line[6:]) for line in lines if line != b"data: [DONE]"]

    @property
    def words(self) -> int:
        chosen = [event["choices"][0] for event in self.events if event.get("choices")]
        return sum(bool(choice["delta"].get("content")) for choice in chosen)

    @property
    def is_complete(self) -> bool:
        """As long as was asked for, with its end, once."""
        reasons = [event["choices"][0].get("finish_reason") for event in self.events if event.get("choices")]
        ended = [reason for reason in reasons if reason] == ["length"] and self.body.count(b"data: [DONE]") == 1
        return self.status == 200 and ended and b'"error"' not in self.body

    @property
    def is_cut_visibly(self) -> bool:
        """Its last event is the one error, in OpenAI's shape, and nothing comes after it."""
        *before, last = self.events
        fault = last.get("error", {})
        named = set(fault) == {"message", "type", "param", "code"} and fault["code"] == "upstream_failed"
        return named and b"[DONE]" not in self.body and not any("error" in event for event in before)


async def ask(http: httpx.AsyncClient, asked: Asked, body: dict[str, Any]) -> Asked:
    """One stream from its request to its end."""
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        asked.status, asked.replica = answer.status_code, answer.headers.get("x-gorgo-replica", "")
        async for chunk in answer.aiter_raw():
            asked.body += chunk
            if b'"content":"' in asked.body and not asked.begun.is_set():
                asked.begun.set()
    return asked


async def ask_many(url: str, bodies: list[dict[str, Any]], *, begun: int, then: Callable[[], None]) -> list[Asked]:
    """All at once. When `begun` of them have content, `then` happens; answers them when each has ended, once."""
    all_asked = [Asked(number) for number in range(len(bodies))]
    limits = httpx.Limits(max_connections=len(bodies))
    async with (
        httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits) as http,
        asyncio.timeout(_PATIENCE_S),
        asyncio.TaskGroup() as tasks,
    ):
        for asked, body in zip(all_asked, bodies, strict=True):
            tasks.create_task(ask(http, asked, body))
        while sum(asked.begun.is_set() for asked in all_asked) < begun:
            await asyncio.sleep(0.005)
        then()
    return all_asked


async def state_of(proxy: Served, name: str) -> str:
    return next(str(row["state"]) for row in await proxy.fleet() if row["name"] == name)


@dataclass(frozen=True, slots=True)
class Death:
    """Of the replica `victim` beside `other`, both of which serve `slots` streams at once.

    `kill` ends it as `kill -9` does, and `restart` brings it back where it was. `continues`: what it had begun to
    answer goes on at the other one.
    """

    slots: int
    words: int
    kill: Callable[[], None]
    restart: Callable[[], Awaitable[None]]
    continues: bool = True


async def survive(proxy: Served, death: Death) -> None:
    """Twice as many streams as there is room for, at round robin, when the victim dies; then life goes on without it,
    and with it when it is back.
    """
    bodies = [chat(number, max_tokens=death.words) for number in range(4 * death.slots)]
    asked = await ask_many(proxy.url, bodies, begun=2 * death.slots, then=death.kill)
    cut = [one for one in asked if not one.is_complete]
    if death.continues:
        assert [one.number for one in cut] == []
        assert 1 <= sum(b": x-gorgo-continued other" in one.body for one in asked) <= death.slots
    else:
        assert [one.number for one in cut if one.replica != "victim" or not one.is_cut_visibly] == []
        assert 1 <= len(cut) <= death.slots, "those that waited there without content were asked elsewhere"
    assert await proxy.ledger() == EMPTY_LEDGER
    assert len(await proxy.samples()) == len(bodies)
    await eventually_so(lambda: state_of(proxy, "victim"), "ejected", "half_open")
    assert await served_by(proxy, first=100) == {"other"}
    await death.restart()
    await eventually_so(lambda: state_of(proxy, "victim"), "healthy", within_s=90.0)
    assert await served_by(proxy, first=200) == {"other", "victim"}
    assert await proxy.ledger() == EMPTY_LEDGER


async def served_by(proxy: Served, *, first: int) -> set[str]:
    """Who answers a few short streams, all of which have to be complete."""
    bodies = [chat(number, max_tokens=4) for number in range(first, first + 6)]
    asked = await ask_many(proxy.url, bodies, begun=0, then=lambda: None)
    assert [one.number for one in asked if not one.is_complete] == []
    return {one.replica for one in asked}
