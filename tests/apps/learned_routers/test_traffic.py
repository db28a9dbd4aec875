from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from gorgo.apps.learned_routers.traffic import Phase, Traffic, feed_of_traffic
from gorgo.apps.learned_routers.workloads import longer, mixed, scenario, sharing, sharing_shape, shift, traced
from gorgo.errors import TraceError
from gorgo.sim.workload import SimRequest


def blocks_of(*requests: SimRequest) -> list[int]:
    blocks: list[int] = np.frombuffer(b"".join(one.blocks for one in requests), dtype="<u8").tolist()
    return blocks


def reusable(feed: Sequence[SimRequest]) -> float:
    """Share of the prompt tokens that an endless cache would find."""
    seen: set[int] = set()
    found = 0
    for request in feed:
        blocks = blocks_of(request)
        found += 64 * next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    return found / sum(request.prompt_tokens for request in feed)


def test_a_feed_has_so_many_requests_in_order_at_exactly_the_rate() -> None:
    feed = feed_of_traffic(sharing(0.5, requests=300, rate_per_s=10.0), 1)
    times = [request.arrival_s for request in feed]
    assert len(feed) == 300
    assert times == sorted(times)
    assert times[-1] == pytest.approx(30.0)
    assert [request.index for request in feed] == list(range(300))


def test_more_sharing_leaves_more_to_reuse() -> None:
    found = [reusable(feed_of_traffic(sharing(share, requests=400, rate_per_s=10.0), 0)) for share in (0.1, 0.5, 0.7)]
    assert found == sorted(found)
    assert found[0] < 0.15
    assert found[2] > 0.5


def test_a_shift_changes_sharing_and_rate_at_half_of_the_requests_and_reuses_nothing_before_it() -> None:
    feed = feed_of_traffic(shift(requests=800, rates=(10.0, 20.0)), 0)
    before, after = feed[:400], feed[400:]
    assert reusable(before) < 0.1 < 0.3 < reusable(after)
    assert before[-1].arrival_s == pytest.approx(40.0)
    assert after[-1].arrival_s == pytest.approx(60.0)
    assert not set(blocks_of(*before)) & set(blocks_of(*after))


def test_prompts_grow_from_1k_to_8k_tokens() -> None:
    lengths = [one.prompt_tokens for one in feed_of_traffic(longer(requests=200, rates=(10.0, 5.0)), 0)]
    assert np.mean(lengths[:100]) == pytest.approx(1000, rel=0.1)
    assert np.mean(lengths[100:]) == pytest.approx(8000, rel=0.1)


def test_streams_of_a_mix_are_side_by_side() -> None:
    feed = feed_of_traffic(mixed(requests=400, rate_per_s=10.0), 0)
    marks = [blocks_of(request)[0] >> 48 for request in feed]
    assert [marks.count(mark) for mark in range(4)] == [100] * 4
    assert len(set(marks[:40])) == 4


def test_steps_of_a_ladder_are_equal_in_time_and_differ_in_rate() -> None:
    feed = feed_of_traffic(scenario("C", requests=300, rates_per_s=(5.0, 10.0)), 0)
    assert feed[-1].arrival_s == pytest.approx(40.0)
    first = sum(request.arrival_s < 20.0 for request in feed)
    assert first == pytest.approx(100, rel=0.2)
    assert set(blocks_of(*feed[:first])) & set(blocks_of(*feed[first:])), "users of one step go on in the next"


def test_the_next_turn_of_a_conversation_begins_with_the_answer() -> None:
    feed = feed_of_traffic(scenario("D", requests=1500, rates_per_s=(5.0,)), 0)
    assert any(request.output_blocks for request in feed)


def test_prefill_only_has_answers_of_one_token() -> None:
    feed = feed_of_traffic(sharing(0.5, requests=20, rate_per_s=10.0, output_tokens=1), 0)
    assert {request.output_tokens for request in feed} == {1}


def test_a_trace_runs_at_another_rate_and_too_short_a_one_is_an_error(tmp_path: Path) -> None:
    row = '{{"timestamp": {}, "input_length": 600, "output_length": 9, "hash_ids": [1, {}]}}\n'
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(row.format(100 * n, n + 2) for n in range(50)))
    feed = feed_of_traffic(traced("own", str(file), requests=40, rate_per_s=4.0), 0)
    assert len(feed) == 40
    assert feed[-1].arrival_s == pytest.approx(10.0)
    with pytest.raises(TraceError, match="own: 50 requests pass the filters; expected 60"):
        feed_of_traffic(traced("own", str(file), requests=60, rate_per_s=4.0), 0)


def test_a_scaled_traffic_has_fewer_requests_at_the_same_rate() -> None:
    traffic = shift(requests=800, rates=(10.0, 20.0)).scaled(0.25)
    assert (traffic.requests, traffic.label) == (200, "5 to 50 % shared, 10 to 20/s")


def test_requests_arrive_by_the_steps_of_their_phase() -> None:
    phase = Phase(streams=(sharing_shape(0.5),), requests=30, rates_per_s=(1.0, 2.0))
    assert (phase.step_s, phase.duration_s) == (10.0, 20.0)
    assert [phase.arrival_s(share) for share in (0.0, 1 / 6, 1 / 3, 2 / 3, 1.0)] == pytest.approx([0, 5, 10, 15, 20])


def test_the_same_seed_is_the_same_feed_and_another_is_not() -> None:
    traffic = Traffic(name="x", phases=(Phase(streams=(sharing_shape(0.5),), requests=50, rates_per_s=(5.0,)),))
    feed_of_traffic.cache_clear()
    one = feed_of_traffic(traffic, 0)
    feed_of_traffic.cache_clear()
    assert feed_of_traffic(traffic, 0) == one != feed_of_traffic(traffic, 1)
