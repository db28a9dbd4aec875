"""What the oracle foresees of both kinds of engine against what they do, and the engine on the event heap."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, Literal, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.lab.sim.engine.driver import EngineDriver, SimAttempt
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.prediction import (
    ArrivingRequest,
    PredictedFirstToken,
    PrefixSet,
    idle_ttft_s,
    predict,
    predict_vllm,
)
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import EngineRequest, Stage
from gorgo.lab.sim.engine.vllm import VllmModel
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.network import RandomTable, TripDelays
from tests.lab.sim.fleets import round_profile

# --- What the oracle foresees against what the engine then does.


Arrival = tuple[float, EngineRequest]


Model = TypeVar("Model", EngineModel[EngineRequest], VllmModel[EngineRequest])


class Driven(Generic[Model]):
    """An engine in virtual time with a list of arrivals: steps one by one, or runs of them that arrivals interrupt."""

    def __init__(self, model: Model, arrivals: list[Arrival], *, ahead: bool, slowdown: float) -> None:
        self.model: Model = model
        self.model.slowdown = slowdown
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        self.ahead = ahead

    def run(self, until_s: float) -> None:
        """Everything that happens before `until_s`."""
        while True:
            arrival_s = self.arrivals[0][0] if self.arrivals else inf
            step_s = self.model.step.ends_s if self.model.step else inf
            if min(arrival_s, step_s) >= until_s:
                return
            if arrival_s <= step_s:
                self._arrive(*self.arrivals.pop(0))
            else:
                assert self.model.step is not None
                self.model.finish_step(self.model.step)
                self.model.start_step(now=step_s, ahead=self.ahead)
                self.model.check()

    def add(self, at_s: float, request: EngineRequest) -> None:
        self.arrivals = sorted([*self.arrivals, (at_s, request)], key=lambda arrival: arrival[0])

    def _arrive(self, at_s: float, request: EngineRequest) -> None:
        self.model.split_run(now=at_s)
        self.model.submit(request, now=at_s)
        if self.model.step is None:
            self.model.start_step(now=at_s, ahead=self.ahead)


def a_request(prompt: str, output_tokens: int) -> EngineRequest:
    """What is generated is cached in the end, and is what a later prompt may go on with."""
    output = b"ab" * (output_tokens // 2)
    return EngineRequest(prompt.encode(), prompt_tokens=len(prompt), output_tokens=output_tokens, output_key=output)


#: Few letters, so that prompts share prefixes; long and short ones, so that chunks are cut and shared.
prompts = st.builds(
    lambda head, middle, tail: "s" * head + middle * 30 + tail * 7,
    st.sampled_from([0, 40, 90]),
    st.text("ab", max_size=4),
    st.text("abcd", min_size=1, max_size=6),
)
arrivals = st.lists(st.tuples(st.floats(0.0, 2.0), prompts, st.integers(1, 40)), max_size=14)


def predicted_and_real(
    profile: EngineProfile,
    drawn: list[tuple[float, str, int]],
    prompt: str,
    *,
    now: float,
    away_s: float,
    ahead: bool,
    slowdown: float = 1.0,
) -> tuple[PredictedFirstToken, EngineRequest]:
    """At `now` the engine has what arrived before; the others are on the way, the newcomer `away_s` away."""
    requests = [(at_s, a_request(each, output)) for at_s, each, output in drawn]
    driven = Driven(EngineModel[EngineRequest](profile, item_bytes=1), requests, ahead=ahead, slowdown=slowdown)
    driven.run(now)
    predicted = predict(
        driven.model, driven.arrivals, ArrivingRequest(prompt.encode(), len(prompt), now + away_s), now=now
    )
    arrival = a_request(prompt, 1)
    driven.add(now + away_s, arrival)
    driven.run(inf)
    return predicted, arrival


@settings(max_examples=400, deadline=None)
@given(
    arrivals,
    prompts,
    st.floats(0.001, 2.5),
    st.floats(0.0, 0.5),
    st.booleans(),
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([2, 8]),
    st.sampled_from([(1.0, 1), (0.6, 1), (1.0, 32)]),
    st.sampled_from([None, 3]),
    st.booleans(),
)
def test_first_token_comes_when_it_was_foreseen(
    drawn: list[tuple[float, str, int]],
    prompt: str,
    now: float,
    away_s: float,
    ahead: bool,
    slowdown: float,
    max_running: int,
    found: tuple[float, int],
    graph: int | None,
    caches_output: bool,
) -> None:
    profile = round_profile(
        max_running_requests=max_running,
        prefill_kappa_s=1e-5,
        decode_kv_s=1e-6,
        hit_share=found[0],
        checkpoint_tokens=found[1],
        cuda_graph_max_batch=graph,
        decode_eager_s=0.030,
        caches_output=caches_output,
    )
    predicted, arrival = predicted_and_real(
        profile, drawn, prompt, now=now, away_s=away_s, ahead=ahead, slowdown=slowdown
    )
    assert predicted.first_token_s == pytest.approx(arrival.first_token_s, abs=1e-6)
    assert predicted.cached_tokens == arrival.cached_tokens


@settings(max_examples=150, deadline=None)
@given(arrivals, prompts, st.floats(0.001, 2.5))
def test_a_full_pool_is_foreseen_roughly(drawn: list[tuple[float, str, int]], prompt: str, now: float) -> None:
    """The pool holds two or three requests: each wait for room is off by a few endings at most, never by a line."""
    profile = round_profile(kv_tokens=700)
    predicted, arrival = predicted_and_real(profile, drawn, prompt, now=now, away_s=0.01, ahead=True)
    assert arrival.first_token_s is not None
    real_s = arrival.first_token_s - now
    assert 0.3 * real_s - 0.5 <= predicted.first_token_s - now <= 3 * real_s + 0.5


def test_a_sibling_before_it_in_line_has_its_prefix_cached_by_then() -> None:
    profile = round_profile(chunk_tokens=90)
    predicted, _ = predicted_and_real(
        profile, [(0.0, "x" * 90, 1), (0.05, "s" * 90, 1)], "s" * 90 + "a" * 10, now=0.06, away_s=0.01, ahead=False
    )
    assert predicted.cached_tokens == 90
    # 100 ms for the first, 100 for its sibling, which fills a chunk, 20 for its own ten tokens.
    assert predicted.first_token_s == pytest.approx(0.220)


def test_attention_is_foreseen_as_the_engine_pays_it() -> None:
    """60 tokens, then 40 behind them, at 10 us a pair; meanwhile one decodes that reads 10 us a token of KV.

    The newcomer arrives at 0.2 s, within the iterations of one that has 20 tokens of prompt: first token at 32 ms, then
    21 ms and 10 us for each token of its context. The eighth iteration ends at 0.0320 + 8 x 0.0210 + (21 + ... + 28) x
    10 us = 0.20196 s.
    """
    profile = round_profile(chunk_tokens=60, prefill_kappa_s=1e-5, decode_kv_s=1e-5)
    predicted, arrival = predicted_and_real(profile, [(0.0, "d" * 20, 40)], "n" * 100, now=0.1, away_s=0.1, ahead=True)
    prefill_s = (0.010 + 0.060 + 60 * 30e-5) + (0.010 + 0.040 + 40 * 80e-5)
    assert predicted.first_token_s == pytest.approx(0.032 + 8 * 0.021 + 196e-5 + prefill_s)
    assert arrival.first_token_s == pytest.approx(predicted.first_token_s)
    assert idle_ttft_s(profile, 100, 0) == pytest.approx(0.020 + 0.100 + 100 * 50e-5)
    assert idle_ttft_s(profile, 40, 60) == pytest.approx(0.010 + 0.040 + 40 * 80e-5)


@pytest.mark.parametrize(("tokens", "first_s"), [(19, 0.060 + 0.029), (20, 0.060 + 29 * 0.021 + 0.030)])
def test_a_pool_without_room_is_waited_for(tokens: int, first_s: float) -> None:
    """80 of 100 tokens are set aside for one that runs: 19 and an output fit beside it, 20 do when it has ended."""
    profile = round_profile(kv_tokens=100)
    predicted, arrival = predicted_and_real(
        profile, [(0.0, "r" * 50, 30)], "n" * tokens, now=0.01, away_s=0.01, ahead=True
    )
    assert predicted.first_token_s == pytest.approx(first_s)
    assert arrival.first_token_s == pytest.approx(first_s)


def test_a_cached_prefix_takes_no_room_twice_while_it_is_in_use() -> None:
    """60 of 130 tokens are in use and 10 more are its answer's: 60 are left, of which a sibling needs 40 and 1."""
    profile = round_profile(kv_tokens=130)
    predicted, arrival = predicted_and_real(
        profile, [(0.0, "s" * 60, 10)], "s" * 60 + "n" * 40, now=0.1, away_s=0.0, ahead=True
    )
    assert predicted.cached_tokens == arrival.cached_tokens == 60
    assert predicted.first_token_s == pytest.approx(arrival.first_token_s)


def test_looking_changes_nothing() -> None:
    requests: list[Arrival] = [(0.1 * n, a_request("s" * 50 + "ab"[n % 2] * 60, 20)) for n in range(8)]
    driven = Driven(EngineModel[EngineRequest](round_profile(), item_bytes=1), requests, ahead=True, slowdown=1.0)
    driven.run(0.55)
    model = driven.model
    before = model.step, list(model.waiting), model.batch.context_tokens, len(driven.arrivals)
    arrival = ArrivingRequest(b"s" * 80, 80, 0.6)
    first = predict(model, driven.arrivals, arrival, now=0.55)
    assert predict(model, driven.arrivals, arrival, now=0.55) == first
    assert before == (model.step, list(model.waiting), model.batch.context_tokens, len(driven.arrivals))
    model.check()


def test_a_prefill_alone_takes_what_the_engine_takes() -> None:
    profile = round_profile(chunk_tokens=64)
    rng = np.random.default_rng(5)
    for tokens in rng.integers(1, 500, 20).tolist():
        predicted = predict(
            EngineModel(profile, item_bytes=1), [], ArrivingRequest(b"x" * tokens, tokens, 1.0), now=0.0
        )
        assert predicted.first_token_s - 1.0 == pytest.approx(idle_ttft_s(profile, tokens, 0))


def test_an_answer_that_ends_before_it_is_let_in_is_cached_by_then() -> None:
    """One place in the batch: ten tokens at 21 ms each after a first one at 60 ms, nine of them hittable."""
    profile = round_profile(max_running_requests=1)
    predicted, arrival = predicted_and_real(
        profile, [(0.0, "s" * 50, 10)], "s" * 50 + "ab" * 10, now=0.07, away_s=0.01, ahead=True
    )
    assert predicted.cached_tokens == arrival.cached_tokens == 59
    assert predicted.first_token_s == pytest.approx(0.060 + 9 * 0.021 + 0.010 + 0.011)


WORDS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=10)


def spell(word: str) -> bytes:
    """Each letter is an item of two bytes."""
    return b"".join(b"-" + letter.encode() for letter in word)


@given(words=WORDS, asked=st.text("ab", max_size=8))
def test_as_many_leading_items_are_seen_as_the_longest_prefix_of_any_key_has(words: list[str], asked: str) -> None:
    seen, twin = PrefixSet(item_bytes=2), {""}
    for word in words:
        seen.add(spell(word))
        twin |= {word[:end] for end in range(len(word) + 1)}
    assert seen.items(spell(asked)) == max(end for end in range(len(asked) + 1) if asked[:end] in twin)


# --- What the oracle foresees of a vLLM-like engine against what the engine then does.


PROFILE = replace(
    round_profile(chunk_tokens=50, prefill_kappa_s=1e-5, decode_kv_s=1e-6), scheduler="vllm", block_tokens=4
)


def predicted_and_real_of_vllm(
    profile: EngineProfile,
    drawn: list[tuple[float, str, int]],
    prompt: str,
    *,
    now: float,
    away_s: float,
    ahead: bool,
    slowdown: float = 1.0,
) -> tuple[PredictedFirstToken, EngineRequest]:
    """At `now` the engine has what arrived before; the others are on the way, the newcomer `away_s` away."""
    requests = [(at_s, a_request(each, output)) for at_s, each, output in drawn]
    driven = Driven(VllmModel[EngineRequest](profile, item_bytes=1), requests, ahead=ahead, slowdown=slowdown)
    driven.run(now)
    new = ArrivingRequest(prompt.encode(), len(prompt), now + away_s)
    predicted = predict_vllm(driven.model, driven.arrivals, new, now=now)
    assert predict_vllm(driven.model, driven.arrivals, new, now=now) == predicted, "a look-ahead changes nothing"
    arrival = a_request(prompt, 1)
    driven.add(now + away_s, arrival)
    driven.run(inf)
    return predicted, arrival


@settings(max_examples=300, deadline=None)
@given(
    arrivals,
    prompts,
    st.floats(0.001, 2.5),
    st.floats(0.0, 0.5),
    st.booleans(),
    st.sampled_from([1.0, 3.0]),
    st.sampled_from([2, 8]),
)
def test_first_token_of_vllm_comes_when_it_was_foreseen(
    drawn: list[tuple[float, str, int]],
    prompt: str,
    now: float,
    away_s: float,
    ahead: bool,
    slowdown: float,
    max_running: int,
) -> None:
    profile = replace(PROFILE, max_running_requests=max_running)
    predicted, arrival = predicted_and_real_of_vllm(
        profile, drawn, prompt, now=now, away_s=away_s, ahead=ahead, slowdown=slowdown
    )
    assert predicted.first_token_s == pytest.approx(arrival.first_token_s, abs=1e-6)
    assert predicted.cached_tokens == arrival.cached_tokens


@settings(max_examples=100, deadline=None)
@given(arrivals, prompts, st.floats(0.001, 2.5))
def test_a_full_pool_of_vllm_is_foreseen_roughly(drawn: list[tuple[float, str, int]], prompt: str, now: float) -> None:
    profile = replace(PROFILE, kv_tokens=700)
    predicted, arrival = predicted_and_real_of_vllm(profile, drawn, prompt, now=now, away_s=0.01, ahead=True)
    assert arrival.first_token_s is not None
    real_s = arrival.first_token_s - now
    assert 0.3 * real_s - 0.5 <= predicted.first_token_s - now <= 3 * real_s + 0.5


# --- The engine on the event heap: running ahead equals stepping one by one.


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
