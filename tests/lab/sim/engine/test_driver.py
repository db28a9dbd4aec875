"""The engine on the event heap: running ahead equals stepping one by one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest

from gorgo.lab.sim.engine.driver import EngineDriver, SimAttempt
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import Stage
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import RandomTable, TripDelays
from tests.lab.sim.profiles import round_profile

DRAWS = RandomTable(0)


@dataclass
class Traffic:
    """Random requests, aborts, changes of speed and looks, the same for two engines."""

    seed: int
    first_s: dict[str, float] = field(default_factory=dict)
    finish_s: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)

    def run(self, profile: EngineProfile, *, ahead: bool) -> tuple[Engine[SimAttempt], int]:
        rng = np.random.default_rng(self.seed)
        kernel = EventQueue()
        model: Engine[SimAttempt] = make_engine(profile, item_bytes=8, item_tokens=16)
        engine = EngineDriver(kernel, model, first_token=self._first, finished=self._finished, ahead=ahead)
        self._engine = engine
        at_s = 0.0
        for number in range(120):
            at_s += float(rng.exponential(0.15))
            sending = request(rng, number)
            kernel.at(at_s, lambda sending=sending: engine.submit(sending))  # type: ignore[misc]
            chance = rng.random()
            later_s = at_s + float(rng.exponential(0.5))
            if chance < 0.1:
                kernel.at(later_s, lambda sending=sending: engine.abort(sending))  # type: ignore[misc]
            elif chance < 0.15:
                kernel.at(later_s, lambda factor=1 + chance * 10: engine.set_slowdown(factor))  # type: ignore[misc]
            elif chance < 0.3:
                kernel.at(later_s, lambda: engine.model.check())
        kernel.run()
        assert engine.model.idle
        return engine.model, kernel.handled

    def _first(self, sending: SimAttempt, at_s: float) -> None:
        self.first_s[sending.request_id] = at_s

    def _finished(self, sending: SimAttempt, at_s: float) -> None:
        self.finish_s[sending.request_id] = at_s
        pairs = self._engine.gaps(sending)
        assert sum(times for _, times in pairs) == sending.output_tokens - 1, "a gap before each token but the first"
        assert sum(gap_s * times for gap_s, times in pairs) == pytest.approx(at_s - self.first_s[sending.request_id])
        self.gaps[sending.request_id] = sorted(gap_s for gap_s, times in pairs for _ in range(times))


def request(rng: np.random.Generator, number: int) -> SimAttempt:
    tokens = int(rng.integers(1, 400))
    family, shared = int(rng.integers(6)), int(rng.integers(0, 20))
    blocks = [family * 1000 + place if place < shared else number * 100_000 + place for place in range(tokens // 16)]
    return SimAttempt(
        str(number),
        f"{number}/1",
        np.array(blocks, dtype="<u8").tobytes(),
        prompt_tokens=tokens,
        output_tokens=int(rng.integers(1, 120)),
        body_bytes=0,
        trips=TripDelays(DRAWS, number),
    )


def nodes_of(model: Engine[SimAttempt]) -> object:
    """What is cached, by content; of an engine with blocks, how much."""
    if not isinstance(model, EngineModel):
        return model.cache.free_tokens, model.cache.evictable_tokens
    return {(node.edge, node.end, node.locks, bool(node.children)) for node in model.cache.nodes()}


@pytest.mark.parametrize("scheduler", ["sglang", "vllm"])
@pytest.mark.parametrize("seed", range(6))
def test_running_ahead_gives_the_times_and_the_cache_of_stepping_one_by_one(
    seed: int, scheduler: Literal["sglang", "vllm"]
) -> None:
    profile = replace(round_profile(kv_tokens=1500, max_running_requests=5), decode_kv_s=2e-6, scheduler=scheduler)
    ahead, single = Traffic(seed), Traffic(seed)
    model, events = ahead.run(profile, ahead=True)
    other, stepped = single.run(profile, ahead=False)
    assert ahead.first_s.keys() == single.first_s.keys()
    assert ahead.finish_s.keys() == single.finish_s.keys()
    assert len(ahead.finish_s) > 90
    for name, at_s in single.first_s.items():
        assert ahead.first_s[name] == pytest.approx(at_s, abs=1e-9)
    for name, at_s in single.finish_s.items():
        assert ahead.finish_s[name] == pytest.approx(at_s, abs=1e-9)
    assert nodes_of(model) == nodes_of(other)
    assert model.cache.evicted_tokens_total == other.cache.evicted_tokens_total > 0
    mine, theirs = model.totals, other.totals
    assert mine.busy_s == pytest.approx(theirs.busy_s)
    assert mine.prefill_busy_s == pytest.approx(theirs.prefill_busy_s)
    for name in ("requests", "aborted", "prompt_tokens", "cached_tokens", "generated_tokens", "steps", "preemptions"):
        assert getattr(mine, name) == getattr(theirs, name), name
    assert bool(mine.preemptions) == (scheduler == "vllm")
    assert events < stepped / 2


def test_gaps_of_a_run_are_those_of_its_steps_within_ten_microseconds() -> None:
    profile = replace(round_profile(kv_tokens=4000), decode_kv_s=1e-8)
    ahead, single = Traffic(7), Traffic(7)
    ahead.run(profile, ahead=True)
    single.run(profile, ahead=False)
    for name, gaps in single.gaps.items():
        assert ahead.gaps[name] == pytest.approx(gaps, abs=1e-5)


def test_an_onlooker_sees_how_far_a_run_has_come() -> None:
    kernel = EventQueue()
    model: EngineModel[SimAttempt] = EngineModel(round_profile(), item_bytes=8, item_tokens=16)
    engine = EngineDriver(kernel, model, first_token=lambda *_: None, finished=lambda *_: None)
    sending = SimAttempt("0", "0/1", b"", prompt_tokens=100, output_tokens=50, body_bytes=0, trips=TripDelays(DRAWS, 0))
    kernel.at(0.0, lambda: engine.submit(sending))
    kernel.run(until_s=0.12)  # a prefill of 110 ms, and the run has begun
    assert sending.emitted == 1
    kernel.at(0.110 + 21 * 0.021 + 0.001, lambda: None)
    kernel.run(until_s=0.110 + 21 * 0.021 + 0.001)
    assert engine.model.step is not None
    assert (sending.emitted, engine.model.step.iterations) == (22, 1)
    assert engine.model.step.ends_s == pytest.approx(0.110 + 22 * 0.021)
    engine.model.check()
    kernel.run()
    assert sending.stage is Stage.FINISHED
    assert kernel.now == pytest.approx(0.110 + 49 * 0.021)


def test_an_engine_that_is_gone_emits_nothing_more() -> None:
    kernel = EventQueue()
    model: EngineModel[SimAttempt] = EngineModel(round_profile(), item_bytes=8, item_tokens=16)
    engine = EngineDriver(
        kernel, model, first_token=lambda *_: pytest.fail("a token"), finished=lambda *_: pytest.fail("an end")
    )
    sending = SimAttempt("0", "0/1", b"", prompt_tokens=100, output_tokens=5, body_bytes=0, trips=TripDelays(DRAWS, 0))
    kernel.at(0.0, lambda: engine.submit(sending))
    kernel.at(0.05, engine.stop)
    kernel.run()
