"""Random faults and departures, by seed: every answer is one replica's or an error, and nothing stays reserved."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from aiohttp import web

from tests.proxy.conftest import QUIET, Start, until
from tests.proxy.fakes import DONE, ROLE, Script, chat, delta, event
from tests.proxy.raw import connected

CHAT = "/v1/chat/completions"
REQUESTS = 80
FAULTS = ("none", "none", "500", "429", "400", "reset", "reset-role", "reset-middle", "error", "close-role", "hang")


def faulty(name: str, rng: random.Random) -> Script:
    """A replica that answers with its own name in every token, or fails in a random way."""

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        fault = rng.choice(FAULTS)
        if fault.isdigit():
            return web.Response(status=int(fault), body=b'{"error":{"message":"no"}}')
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        assert request.transport is not None
        if fault == "reset":
            request.transport.abort()
            return response
        await response.prepare(request)
        if fault == "error":
            await response.write(event({"error": {"message": "no", "code": 500}}))
            return response
        await response.write(ROLE)
        if fault == "reset-role":
            request.transport.abort()
        if fault == "hang":
            await asyncio.get_running_loop().create_future()
        if fault in ("reset-role", "close-role"):
            return response
        for n in range(rng.randrange(1, 30)):
            await response.write(delta(f"<{name}>"))
            if fault == "reset-middle" and n == 3:
                request.transport.abort()
                return response
        await response.write(DONE)
        return response

    return script


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_is_one_replicas_or_an_error(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    fleet = await start.fleet(
        *([faulty(f"r{n}", random.Random(seed * 10 + n))] for n in range(3)),
        proxy=replace(QUIET, policy="random"),
        first_token_timeout_s=0.3,
        max_attempts=3,
        continuations=0,
    )

    async def one(number: int) -> None:
        departure = rng.choice([None, None, None, 0, 3, 40])
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, chat(stream=True), "connection: close")
            if departure is not None:
                for _ in range(departure):
                    await asyncio.sleep(0)
                client.reset()
                return
            check(await client.rest())

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    await until(lambda: fleet.state.routing.router.in_flight == 0)
    await fleet.idle()
    samples = list(fleet.state.routing.router.samples)
    assert len({sample.request_id for sample in samples}) == len(samples)


def check(answer: bytes) -> None:
    """Complete by the rules of HTTP, and from one replica only."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    if status != 200:
        # 500 is the engine's own answer, where each replica that was tried gave it.
        assert status in (400, 429, 500, 502, 503, 504)
        assert b'"error"' in body
        return
    assert body.endswith(b"0\r\n\r\n")
    named = {name for name in (b"<r0>", b"<r1>", b"<r2>") if name in body}
    assert len(named) == 1
    assert b"x-gorgo-replica: " + named.pop().strip(b"<>") in head.lower()
    assert (DONE in body) != (b"upstream_failed" in body)
