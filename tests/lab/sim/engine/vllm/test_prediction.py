"""What the oracle foresees of a vLLM-like engine against what the engine then does."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.lab.sim.engine.prediction import ArrivingRequest, PredictedFirstToken
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm.model import VllmModel
from gorgo.lab.sim.engine.vllm.prediction import predict_vllm
from tests.lab.sim.profiles import round_profile

Arrival = tuple[float, EngineRequest]
PROFILE = replace(
    round_profile(chunk_tokens=50, prefill_kappa_s=1e-5, decode_kv_s=1e-6), scheduler="vllm", block_tokens=4
)


class Driven:
    """An engine in virtual time with a list of arrivals: steps one by one, or runs of them that arrivals interrupt."""

    def __init__(self, profile: EngineProfile, arrivals: list[Arrival], *, ahead: bool, slowdown: float = 1.0) -> None:
        self.model: VllmModel[EngineRequest] = VllmModel(profile, item_bytes=1)
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
    output = b"ab" * (output_tokens // 2)
    return EngineRequest(prompt.encode(), prompt_tokens=len(prompt), output_tokens=output_tokens, output_key=output)


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
    driven = Driven(profile, requests, ahead=ahead, slowdown=slowdown)
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
def test_first_token_comes_when_it_was_foreseen(
    drawn: list[tuple[float, str, int]],
    prompt: str,
    now: float,
    away_s: float,
    ahead: bool,
    slowdown: float,
    max_running: int,
) -> None:
    profile = replace(PROFILE, max_running_requests=max_running)
    predicted, arrival = predicted_and_real(
        profile, drawn, prompt, now=now, away_s=away_s, ahead=ahead, slowdown=slowdown
    )
    assert predicted.first_token_s == pytest.approx(arrival.first_token_s, abs=1e-6)
    assert predicted.cached_tokens == arrival.cached_tokens


@settings(max_examples=100, deadline=None)
@given(arrivals, prompts, st.floats(0.001, 2.5))
def test_a_full_pool_is_foreseen_roughly(drawn: list[tuple[float, str, int]], prompt: str, now: float) -> None:
    profile = replace(PROFILE, kv_tokens=700)
    predicted, arrival = predicted_and_real(profile, drawn, prompt, now=now, away_s=0.01, ahead=True)
    assert arrival.first_token_s is not None
    real_s = arrival.first_token_s - now
    assert 0.3 * real_s - 0.5 <= predicted.first_token_s - now <= 3 * real_s + 0.5
