"""The floor by hand; that nothing is below it is tested where simulations run."""

from __future__ import annotations

import pytest

from gorgo.lab.sim.faults.scenarios import find_scenario
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.workload import SimRequest
from tests.lab.sim.fleets import three_regions

FLEET = three_regions()


def ask(index: int, prompt_tokens: int, blocks: str, output_tokens: int = 1, body_bytes: int = 0) -> SimRequest:
    """A letter is a block."""
    return SimRequest(
        index=index,
        arrival_s=float(index),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        blocks=b"".join(letter.encode() * 8 for letter in blocks),
        prefix_hash=0,
        body_bytes=body_bytes,
    )


def p(new: int, cached: int = 0) -> float:
    """2x L40S, one chunk."""
    assert new <= 4096
    return 0.012 + new / 11_500 + 1.6e-9 * new * (cached + new / 2)


def test_only_tokens_never_seen_before_are_prefilled() -> None:
    feed = [ask(0, 1100, "ab"), ask(1, 1700, "abc"), ask(2, 1536, "abc"), ask(3, 600, "b")]
    wanted = [p(1100), p(1700 - 1024, 1024), p(512, 1024), p(600)]
    assert lower_bound(feed, FLEET).ttft_s == pytest.approx([0.002 + each for each in wanted])


def test_what_comes_first_is_seen_first_whatever_the_order_of_the_feed() -> None:
    feed = [ask(0, 1100, "ab"), ask(1, 1700, "abc")]
    turned = lower_bound(feed[::-1], FLEET)
    assert turned.ttft_s[::-1] == pytest.approx(lower_bound(feed, FLEET).ttft_s)


def test_a_long_prompt_takes_a_step_per_chunk() -> None:
    tokens = 10_000
    alone_s = 3 * 0.012 + tokens / 11_500 + 1.6e-9 * tokens**2 / 2
    assert lower_bound([ask(0, tokens, "a" * 19)], FLEET).ttft_s == pytest.approx([0.002 + alone_s])


def test_output_is_decoded_alone() -> None:
    floor = lower_bound([ask(0, 1000, "a", output_tokens=3), ask(1, 10, "", output_tokens=2001)], FLEET)
    base_s = 0.0075 + 0.0233 * 8 / 256 + 5e-5
    long_s = 2000 * base_s + 1.5e-8 * (2000 * 10 + 2000 * 2001 / 2)
    assert floor.e2e_s - floor.ttft_s == pytest.approx([2 * base_s + 1.5e-8 * (1001 + 1002), long_s], rel=1e-7)


def test_a_body_beyond_the_widest_window_takes_another_round_trip() -> None:
    small, large = (lower_bound([ask(0, 100, "", body_bytes=size)], FLEET).ttft_s[0] for size in (1_000_000, 5_000_000))
    assert large - small == pytest.approx(0.002)


def test_in_a_mixed_fleet_each_request_has_the_replica_that_is_best_for_it() -> None:
    mixed = find_scenario("mixed-fleet").fleet(FLEET)
    feed = [ask(0, 100, ""), ask(1, 60_000, "x" * 117)]
    each = [lower_bound(feed, SimFleet((replica,))).ttft_s for replica in mixed.replicas]
    assert lower_bound(feed, mixed).ttft_s.tolist() == [each[0][0], each[1][1]]


def test_one_token_is_always_computed() -> None:
    """A prompt of two whole blocks that came by has one of them to prefill; one of a token more has that token."""
    feed = [ask(0, 1024, "ab"), ask(1, 1024, "ab"), ask(2, 1025, "ab")]
    assert lower_bound(feed, FLEET).ttft_s[1:] == pytest.approx([0.002 + p(512, 512), 0.002 + p(1, 1024)])


def test_each_flight_takes_a_round_trip_of_the_replica() -> None:
    """The nearest is best even for a body of three flights on a wide open connection."""
    (ttft_s,) = lower_bound([ask(0, 100, "", body_bytes=9_000_000)], FLEET).ttft_s
    assert ttft_s == pytest.approx(3 * 0.002 + p(100))


def test_the_floor_of_nothing_is_nothing() -> None:
    assert len(lower_bound([], FLEET).ttft_s) == 0
