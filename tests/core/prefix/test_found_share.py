"""Engines that find part of every prefix, and answers that they cache: what is learned, and how it is priced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.prefix import index as module
from gorgo.core.prefix.index import LEAST_REPORTS as LEAST_REPORTS_INDEX
from gorgo.core.prefix.index import WINDOW as WINDOW_INDEX
from gorgo.core.prefix.index import Answers, Behind
from gorgo.core.prefix.residency import (
    ALL_FOUND,
    LEAST_REPORTS,
    MAX_MODELS,
    WINDOW,
    CacheReport,
    ConfirmedPrefix,
    FoundShare,
    FoundShares,
    LearnedCapacity,
)
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, a_request, blocks_of, dispatched, make_router, submitted

# --- Engines that find part of every prefix: what share is learned, how it is priced, and what is still forgotten.


#: Blocks of 64 tokens: 6,400 tokens.
BLOCKS = 100
TOKENS = BLOCKS * 64


def learn(shares: FoundShares, *found: float, tokens: float = 1000.0, slot: int = 0, model: str | None = None) -> None:
    for share in found:
        shares.learn(slot, model, confirmed_tokens=tokens, found_tokens=share * tokens)


def test_a_share_is_learned_from_three_reports() -> None:
    shares = FoundShares()
    learn(shares, 0.6, 0.6)
    assert shares.of(0, None, 1000.0) == ALL_FOUND
    learn(shares, 0.6)
    assert shares.of(0, None, 1000.0) == FoundShare(0.6)
    assert shares.of(1, None, 1000.0) == ALL_FOUND, "of another replica nothing is known"


def test_more_cached_than_confirmed_is_all_of_it() -> None:
    shares = FoundShares()
    learn(shares, 1.7, 1.7, 1.7)
    assert shares.of(0, None, 1000.0) == ALL_FOUND
    assert shares.recent(0) == 1.0


def test_a_minority_of_evictions_does_not_move_a_share() -> None:
    shares = FoundShares()
    learn(shares, *[1.0] * (WINDOW // 2), *[0.0] * (WINDOW // 2))
    assert shares.of(0, None, 1000.0).share == 1.0
    learn(shares, 0.0)
    assert shares.of(0, None, 1000.0).share == 0.0
    learn(shares, *[1.0] * WINDOW)
    assert shares.of(0, None, 1000.0) == ALL_FOUND, "the window has forgotten them"


def test_reports_that_scatter_have_a_usual_deviation() -> None:
    shares = FoundShares()
    learn(shares, 0.5, 0.625, 0.75, 0.625, 0.5)
    assert shares.of(0, None, 1000.0) == FoundShare(0.625, 0.125)


def test_each_depth_has_its_share_and_one_without_reports_that_of_the_nearest_shallower() -> None:
    shares = FoundShares()
    learn(shares, *[0.5] * LEAST_REPORTS, tokens=2048.0)
    learn(shares, *[0.9] * LEAST_REPORTS, tokens=8192.0)
    found = {tokens: shares.of(0, None, tokens).share for tokens in (100.0, 2047.0, 2048.0, 8191.0, 8192.0, 1e6)}
    assert found == {100.0: 0.5, 2047.0: 0.5, 2048.0: 0.5, 8191.0: 0.5, 8192.0: 0.9, 1e6: 0.9}


def test_prefixes_are_priced_by_replica_and_depth() -> None:
    shares = FoundShares()
    learn(shares, *[0.5] * LEAST_REPORTS, tokens=2048.0, slot=1)
    learn(shares, *[0.75] * LEAST_REPORTS, tokens=8192.0, slot=1)
    matched = np.array([4000.0, 4000.0, 4000.0])
    assert shares.found_tokens(matched, None).tolist() == [4000.0, 2000.0, 4000.0]
    assert shares.found_tokens(2 * matched, None).tolist() == [8000.0, 4000.0, 8000.0]
    assert shares.found_tokens(np.array([8192.0, 8192.0]), None).tolist() == [8192.0, 6144.0]
    assert matched.tolist() == [4000.0] * 3, "the index's array is not changed"


def test_where_everything_is_found_a_price_costs_nothing() -> None:
    shares = FoundShares()
    matched = np.array([4000.0])
    learn(shares, *[1.0] * 10)
    assert shares.found_tokens(matched, None) is matched


def test_each_model_has_its_shares_and_models_beyond_the_bound_have_one_together() -> None:
    shares = FoundShares()
    learn(shares, *[0.5] * LEAST_REPORTS, model="hybrid")
    assert [shares.of(0, model, 1000.0).share for model in ("hybrid", "dense", None)] == [0.5, 1.0, 1.0]
    for number in range(MAX_MODELS):
        learn(shares, *[0.7] * LEAST_REPORTS, model=f"m{number}")
    assert shares.of(0, "hybrid", 1000.0).share == 0.5
    assert shares.of(0, "never named", 1000.0).share == 0.7
    assert len(shares._by_model) <= MAX_MODELS + 1


def test_a_replica_that_has_left_leaves_nothing_to_the_next_in_its_slot() -> None:
    shares = FoundShares()
    for model in ("a", "b"):
        learn(shares, *[0.5] * LEAST_REPORTS, model=model)
    shares.remove_replica(0)
    assert shares.of(0, "a", 1000.0) == ALL_FOUND
    assert shares.recent(0) is None
    matched = np.array([4000.0])
    assert shares.found_tokens(matched, "a") is matched


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1.0, 1e5), st.floats(0.0, 1.2)), max_size=60))
def test_no_price_is_above_the_match_nor_below_the_least_report(reports: list[tuple[int, float, float]]) -> None:
    shares = FoundShares()
    for slot, tokens, share in reports:
        learn(shares, share, tokens=tokens, slot=slot)
    matched = np.array([300.0, 3000.0, 30_000.0, 3e6])
    found = shares.found_tokens(matched, None)
    least = min((share for _, _, share in reports), default=1.0)
    assert (found <= matched).all()
    assert (found >= matched * min(least, 1.0) * (1 - 1e-9)).all()
    for slot in range(4):
        recent = shares.recent(slot)
        assert recent is None or 0.0 <= recent <= 1.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([600.0, 3000.0, 9000.0]), st.sampled_from([0.0, 0.5, 0.7, 1.0])),
        max_size=120,
    )
)
def test_prices_are_the_medians_of_the_last_reports_after_each_report(reports: list[tuple[int, float, float]]) -> None:
    shares = FoundShares()
    last: dict[tuple[int, float], list[float]] = {}
    depths = [600.0, 3000.0, 9000.0]
    for slot, tokens, share in reports:
        learn(shares, share, tokens=tokens, slot=slot)
        of_class = last[slot, tokens] = [*last.get((slot, tokens), []), share][-WINDOW:]
        assert of_class, "a report is remembered"
        for other in range(3):
            known = {at: sorted(last[other, at]) for at in depths if len(last.get((other, at), [])) >= LEAST_REPORTS}
            for at in depths:
                nearest = max((depth for depth in known if depth <= at), default=min(known, default=None))
                expected = 1.0 if nearest is None else known[nearest][len(known[nearest]) // 2]
                matched = np.full(3, at)
                assert shares.of(other, None, at).share == expected
                assert shares.found_tokens(matched, None)[other] == at * expected


# -- in the Router
def prompt(name: int) -> bytes:
    return b"".join((1000 * name + number).to_bytes(8, "little") for number in range(BLOCKS))


def serve(router: Router, name: int, found: float | None, *, now: float) -> int:
    """Serve a prompt with so much of it found; return the estimated cached tokens."""
    dispatch = dispatched(submitted(router, a_request(f"r{now}", prompt_tokens=TOKENS, blocks=prompt(name)), now=now))
    cached = None if found is None else int(found * TOKENS)
    router.on_first_token(dispatch.attempt_id, now=now + 0.1)
    outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=TOKENS, cached_tokens=cached)
    router.on_finish(dispatch.attempt_id, outcome, now=now + 0.2)
    return dispatch.decision.estimated_cached_tokens


def matched_blocks(router: Router, *names: int) -> list[float]:
    return [float(router.index.match(prompt(name), 1)[0]) for name in names]


def partial_router(policy: str = "gorgo-ms", *, kv_capacity_tokens: int | None = 10**6) -> Router:
    """A replica that found 60 % of each of ten prompts, each served twice."""
    router = make_router(replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=kv_capacity_tokens)], policy=policy)
    for turn in range(2):
        for name in range(10):
            serve(router, name, 0.6 if turn else 0.0, now=100.0 * turn + name)
    return router


def test_an_engine_that_finds_part_of_every_prefix_evicts_nothing() -> None:
    router = partial_router()
    for name in range(10, 20):
        serve(router, name, 0.0, now=300.0 + name)
    for name in range(10, 20):
        assert serve(router, name, 0.6, now=400.0 + name) == int(0.6 * TOKENS)
    assert matched_blocks(router, *range(10, 20)) == [BLOCKS] * 10


def test_an_operator_reads_the_share_of_confirmed_tokens_that_was_found() -> None:
    router = make_router("a")
    assert router.view.snapshots(now=0.0)[0].found_share is None
    assert partial_router().view.snapshots(now=500.0)[0].found_share == pytest.approx(0.6)


def test_the_published_policy_is_priced_by_its_own_index() -> None:
    router = partial_router("gorgo")
    assert serve(router, 3, 0.6, now=300.0) == TOKENS


def test_a_capacity_that_was_learned_before_the_share_is_dropped() -> None:
    router = partial_router(kv_capacity_tokens=None)
    for name in range(10, 60):
        serve(router, name, 0.0, now=300.0 + name)
    assert matched_blocks(router, *range(10, 60)) == [BLOCKS] * 50


@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_flush_of_an_engine_that_found_part_is_seen_within_ten_reports(share: float) -> None:
    router = partial_router()
    names = range(100, 140)
    for turn in range(3):
        for name in names:
            serve(router, name, share if turn else 0.0, now=1000.0 * (turn + 1) + name)
    assert serve(router, 100, share, now=5000.0) == int(share * TOKENS)
    order = np.random.default_rng(3).permutation(np.array(names))[:10].tolist()
    for step, name in enumerate(order):
        serve(router, name, 0.0, now=6000.0 + step)
    wrong = [name for name in names if name not in order and matched_blocks(router, name)[0]]
    assert len(wrong) <= len(names) // 4
    assert serve(router, order[0], share, now=7000.0) == pytest.approx(share * TOKENS, abs=1), "the share stays"


def test_shares_survive_a_restart_of_the_engine_that_empties_the_index() -> None:
    router = partial_router()
    for total in (100.0, 5.0):
        router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=total), now=500.0)
    assert matched_blocks(router, 3) == [0]
    serve(router, 3, 0.0, now=600.0)
    assert serve(router, 3, 0.6, now=601.0) == int(0.6 * TOKENS)


def test_shares_leave_with_their_replica() -> None:
    router = partial_router()
    router.replicas.set_fleet([ReplicaSpec("b", "here", kv_capacity_tokens=10**6)], now=500.0)
    serve(router, 3, 0.0, now=600.0)
    assert serve(router, 3, None, now=601.0) == TOKENS


#: Sixty blocks, which share the first twenty.
N_BLOCKS = 60
N_TOKENS = N_BLOCKS * 64


def prompt_of(name: int) -> bytes:
    start = b"".join(number.to_bytes(8, "little") for number in range(1, 21))
    return start + b"".join((1000 * name + number).to_bytes(8, "little") for number in range(N_BLOCKS - 20))


def bounded_router(*, kv_capacity_tokens: int | None = None, policy: str = "gorgo-ms") -> Router:
    spec = ReplicaSpec("a", "here", kv_capacity_tokens=kv_capacity_tokens)
    return make_router(replicas=[spec], policy=policy)


def reported(cached_tokens: int | None) -> Outcome:
    return Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=N_TOKENS, cached_tokens=cached_tokens)


def send(router: Router, request_id: str, name: int, *, now: float) -> str:
    request = a_request(request_id, prompt_tokens=N_TOKENS, blocks=prompt_of(name))
    return dispatched(submitted(router, request, now=now)).attempt_id


def serve_prompt(router: Router, request_id: str, name: int, outcome: Outcome, *, now: float) -> None:
    attempt_id = send(router, request_id, name, now=now)
    router.on_first_token(attempt_id, now=now + 0.1)
    router.on_finish(attempt_id, outcome, now=now + 0.2)


def contradicts(request: RouteRequest, confirmed: ConfirmedPrefix, outcome: Outcome) -> bool | None:
    report = CacheReport.of(request, confirmed, outcome)
    return None if report is None else report.is_contradiction()


@pytest.mark.parametrize(
    ("cached", "prompt_tokens", "blocks", "block_tokens", "contradicted"),
    [
        # 3,840 tokens believed: 512 of them may be missing.
        (3840 - 512, 3840, 60, 64.0, False),
        (3840 - 513, 3840, 60, 64.0, True),
        # 12,800 believed: a tenth may.
        (12_800 - 1280, 12_800, 200, 64.0, False),
        (12_800 - 1281, 12_800, 200, 64.0, True),
        # 4,096 believed in blocks of 512: two blocks may.
        (4096 - 1024, 4096, 8, 512.0, False),
        (4096 - 1025, 4096, 8, 512.0, True),
        # The engine counts 1,920 tokens of the prompt where 3,840 are estimated: its cached ones count double.
        (1664, 1920, 60, 64.0, False),
        (1663, 1920, 60, 64.0, True),
        # It does not say how long the prompt was.
        (3840 - 512, None, 60, 64.0, False),
        (3840 - 513, None, 60, 64.0, True),
        (3840 - 513, 0, 60, 64.0, True),
        (None, 3840, 60, 64.0, None),
        (0, 3840, 0, 64.0, False),
    ],
)
def test_a_report_contradicts_a_belief_that_it_falls_clearly_short_of(
    cached: int | None, prompt_tokens: int | None, blocks: int, block_tokens: float, contradicted: bool | None
) -> None:
    request = replace(a_request(prompt_tokens=int(blocks * block_tokens) or 3840), block_tokens=block_tokens)
    outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=prompt_tokens, cached_tokens=cached)
    assert contradicts(request, ConfirmedPrefix(blocks, tick=3), outcome) is contradicted


@pytest.mark.parametrize(
    ("share", "deviation", "cached", "contradicted"),
    [
        # 6,000 of 10,000 tokens are usually found: a tenth of the confirmed ones may be missing.
        (0.6, 0.0, 5000, False),
        (0.6, 0.0, 4999, True),
        # Reports scatter by a twentieth: three of these may be missing too.
        (0.6, 0.05, 3500, False),
        (0.6, 0.05, 3499, True),
        (0.0, 0.0, 0, False),
    ],
)
def test_a_report_contradicts_what_is_usually_found_there(
    share: float, deviation: float, cached: int, contradicted: bool
) -> None:
    request = replace(a_request(prompt_tokens=10_000), block_tokens=100.0)
    outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=10_000, cached_tokens=cached)
    report = CacheReport.of(request, ConfirmedPrefix(100, tick=3), outcome)
    assert report is not None
    assert report.is_contradiction(FoundShare(share, deviation)) is contradicted


def test_a_report_without_a_belief_or_a_prompt_contradicts_nothing() -> None:
    outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=100, cached_tokens=0)
    assert contradicts(a_request(prompt_tokens=6400), ConfirmedPrefix(100, tick=0), outcome) is None
    assert contradicts(a_request(prompt_tokens=0), ConfirmedPrefix(100, tick=3), outcome) is None


@pytest.mark.parametrize(
    ("resident", "grown"),
    [(1100, True), (1093, True), (1092, False), (0, False)],  # 1,100 / 1.005 - 2 = 1,092.5
)
def test_a_bound_grows_by_half_a_hundredth_while_a_full_index_agrees(resident: int, grown: bool) -> None:
    capacity = LearnedCapacity()
    assert not capacity.learn(contradicted=False, resident_blocks=resident)
    assert capacity.blocks is None
    assert capacity.learn(contradicted=True, resident_blocks=1100)
    assert capacity.learn(contradicted=False, resident_blocks=resident) is grown
    assert capacity.blocks == (1105 if grown else 1100)


def test_a_bound_is_one_block_at_least() -> None:
    capacity = LearnedCapacity()
    capacity.learn(contradicted=True, resident_blocks=0)
    assert capacity.blocks == 1


def believed(router: Router, name: int) -> float:
    return float(router.index.match(prompt_of(name), 1)[0])


def test_a_block_that_was_gone_takes_all_that_was_used_before_it_along() -> None:
    router = bounded_router()
    for name in (1, 2, 3):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=name)
    serve_prompt(router, "again", 2, reported(20 * 64), now=10.0)
    assert [believed(router, name) for name in (1, 2, 3)] == [20, 60, 60]


@pytest.mark.parametrize("cached", [None, N_TOKENS, N_TOKENS - 512])
def test_a_report_that_agrees_or_is_missing_changes_nothing(cached: int | None) -> None:
    router = bounded_router()
    for name in (1, 2):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=name)
    serve_prompt(router, "again", 2, reported(cached), now=10.0)
    assert [believed(router, name) for name in (1, 2)] == [60, 60]


def test_siblings_that_have_not_been_prefilled_prove_nothing() -> None:
    """Four of a burst believe in each other's prompt; the first to be prefilled has nothing cached, and rightly so."""
    router = bounded_router()
    serve_prompt(router, "old", 1, COMPLETED, now=0.0)
    siblings = [send(router, f"s{number}", 2, now=1.0) for number in range(4)]
    for attempt_id in siblings:
        router.on_first_token(attempt_id, now=2.0)
        router.on_finish(attempt_id, reported(0), now=3.0)
    assert [believed(router, name) for name in (1, 2)] == [60, 60]


def test_a_sibling_s_dispatch_is_no_use_by_the_engine() -> None:
    """The block was shown before `2` was and believed in again after it: that it is gone says nothing of `2`."""
    router = bounded_router()
    serve_prompt(router, "r1", 1, COMPLETED, now=0.0)
    serve_prompt(router, "r2", 2, COMPLETED, now=1.0)
    waiting = send(router, "sibling", 1, now=2.0)
    serve_prompt(router, "again", 1, reported(20 * 64), now=3.0)
    assert believed(router, 2) == 60
    router.on_finish(waiting, COMPLETED, now=5.0)


def test_a_request_in_flight_is_not_evicted_by_a_correction() -> None:
    router = bounded_router()
    serve_prompt(router, "r2", 2, COMPLETED, now=0.0)
    waiting = send(router, "waiting", 1, now=1.0)
    serve_prompt(router, "more", 2, COMPLETED, now=2.0)
    serve_prompt(router, "again", 2, reported(20 * 64), now=3.0)
    assert believed(router, 1) == 60
    router.on_finish(waiting, COMPLETED, now=5.0)


def test_the_published_index_is_never_corrected() -> None:
    router = bounded_router(policy="gorgo")
    for name in (1, 2, 3):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=name)
    serve_prompt(router, "again", 2, reported(20 * 64), now=10.0)
    assert [believed(router, name) for name in (1, 2, 3)] == [60, 60, 60]


def test_a_capacity_that_the_engine_does_not_tell_is_what_was_left_after_a_contradiction() -> None:
    router = bounded_router()
    for name in range(1, 11):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=name)
    assert router.index.resident_blocks(0) == 20 + 10 * 40
    serve_prompt(router, "again", 7, reported(20 * 64), now=20.0)
    assert router.index.resident_blocks(0) == 20 + 4 * 40
    for name in range(11, 30):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=100.0 + name)
        assert router.index.resident_blocks(0) <= 20 + 4 * 40


def test_a_capacity_that_is_told_is_not_learned() -> None:
    router = bounded_router(kv_capacity_tokens=64 * 1000)
    for name in range(1, 11):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=name)
    serve_prompt(router, "again", 7, reported(20 * 64), now=20.0)
    for name in range(11, 30):
        serve_prompt(router, f"r{name}", name, COMPLETED, now=100.0 + name)
    assert router.index.resident_blocks(0) == 20 + 23 * 40


def test_a_capacity_learned_too_small_grows_while_reports_agree_and_the_index_is_full() -> None:
    capacity = LearnedCapacity()
    capacity.learn(contradicted=True, resident_blocks=100)
    assert not capacity.learn(contradicted=False, resident_blocks=50)
    for _ in range(140):
        assert capacity.blocks is not None
        capacity.learn(contradicted=False, resident_blocks=capacity.blocks)
    assert capacity.blocks == 201


def test_a_report_is_compared_on_the_scale_of_the_estimate() -> None:
    """The estimate says 6,400 tokens, the engine counts 3,200: all of them cached is no contradiction."""
    request = a_request(prompt_tokens=6400)
    belief = ConfirmedPrefix(blocks=100, tick=1)
    assert (
        contradicts(request, belief, Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=3200, cached_tokens=3200))
        is False
    )
    assert (
        contradicts(request, belief, Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=3200, cached_tokens=2000))
        is True
    )


def test_nothing_is_told_by_a_belief_without_a_use_that_was_shown() -> None:
    outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=6400, cached_tokens=0)
    assert contradicts(a_request(prompt_tokens=6400), ConfirmedPrefix(100, 0), outcome) is None


# --- Answers that engines cache: which prompt goes on with one, and how much of it counts.


#: A conversation of blocks of 64 tokens: its first prompt, and the second one with the answer of 200 tokens.
FIRST = replace(a_request("first", prompt_tokens=300, blocks=blocks_of(1, 2, 3, 4)), boundaries=(100, 300))
SECOND = replace(
    a_request("second", prompt_tokens=600, blocks=blocks_of(*range(1, 10))), boundaries=(100, 300, 500, 600)
)
MATCH = np.array([0.0, 256.0])


def after(answer: int, *, slot: int = 1) -> Answers:
    answers = Answers()
    answers.add(slot, FIRST, answer)
    return answers


def test_the_next_turn_goes_on_with_the_answer() -> None:
    assert after(200).behind(SECOND, MATCH, 256.0) == {1: Behind(256.0, 244.0)}


def test_an_answer_counts_on_the_replica_that_gave_it_alone() -> None:
    assert after(200, slot=0).behind(SECOND, MATCH, 256.0) is None
    assert after(200, slot=5).behind(SECOND, MATCH, 256.0) is None


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [(190, 234.0), (210, 244.0), (400, 244.0), (401, None), (65, 109.0), (64, None)],
)
def test_a_message_of_another_length_is_another_text(answer: int, tokens: float | None) -> None:
    """Of 200 tokens: half of an answer at least, twice of it and a block at most. Reasoning is not sent again."""
    expected = None if tokens is None else {1: Behind(256.0, tokens)}
    assert after(answer).behind(SECOND, MATCH, 256.0) == expected


@pytest.mark.parametrize("boundaries", [(), (600,), (100, 600), (100, 420, 600), (300,), (100, 300)])
def test_a_prompt_that_has_no_message_where_the_other_ended_goes_on_with_no_answer(boundaries: tuple[int, ...]) -> None:
    assert after(200).behind(replace(SECOND, boundaries=boundaries), MATCH, 256.0) is None


def test_lengths_that_are_estimated_from_bytes_may_differ() -> None:
    assert after(200).behind(replace(SECOND, boundaries=(97, 290, 484, 600)), MATCH, 256.0) == {1: Behind(256.0, 228.0)}


def test_a_match_that_ends_elsewhere_has_no_answer() -> None:
    assert after(200).behind(SECOND, np.array([0.0, 192.0]), 192.0) is None


def test_the_same_prompt_again_has_no_answer_behind_it() -> None:
    assert after(200).behind(FIRST, MATCH, 256.0) is None


def test_a_prompt_without_messages_or_a_full_block_is_not_remembered() -> None:
    answers = Answers()
    answers.add(0, replace(FIRST, boundaries=()), 200)
    answers.add(0, replace(FIRST, blocks=b""), 200)
    answers.add(0, FIRST, 0)
    assert len(answers) == 0


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPTS", 2)
    answers = Answers()
    for word in (1, 2, 1, 3):
        answers.add(0, replace(FIRST, blocks=blocks_of(word)), 200)
    assert len(answers) == 2
    found = [answers.behind(replace(SECOND, blocks=blocks_of(word, 0)), np.array([64.0]), 64.0) for word in (1, 2, 3)]
    assert [one is not None for one in found] == [True, False, True]


def test_a_replica_that_has_left_leaves_nothing() -> None:
    answers = after(200)
    learn_answers(answers, *[1.0] * LEAST_REPORTS_INDEX)
    answers.remove_replica(1)
    assert len(answers) == 0
    assert answers.found_tokens(1, Behind(256.0, 200.0)) == 0.0


def learn_answers(answers: Answers, *shares: float, tokens: float = 200.0) -> None:
    for share in shares:
        answers.on_report(1, Behind(256.0, tokens), found_tokens=256.0 + share * tokens)


def test_nothing_counts_before_three_reports() -> None:
    answers = Answers()
    learn_answers(answers, *[1.0] * (LEAST_REPORTS_INDEX - 1))
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 0.0
    learn_answers(answers, 1.0)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 1000.0
    assert answers.found_tokens(0, Behind(256.0, 1000.0)) == 0.0, "of another replica nothing is known"


def test_an_engine_that_finds_whole_blocks_misses_as_many_tokens_of_any_answer() -> None:
    answers = Answers()
    learn_answers(answers, *[0.9] * LEAST_REPORTS_INDEX)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == pytest.approx(980.0)
    assert answers.found_tokens(1, Behind(256.0, 10.0)) == 0.0


def test_an_engine_that_caches_no_answers_is_known() -> None:
    answers = Answers()
    learn_answers(answers, *[1.0] * WINDOW_INDEX)
    learn_answers(answers, *[0.0] * WINDOW_INDEX)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 0.0
    learn_answers(answers, *[0.2] * WINDOW_INDEX)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == pytest.approx(200.0)


def test_a_report_below_the_match_says_nothing_of_the_answer() -> None:
    answers = Answers()
    learn_answers(answers, *[1.0] * LEAST_REPORTS_INDEX, *[-0.1] * WINDOW_INDEX)
    assert answers.found_tokens(1, Behind(256.0, 1000.0)) == 1000.0


# -- in the Router
def serve_answers(router: Router, request: RouteRequest, *, cached: int, now: float) -> int:
    """Serve a request with an answer of 200 tokens; return the estimated cached tokens."""
    dispatch = dispatched(submitted(router, request, now=now))
    router.on_first_token(dispatch.attempt_id, now=now + 0.1)
    outcome = Outcome(
        AttemptResult.COMPLETED, 200, prompt_tokens=request.prompt_tokens, cached_tokens=cached, output_tokens=200
    )
    router.on_finish(dispatch.attempt_id, outcome, now=now + 0.2)
    return dispatch.decision.estimated_cached_tokens


def conversation(router: Router, word: int, *, found: int) -> int:
    """Serve both turns; return the estimated cached tokens of the second."""
    first = replace(FIRST, request_id=f"first-{word}", blocks=blocks_of(word, 2, 3, 4))
    second = replace(SECOND, request_id=f"second-{word}", blocks=blocks_of(word, *range(2, 10)))
    serve_answers(router, first, cached=0, now=10.0 * word)
    return serve_answers(router, second, cached=found, now=10.0 * word + 5.0)


@pytest.mark.parametrize(("policy", "expected"), [("gorgo-ms", 496), ("prefix-cache", 256)])
def test_cached_answers_count_where_the_index_is_bounded(policy: str, expected: int) -> None:
    router = make_router("a", policy=policy)
    estimated = [conversation(router, word, found=496) for word in range(1, 5)]
    assert estimated == [256, 256, 256, expected]


def test_an_engine_without_cached_answers_is_estimated_as_before() -> None:
    router = make_router("a", policy="gorgo-ms")
    assert [conversation(router, word, found=256) for word in range(1, 7)] == [256] * 6
