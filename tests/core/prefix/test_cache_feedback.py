from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.prefix.cache_feedback import CacheReport, LearnedCapacity
from gorgo.core.prefix.found_share import FoundShare
from gorgo.core.prefix.residency import ConfirmedPrefix
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted

#: Sixty blocks, which share the first twenty.
BLOCKS = 60
TOKENS = BLOCKS * 64


def prompt(name: int) -> bytes:
    start = b"".join(number.to_bytes(8, "little") for number in range(1, 21))
    return start + b"".join((1000 * name + number).to_bytes(8, "little") for number in range(BLOCKS - 20))


def bounded_router(*, kv_capacity_tokens: int | None = None, policy: str = "gorgo-ms") -> Router:
    spec = ReplicaSpec("a", "here", kv_capacity_tokens=kv_capacity_tokens)
    return make_router(replicas=[spec], policy=policy)


def reported(cached_tokens: int | None) -> Outcome:
    return Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=TOKENS, cached_tokens=cached_tokens)


def send(router: Router, request_id: str, name: int, *, now: float) -> str:
    request = a_request(request_id, prompt_tokens=TOKENS, blocks=prompt(name))
    return dispatched(submitted(router, request, now=now)).attempt_id


def serve(router: Router, request_id: str, name: int, outcome: Outcome, *, now: float) -> None:
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
    return float(router.index.match(prompt(name), 1)[0])


def test_a_block_that_was_gone_takes_all_that_was_used_before_it_along() -> None:
    router = bounded_router()
    for name in (1, 2, 3):
        serve(router, f"r{name}", name, COMPLETED, now=name)
    serve(router, "again", 2, reported(20 * 64), now=10.0)
    assert [believed(router, name) for name in (1, 2, 3)] == [20, 60, 60]


@pytest.mark.parametrize("cached", [None, TOKENS, TOKENS - 512])
def test_a_report_that_agrees_or_is_missing_changes_nothing(cached: int | None) -> None:
    router = bounded_router()
    for name in (1, 2):
        serve(router, f"r{name}", name, COMPLETED, now=name)
    serve(router, "again", 2, reported(cached), now=10.0)
    assert [believed(router, name) for name in (1, 2)] == [60, 60]


def test_siblings_that_have_not_been_prefilled_prove_nothing() -> None:
    """Four of a burst believe in each other's prompt; the first to be prefilled has nothing cached, and rightly so."""
    router = bounded_router()
    serve(router, "old", 1, COMPLETED, now=0.0)
    siblings = [send(router, f"s{number}", 2, now=1.0) for number in range(4)]
    for attempt_id in siblings:
        router.on_first_token(attempt_id, now=2.0)
        router.on_finish(attempt_id, reported(0), now=3.0)
    assert [believed(router, name) for name in (1, 2)] == [60, 60]


def test_a_sibling_s_dispatch_is_no_use_by_the_engine() -> None:
    """The block was shown before `2` was and believed in again after it: that it is gone says nothing of `2`."""
    router = bounded_router()
    serve(router, "r1", 1, COMPLETED, now=0.0)
    serve(router, "r2", 2, COMPLETED, now=1.0)
    waiting = send(router, "sibling", 1, now=2.0)
    serve(router, "again", 1, reported(20 * 64), now=3.0)
    assert believed(router, 2) == 60
    router.on_finish(waiting, COMPLETED, now=5.0)


def test_a_request_in_flight_is_not_evicted_by_a_correction() -> None:
    router = bounded_router()
    serve(router, "r2", 2, COMPLETED, now=0.0)
    waiting = send(router, "waiting", 1, now=1.0)
    serve(router, "more", 2, COMPLETED, now=2.0)
    serve(router, "again", 2, reported(20 * 64), now=3.0)
    assert believed(router, 1) == 60
    router.on_finish(waiting, COMPLETED, now=5.0)


def test_the_published_index_is_never_corrected() -> None:
    router = bounded_router(policy="gorgo")
    for name in (1, 2, 3):
        serve(router, f"r{name}", name, COMPLETED, now=name)
    serve(router, "again", 2, reported(20 * 64), now=10.0)
    assert [believed(router, name) for name in (1, 2, 3)] == [60, 60, 60]


def test_a_capacity_that_the_engine_does_not_tell_is_what_was_left_after_a_contradiction() -> None:
    router = bounded_router()
    for name in range(1, 11):
        serve(router, f"r{name}", name, COMPLETED, now=name)
    assert router.index.resident_blocks(0) == 20 + 10 * 40
    serve(router, "again", 7, reported(20 * 64), now=20.0)
    assert router.index.resident_blocks(0) == 20 + 4 * 40
    for name in range(11, 30):
        serve(router, f"r{name}", name, COMPLETED, now=100.0 + name)
        assert router.index.resident_blocks(0) <= 20 + 4 * 40


def test_a_capacity_that_is_told_is_not_learned() -> None:
    router = bounded_router(kv_capacity_tokens=64 * 1000)
    for name in range(1, 11):
        serve(router, f"r{name}", name, COMPLETED, now=name)
    serve(router, "again", 7, reported(20 * 64), now=20.0)
    for name in range(11, 30):
        serve(router, f"r{name}", name, COMPLETED, now=100.0 + name)
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
