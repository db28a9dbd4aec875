from __future__ import annotations

import asyncio
from math import inf
from time import monotonic

import aiohttp
import numpy as np
import pytest

from gorgo.lab.engine_server.replica import Deliveries, StepLoop
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.network import Link, Path
from tests.lab.engine_server.client import post
from tests.lab.engine_server.conftest import QUICK


def request(output_tokens: int = 2) -> EngineRequest:
    return EngineRequest(b"abcd", prompt_tokens=1, output_tokens=output_tokens)


class Listener:
    """Counts what is emitted, and knows when all of it was."""

    def __init__(self, *, expected: int) -> None:
        self.expected = expected
        self.ends_s: list[float] = []
        self.done = asyncio.Event()

    def __call__(self, _: EngineRequest, now: float) -> None:
        self.ends_s.append(now)
        if len(self.ends_s) == self.expected:
            self.done.set()


async def test_a_request_that_arrives_a_moment_ahead_of_its_time_is_not_forgotten() -> None:
    heard = Listener(expected=4)
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), heard)
    now = monotonic()
    steps.submit(request(), now)
    steps.submit(request(), now + 0.02)
    await heard.done.wait()
    assert heard.ends_s[2] == pytest.approx(now + 0.02 + 0.001 + 1e-5)


async def test_steps_follow_each_other_without_drift() -> None:
    heard = Listener(expected=50)
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), heard)
    now = monotonic()
    steps.submit(request(50), now)
    await heard.done.wait()
    assert heard.ends_s[-1] == pytest.approx(now + 0.001 + 1e-5 + 49 * 0.001)


async def test_the_engine_goes_on_when_one_of_its_listeners_fails() -> None:
    heard = Listener(expected=2)

    def emit(served: EngineRequest, now: float) -> None:
        heard(served, now)
        if len(heard.ends_s) == 1:
            raise RuntimeError("a broken stream")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
    steps: StepLoop[EngineRequest] = StepLoop(EngineModel(QUICK), emit)
    steps.submit(request(), monotonic())
    await heard.done.wait()
    assert [str(failure) for failure in failures] == ["a broken stream"]


async def test_the_engine_accounts_in_scheduled_time(engine: aiohttp.ClientSession) -> None:
    answer = await post(engine, "/generate", {"text": "x" * 400, "sampling_params": {"max_new_tokens": 30}})
    assert answer["meta_info"]["e2e_latency"] == pytest.approx(0.001 + 100 / 100_000 + 29 * 0.001)


class Sink:
    """A stream that writes down what arrives."""

    def __init__(self, *, expected: int) -> None:
        self.last_arrival_s = 0.0
        self.expected = expected
        self.pieces: list[bytes] = []
        self.done = asyncio.Event()

    def deliver(self, piece: bytes) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self.expected:
            self.done.set()


async def test_pieces_arrive_after_their_trip_and_in_order() -> None:
    deliveries = Deliveries(Path(Link(rtt_s=0.02, jitter=0.3), np.random.default_rng(0)))
    sinks = [Sink(expected=40) for _ in range(5)]
    sent_s = monotonic()
    for number in range(40):
        for sink in sinks:
            deliveries.send(sink, b"%d" % number, sent_s + number * 0.0005)
    assert not sinks[0].pieces
    await asyncio.gather(*(sink.done.wait() for sink in sinks))
    assert monotonic() - sent_s > 0.01
    assert all(sink.pieces == [b"%d" % number for number in range(40)] for sink in sinks)


async def test_nothing_more_arrives_at_a_stream_that_hangs() -> None:
    deliveries = Deliveries(Path(Link(rtt_s=0.0), np.random.default_rng(0)))
    sink = Sink(expected=1)
    deliveries.send(sink, b"first", monotonic())
    sink.last_arrival_s = inf
    deliveries.send(sink, b"second", monotonic())
    assert sink.pieces == [b"first"]
