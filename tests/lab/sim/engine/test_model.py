"""The model of an engine: steps, batches, and gaps between tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.errors import BadRequest
from gorgo.lab.sim.engine.itl import DecodeTimeline, ItlHistogram, p95_s
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.request import EngineRequest, Stage, Step, run_duration_s
from tests.lab.sim.fleets import round_profile

Model = EngineModel[EngineRequest]


def request(prompt: str, output_tokens: int, output: str = "") -> EngineRequest:
    """One letter is one token here."""
    return EngineRequest(
        prompt.encode(), prompt_tokens=len(prompt), output_tokens=output_tokens, output_key=output.encode()
    )


def engine(
    *,
    kv_tokens: int = 10_000,
    chunk_tokens: int = 100,
    max_running_requests: int = 8,
    context_tokens: int = 4_000,
    hit_share: float = 1.0,
    checkpoint_tokens: int = 1,
) -> Model:
    profile = round_profile(
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        max_running_requests=max_running_requests,
        context_tokens=context_tokens,
        hit_share=hit_share,
        checkpoint_tokens=checkpoint_tokens,
    )
    return EngineModel(profile, item_bytes=1)


def run(model: Model, now: float = 0.0) -> Iterator[tuple[Step[EngineRequest], list[EngineRequest]]]:
    """Step until there is nothing left to do."""
    while (step := model.start_step(now=now)) is not None:
        now = step.ends_s
        yield step, model.finish_step(step)
        model.check()


def end(model: Model, now: float = 0.0) -> float:
    """Run to the end, say when that is."""
    for step, _ in run(model, now):
        now = step.ends_s
    return now


def test_steps_of_three_requests_are_as_computed_by_hand() -> None:
    model = engine()
    first, second, third = request("a" * 60, 3), request("b" * 80, 2), request("a" * 60 + "c" * 10, 1)
    model.submit(first, now=0.0)
    seen = []

    def step(now: float) -> float:
        started = model.start_step(now=now)
        assert started is not None
        emitted = model.finish_step(started)
        seen.append((round(started.ends_s, 6), started.chunks, [each.emitted for each in emitted]))
        return started.ends_s

    now = step(0.0)  # 10 + 60 ms: the first alone
    model.submit(second, now=0.050)
    model.submit(third, now=0.060)
    now = step(now)  # 10 + 90 ms: 80 of the second, 10 of the third behind 60 cached
    now = step(now)  # 20 + 2 ms: the first and the second; the third was over with its first token
    now = step(now)  # 20 + 1 ms: the first
    assert model.start_step(now=now) is None
    assert seen == [
        (0.070, (60,), [1]),
        (0.170, (80, 10), [1, 1]),
        (0.192, (), [2, 2]),
        (0.213, (), [3]),
    ]
    assert [each.cached_tokens for each in (first, second, third)] == [0, 0, 60]
    assert all(each.finished and each.stage is Stage.FINISHED for each in (first, second, third))
    assert model.totals.prompt_tokens == 210
    assert model.totals.cached_tokens == 60
    assert model.totals.generated_tokens == 6
    assert model.totals.busy_s == pytest.approx(0.213)


def test_a_request_is_new_until_it_is_submitted_and_finished_with_its_last_token() -> None:
    model, short = engine(), request("a" * 10, 1)
    assert (short.stage, short.finished, short.emitted, short.cached_tokens) == (Stage.NEW, False, 0, 0)
    model.submit(short, now=0.5)
    assert (short.stage, short.submitted_s, model.next_arrival_s, model.queued, model.waiting_tokens) == (
        *(Stage.WAITING, 0.5, 0.5),
        *(1, 10),
    )
    step = model.start_step(now=0.5)
    assert step is not None
    assert (short.admitted_s, model.running, model.queued, model.next_arrival_s) == (0.5, 1, 0, None)
    assert (model.used_tokens, model.idle, model.step) == (10, False, step)
    model.finish_step(step)
    assert (short.finished, short.first_token_s, model.idle, model.step, model.used_tokens) == (
        *(True, step.ends_s, True, None),
        0,
    )


def test_a_long_prompt_is_prefilled_in_chunks_and_the_next_shares_its_last_one() -> None:
    model = engine(chunk_tokens=100)
    long, short = request("a" * 250, 1), request("b" * 30, 1)
    model.submit(long, now=0.0)
    model.submit(short, now=0.0)
    steps = [(step.chunks, len(emitted)) for step, emitted in run(model)]
    assert steps == [((100,), 0), ((100,), 0), ((50, 30), 2)]


def test_a_chunk_cuts_the_last_request_in_it_and_goes_on_with_it_first() -> None:
    model = engine(chunk_tokens=100)
    for letter in "abc":
        model.submit(request(letter * 60, 1), now=0.0)
    assert [step.chunks for step, _ in run(model)] == [(60, 40), (20, 60)]


def attentive(*, chunk_tokens: int = 100) -> Model:
    """An engine that takes 10 us for each pair of a new token and one that it attends to, and 10 us a token of KV."""
    profile = round_profile(chunk_tokens=chunk_tokens, prefill_kappa_s=1e-5, decode_kv_s=1e-5)
    return EngineModel(profile, item_bytes=1)


def durations_ms(model: Model, now: float = 0.0) -> list[float]:
    return [round((step.ends_s - step.started_s) * 1e3, 6) for step, _ in run(model, now)]


def test_a_prefill_attends_to_all_that_is_before_each_of_its_tokens() -> None:
    """A chunk of n behind c: n (c + n / 2) pairs. 100 behind 0, 100 behind 100, 50 behind 200."""
    model = attentive()
    model.submit(request("a" * 250, 1), now=0.0)
    assert durations_ms(model) == [10 + 100 + 50, 10 + 100 + 150, 10 + 50 + 112.5]


def test_a_prefill_attends_to_what_was_cached() -> None:
    """40 tokens behind 60 cached ones attend to 40 x 80 pairs, where 100 new ones would to 100 x 50."""
    model = attentive()
    model.submit(request("a" * 60, 1), now=0.0)
    end(model)
    model.submit(request("a" * 60 + "b" * 40, 1), now=9.0)
    assert durations_ms(model, 9.0) == [10 + 40 + 32]


def test_prompts_that_share_a_step_attend_to_their_own_tokens_only() -> None:
    """Two of 50 are 2 x 50 x 25 pairs, half of one of 100."""
    model = attentive()
    model.submit(request("a" * 50, 1), now=0.0)
    model.submit(request("b" * 50, 1), now=0.0)
    assert durations_ms(model) == [10 + 100 + 25]


def test_a_decode_iteration_reads_the_context_of_each_request_and_its_own_token() -> None:
    """After a first token each iteration reads the prompt and one token more: 31, 32 and 33 for one alone.

    Two together read what both have. Iterations run at once take as long as one by one.
    """
    alone, both = attentive(), attentive()
    alone.submit(request("a" * 30, 4), now=0.0)
    assert durations_ms(alone)[1:] == [20 + 1 + 0.31, 20 + 1 + 0.32, 20 + 1 + 0.33]
    for letter, tokens in (("a", 30), ("b", 50)):
        both.submit(request(letter * tokens, 4), now=0.0)
    first = both.start_step(now=0.0)
    assert first is not None
    both.finish_step(first)
    at_once = both.start_step(now=first.ends_s, ahead=True)
    assert at_once is not None
    assert at_once.iterations == 3
    assert at_once.ends_s - at_once.started_s == pytest.approx(3 * 0.022 + (82 + 84 + 86) * 1e-5)


def test_a_slow_engine_reads_its_context_as_many_times_as_slowly() -> None:
    model = attentive()
    model.slowdown = 3.0
    model.submit(request("a" * 30, 3), now=0.0)
    assert durations_ms(model) == pytest.approx([3 * (10 + 30 + 4.5), 3 * (21 + 0.31), 3 * (21 + 0.32)])


def test_decodes_stall_while_prompts_are_prefilled() -> None:
    model = engine()
    model.submit(request("a" * 10, 50), now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    model.finish_step(step)
    model.submit(request("b" * 100, 1), now=step.ends_s)
    stalled = model.start_step(now=step.ends_s)
    assert stalled is not None
    assert stalled.chunks == (100,)


def test_a_sibling_misses_until_the_prefill_is_over_and_hits_after() -> None:
    model = engine(chunk_tokens=100)
    early, late = request("a" * 150, 1), request("a" * 150, 1)
    model.submit(early, now=0.0)
    model.submit(late, now=0.01)
    end(model)
    assert (early.cached_tokens, late.cached_tokens) == (0, 0)
    after = request("a" * 150, 1)
    model.submit(after, now=9.0)
    end(model, 9.0)
    assert after.cached_tokens == 149, "one token is always computed"


def test_without_a_prefix_cache_nothing_is_found_and_all_is_freed() -> None:
    model: Model = EngineModel(replace(round_profile(), prefix_cache=False), item_bytes=1)
    for _ in range(2):
        again = request("a" * 50, 4, output="wxyz")
        model.submit(again, now=0.0)
        end(model)
    assert (again.cached_tokens, model.totals.cached_tokens) == (0, 0)
    assert model.cache.free_tokens == model.cache.capacity_tokens


def test_a_next_turn_hits_what_was_generated_but_for_the_last_token() -> None:
    model = engine()
    model.submit(request("hello", 4, output="WXYZ"), now=0.0)
    now = end(model)
    turn = request("helloWXYZ and more", 1)
    model.submit(turn, now=now)
    end(model, now)
    assert turn.cached_tokens == len("helloWXY")


@pytest.mark.parametrize(("hit_share", "checkpoint_tokens", "found"), [(0.6, 1, 90), (1.0, 64, 128), (0.6, 64, 64)])
def test_an_engine_that_finds_part_of_a_prefix_finds_that_part_each_time(
    hit_share: float, checkpoint_tokens: int, found: int
) -> None:
    model = engine(hit_share=hit_share, checkpoint_tokens=checkpoint_tokens)
    turns = [request("a" * 150 + last, 1) for last in "xyz"]
    now = 0.0
    for turn in turns:
        model.submit(turn, now=now)
        now = end(model, now)
    assert [turn.cached_tokens for turn in turns] == [0, found, found]
    assert model.cache.cached_tokens == 153, "the part that is not found is stored once"


def test_an_engine_that_does_not_cache_output_hits_the_prompt_alone() -> None:
    model: Model = EngineModel(round_profile(caches_output=False), item_bytes=1)
    model.submit(request("hello", 4, output="WXYZ"), now=0.0)
    now = end(model)
    turn = request("helloWXYZ and more", 1)
    model.submit(turn, now=now)
    end(model, now)
    assert turn.cached_tokens == len("hello")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_above_the_largest_cuda_graph_decodes_more_slowly_until_it_is_small_again(ahead: bool) -> None:
    """Three requests take 20 + 3 ms a step and 40 ms more without a graph; two take 22 ms, one 21 ms."""
    profile = round_profile(cuda_graph_max_batch=2, decode_eager_s=0.040)
    model: Model = EngineModel(profile, item_bytes=1)
    for letter, tokens in (("a", 3), ("b", 4), ("c", 5)):
        model.submit(request(letter * 10, tokens), now=0.0)
    now, decoded = 0.0, 0.0
    while (step := model.start_step(now=now, ahead=ahead)) is not None:
        now = step.ends_s
        model.finish_step(step)
        decoded += 0.0 if step.chunks else step.ends_s - step.started_s
    assert decoded == pytest.approx(2 * 0.063 + 0.022 + 0.021)


def test_no_more_run_than_may_and_the_rest_wait_in_order() -> None:
    model = engine(max_running_requests=2)
    requests = [request(letter * 10, 3) for letter in "abcd"]
    for each in requests:
        model.submit(each, now=0.0)
    finished = [each for _, emitted in run(model) for each in emitted if each.finished]
    assert finished == requests
    assert requests[2].admitted_s == pytest.approx(requests[0].admitted_s + 0.010 + 0.020 + 2 * 0.022)  # type: ignore[operator]  # admitted


def test_admission_waits_for_room_for_prompt_and_output() -> None:
    model = engine(kv_tokens=100)
    first, second, third = request("a" * 50, 30), request("b" * 21, 1), request("c" * 5, 1)
    for each in (first, second, third):
        model.submit(each, now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    assert step.requests == (first,), "22 do not fit beside 80, and the third may not pass the second"
    model.finish_step(step)
    end(model, step.ends_s)
    assert second.finished
    assert third.finished
    assert second.admitted_s is not None
    assert second.admitted_s >= 0.060 + 29 * 0.021 - 1e-9


def test_old_prefixes_give_way_to_a_new_prompt() -> None:
    model = engine(kv_tokens=100)
    now = 0.0
    for letter in "abc":
        model.submit(request(letter * 45, 1), now=now)
        now = end(model, now)
    assert [model.cache.match(letter.encode() * 45).items for letter in "abc"] == [0, 45, 45]
    assert model.cache.evicted_tokens_total == 45


def test_a_request_that_arrives_during_a_step_is_not_in_it_even_if_the_caller_is_late() -> None:
    model = engine()
    model.submit(request("a" * 10, 2), now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    late = request("b" * 10, 1)
    model.submit(late, now=step.ends_s + 0.001)
    model.finish_step(step)
    decode = model.start_step(now=step.ends_s)
    assert decode is not None
    assert decode.chunks == ()
    model.finish_step(decode)
    prefill = model.start_step(now=decode.ends_s)
    assert prefill is not None
    assert prefill.requests == (late,)


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "message"),
    [
        (4_000, 1, r"The input \(4000 tokens\) is longer than the model's context length \(4000 tokens\)"),
        (3_990, 11, "are 4001 together"),
        (2_000, 1_500, "do not fit the KV pool of 3000 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt_tokens: int, output_tokens: int, message: str) -> None:
    model = engine(kv_tokens=3_000)
    with pytest.raises(BadRequest, match=message):
        model.submit(EngineRequest(b"", prompt_tokens=prompt_tokens, output_tokens=output_tokens), now=0.0)
    assert model.idle


def test_a_slow_engine_takes_that_many_times_as_long() -> None:
    usual, slow = engine(), engine()
    slow.slowdown = 3.0
    for model in (usual, slow):
        model.submit(request("a" * 50, 5), now=0.0)
    assert end(slow) == pytest.approx(3 * end(usual))


def test_flush_is_refused_while_something_runs_and_forgets_when_idle() -> None:
    model = engine()
    model.submit(request("a" * 50, 5), now=0.0)
    assert not model.flush()
    end(model)
    assert model.cache.match(b"a" * 50).items == 50
    assert model.flush()
    assert model.cache.match(b"a" * 50).items == 0


def test_flush_does_not_wait_for_a_step_whose_requests_are_gone() -> None:
    model = engine()
    gone = request("a" * 50, 5)
    model.submit(gone, now=0.0)
    step = model.start_step(now=0.0)
    assert step is not None
    model.abort(gone)
    assert model.flush()
    assert model.finish_step(step) == []
    model.check()


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("during_step", [False, True])
def test_abort_at_any_stage_frees_everything_and_leaves_the_others_alone(steps: int, during_step: bool) -> None:
    model = engine(chunk_tokens=40)
    doomed, other = request("a" * 100, 3), request("b" * 20, 4)
    model.submit(doomed, now=0.0)
    model.submit(other, now=0.0)
    now = 0.0
    for _ in range(steps):
        step = model.start_step(now=now)
        assert step is not None
        now = step.ends_s
        model.finish_step(step)
    running = model.start_step(now=now) if during_step else None
    before = doomed.emitted
    was_over = doomed.finished
    assert model.abort(doomed) is not was_over
    assert not model.abort(doomed)
    if running is not None:
        assert doomed not in model.finish_step(running)
        now = running.ends_s
    model.check()
    end(model, now)
    assert doomed.emitted == before
    assert other.emitted == 4
    assert model.idle
    assert model.cache.private_tokens == model.cache.locked_tokens == model.cache.reserved_tokens == 0


@dataclass(frozen=True)
class Arrival:
    at_s: float
    prompt: str
    output_tokens: int
    aborted_after_steps: int | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_s=st.sampled_from([0.0, 0.0, 0.02, 0.1, 0.5]),
        prompt=st.text("ab", min_size=1, max_size=40),
        output_tokens=st.integers(1, 8),
        aborted_after_steps=st.one_of(st.none(), st.integers(0, 12)),
    ),
    max_size=12,
)


def play(
    arrivals: list[Arrival], hit_share: float = 1.0
) -> tuple[Model, list[tuple[EngineRequest, int]], list[tuple[float, int]]]:
    """Let requests arrive, be aborted and end; check everything after every step."""
    model = engine(kv_tokens=64, chunk_tokens=16, max_running_requests=3, hit_share=hit_share)
    due = sorted(arrivals, key=lambda arrival: arrival.at_s)
    received: dict[EngineRequest, int] = {}
    wanted = {}
    log = []
    now, steps = 0.0, 0
    while due or not model.idle:
        while due and due[0].at_s <= now:
            arrival = due.pop(0)
            submitted = request(arrival.prompt, arrival.output_tokens, output="c" * arrival.output_tokens)
            model.submit(submitted, now=arrival.at_s)
            received[submitted] = 0
            wanted[submitted] = (arrival, steps)
        step = model.start_step(now=now)
        for each, (arrival, since) in wanted.items():
            if arrival.aborted_after_steps is not None and steps - since >= arrival.aborted_after_steps:
                model.abort(each)
        model.check()
        if step is None:
            now = due[0].at_s if due else now
            continue
        for each in model.finish_step(step):
            received[each] += 1
            assert each.emitted == received[each]
        model.check()
        log.append((step.ends_s, len(step.requests)))
        now, steps = step.ends_s, steps + 1
    return model, list(received.items()), log


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ARRIVALS, st.sampled_from([1.0, 0.5]))
def test_every_request_gets_exactly_its_tokens_or_an_abort_and_nothing_leaks(
    arrivals: list[Arrival], hit_share: float
) -> None:
    model, received, _ = play(arrivals, hit_share)
    for each, tokens in received:
        if each.stage is Stage.FINISHED:
            assert tokens == each.output_tokens
        else:
            assert each.stage is Stage.ABORTED
            assert tokens < each.output_tokens
    assert model.totals.requests == len(arrivals)
    assert model.totals.generated_tokens == sum(tokens for _, tokens in received)
    assert model.totals.aborted == sum(each.stage is Stage.ABORTED for each, _ in received)
    cache = model.cache
    assert cache.private_tokens == cache.locked_tokens == cache.reserved_tokens == 0
    assert cache.free_tokens + cache.cached_tokens == cache.capacity_tokens


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ARRIVALS)
def test_the_same_requests_give_the_same_steps(arrivals: list[Arrival]) -> None:
    assert play(arrivals)[2] == play(arrivals)[2]


# Runs of decode iterations: how long so many take, and which one is under way.
def step_of(first_s: float, growth_s: float, iterations: int, *, started_s: float = 0.0) -> Step[EngineRequest]:
    ends_s = started_s + run_duration_s(first_s, growth_s, iterations)
    return Step(started_s, ends_s, (), (), iterations, first_s, growth_s)


@pytest.mark.parametrize(
    ("first_s", "growth_s", "iterations", "seconds"),
    [
        (2.0, 0.5, 0, 0.0),
        (2.0, 0.5, 1, 2.0),
        (2.0, 0.5, 2, 4.5),
        (2.0, 0.5, 4, 2.0 + 2.5 + 3.0 + 3.5),
        (2.0, 0.0, 3, 6.0),
    ],
)
def test_each_iteration_is_longer_than_the_one_before_by_the_growth(
    first_s: float, growth_s: float, iterations: int, seconds: float
) -> None:
    assert run_duration_s(first_s, growth_s, iterations) == seconds
    assert step_of(first_s, growth_s, 9, started_s=100.0).ended_s(iterations) == 100.0 + seconds


@pytest.mark.parametrize(
    ("now", "number"),
    # They end at 102, 104.5, 107.5 and 111.
    [
        (90.0, 1),
        (100.0, 1),
        (102.0, 1),
        (102.1, 2),
        (104.5, 2),
        (104.6, 3),
        (107.5, 3),
        (107.6, 4),
        (111.0, 4),
        (200.0, 4),
    ],
)
def test_the_iteration_under_way_is_the_first_that_ends_now_or_later(now: float, number: int) -> None:
    assert step_of(2.0, 0.5, 4, started_s=100.0).iteration_at(now) == number


@given(
    first_s=st.floats(1e-3, 0.1),
    growth_s=st.just(0.0) | st.floats(1e-9, 1e-3),
    iterations=st.integers(1, 400),
    share=st.floats(0, 1.2),
)
def test_the_solution_is_the_one_that_counting_finds(
    first_s: float, growth_s: float, iterations: int, share: float
) -> None:
    step = step_of(first_s, growth_s, iterations, started_s=5.0)
    for now in (5.0 + share * (step.ends_s - 5.0), step.ended_s(max(1, round(share * iterations)))):
        counted = next((n for n in range(1, iterations + 1) if step.ended_s(n) >= now), iterations)
        assert step.iteration_at(now) == counted


def test_pooled_quantiles_are_those_of_the_gaps_one_by_one_within_a_hundredth() -> None:
    rng = np.random.default_rng(0)
    gaps, times = rng.lognormal(-4.5, 1.0, 500), rng.integers(1, 50, 500)
    pooled = ItlHistogram()
    pooled.add(list(zip(gaps.tolist(), times.tolist(), strict=True)))
    each = np.repeat(gaps, times)
    assert pooled.count == len(each)
    assert pooled.mean_s == pytest.approx(each.mean())
    for share in (0.01, 0.5, 0.95, 0.99):
        assert pooled.quantile_s(share) == pytest.approx(np.quantile(each, share, method="inverted_cdf"), rel=0.011)


def test_without_a_gap_nothing_is_known() -> None:
    assert isnan(ItlHistogram().mean_s)
    assert isnan(ItlHistogram().quantile_s(0.5))
    assert p95_s([]) is None


def test_gaps_out_of_range_are_counted_at_its_ends() -> None:
    pooled = ItlHistogram()
    pooled.add([(1e-9, 1), (1e6, 1)])
    assert pooled.count == 2
    assert pooled.quantile_s(0.5) < 2e-6
    assert pooled.quantile_s(1.0) > 9e3


def test_p95_is_the_proxy_s() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        gaps, times = rng.random(8), rng.integers(1, 12, 8)
        each = sorted(np.repeat(gaps, times).tolist())
        pairs = zip(gaps.tolist(), times.tolist(), strict=True)
        assert p95_s(pairs) == each[ceil(0.95 * len(each)) - 1]


@pytest.mark.parametrize(("gaps", "place"), [(1, 1), (19, 19), (20, 19), (21, 20), (40, 38), (100, 95)])
def test_p95_is_the_least_gap_that_19_in_20_do_not_exceed(gaps: int, place: int) -> None:
    assert p95_s((float(number), 1) for number in range(1, gaps + 1)) == place


def test_a_stall_is_in_the_first_gap_after_it() -> None:
    log = DecodeTimeline()
    log.add(0.0, 1.0, 10)
    mark = log.mark()
    log.add(2.0, 2.3, 3)
    log.add(2.3, 2.5, 1)
    log.add(3.0, 3.4, 2)
    pairs = log.gaps(mark, first_token_s=2.0)
    assert [(round(gap_s, 6), times) for gap_s, times in pairs] == [(0.1, 3), (0.2, 1), (0.7, 1), (0.2, 1)]


def test_a_wait_before_the_first_run_is_in_the_first_gap_and_rounding_is_none() -> None:
    log = DecodeTimeline()
    log.add(1.0 + 1e-12, 1.2, 2)
    assert [(round(gap_s, 6), times) for gap_s, times in log.gaps(0, first_token_s=1.0)] == [(0.1, 2)]
    assert [(round(gap_s, 6), times) for gap_s, times in log.gaps(0, first_token_s=0.5)] == [(0.6, 1), (0.1, 1)]


def test_a_log_whose_requests_have_all_ended_is_emptied_and_its_marks_go_on() -> None:
    log = DecodeTimeline()
    for number in range(5):
        log.add(float(number), number + 1.0, 1)
    assert (log.mark(), log.is_long) == (5, False)
    log.forget([])
    assert log.mark() == 5
    log.add(9.0, 9.5, 1)
    assert log.gaps(5, first_token_s=9.0) == [(0.5, 1)]
    log.forget([5, 6])
    assert (log.mark(), log.gaps(5, first_token_s=9.0)) == (6, [(0.5, 1)])


@pytest.mark.parametrize(("runs", "long"), [(8192, False), (8193, True)])
def test_a_log_is_long_beyond_its_bound(runs: int, long: bool) -> None:
    log = DecodeTimeline()
    for _ in range(runs):
        log.add(0.0, 1.0, 1)
    assert log.is_long is long


@pytest.mark.parametrize(
    ("pairs", "p95"),
    [
        ([(1.0, 19), (2.0, 1)], 1.0),
        ([(1.0, 18), (2.0, 2)], 2.0),
        ([(1.0, 95), (2.0, 4), (3.0, 1)], 1.0),
        ([(1.0, 94), (2.0, 5), (3.0, 1)], 2.0),
        ([(5.0, 1)], 5.0),
        ([(1.0, 0)], None),
    ],
)
def test_p95_counts_each_gap_as_often_as_it_occurs(pairs: list[tuple[float, int]], p95: float | None) -> None:
    assert p95_s(pairs) == p95_s(pairs[::-1]) == p95


def test_a_quantile_is_the_middle_of_its_bin_of_one_hundredth() -> None:
    """The bin from 1 us x 1.01 ** 100 on, and all below a microsecond in the first one."""
    pooled = ItlHistogram()
    pooled.add([(1e-6 * 1.01**100.5, 3), (5e-7, 1)])
    assert (pooled.quantile_s(0.5), pooled.quantile_s(0.25)) == pytest.approx((1e-6 * 1.01**100.5, 1e-6 * 1.01**0.5))
    assert pooled.quantile_s(0.26) == pytest.approx(1e-6 * 1.01**100.5)


def test_a_long_log_forgets_what_nobody_asks_for_any_more() -> None:
    log = DecodeTimeline()
    marks = []
    for number in range(10_000):
        marks.append(log.mark())
        log.add(float(number), number + 1.0, 4)
        if log.is_long:
            log.forget(marks[-100:])
    assert len(log._runs) < 8200
    assert log.gaps(marks[-100], first_token_s=9900.0) == [(0.25, 4)] * 100
