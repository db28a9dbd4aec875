"""Feeds: shapes at a rate, conversations, questions on contexts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from experiments.systems.llm_d import scenario
from experiments.systems.lodestar import longer_prompts, mixed, more_sharing, sharing, sharing_shape
from experiments.traffic import (
    ChatTraffic,
    ContextTraffic,
    ConversationTraffic,
    Phase,
    PhasedTraffic,
    ReuseTraffic,
    TextChain,
    feed_of_traffic,
    one_phase,
)
from gorgo.errors import TraceError
from gorgo.lab.sim.workload import SimRequest


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
    feed = feed_of_traffic(more_sharing().scaled(800 / 6000), 0)
    before, after = feed[:400], feed[400:]
    assert reusable(before) < 0.1 < 0.3 < reusable(after)
    assert before[-1].arrival_s == pytest.approx(400 / 3.0)
    assert after[-1].arrival_s == pytest.approx(400 / 3.0 + 400 / 6.5)
    assert not set(blocks_of(*before)) & set(blocks_of(*after))


def test_prompts_grow_from_1k_to_8k_tokens() -> None:
    lengths = [one.prompt_tokens for one in feed_of_traffic(longer_prompts().scaled(200 / 6000), 0)]
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
    feed = feed_of_traffic(one_phase("own", str(file), requests=40, rates_per_s=(4.0,)), 0)
    assert len(feed) == 40
    assert feed[-1].arrival_s == pytest.approx(10.0)
    with pytest.raises(TraceError, match="own: 50 requests pass the filters; expected 60"):
        feed_of_traffic(one_phase("own", str(file), requests=60, rates_per_s=(4.0,)), 0)


def test_a_scaled_traffic_has_fewer_requests_at_the_same_rate() -> None:
    traffic = more_sharing().scaled(0.25)
    assert (traffic.requests, traffic.label) == (1500, "5 to 50 % shared, 3 to 6.5/s")
    assert traffic.scaled(1e-9).requests == 2 * 10
    chat = ChatTraffic(name="chat", trace="art-chat-apr5", requests=2400).at(0.5)
    assert (chat.scaled(0.1).requests, chat.label, chat.traces) == (240, "chat@0.5", ["art-chat-apr5"])


def test_requests_arrive_by_the_steps_of_their_phase() -> None:
    phase = Phase(streams=(sharing_shape(0.5),), requests=30, rates_per_s=(1.0, 2.0))
    assert (phase.step_s, phase.duration_s) == (10.0, 20.0)
    assert [phase.arrival_s(share) for share in (0.0, 1 / 6, 1 / 3, 2 / 3, 1.0)] == pytest.approx([0, 5, 10, 15, 20])


def test_the_same_seed_is_the_same_feed_and_another_is_not() -> None:
    traffic = PhasedTraffic(name="x", phases=(Phase(streams=(sharing_shape(0.5),), requests=50, rates_per_s=(5.0,)),))
    feed_of_traffic.cache_clear()
    one = feed_of_traffic(traffic, 0)
    feed_of_traffic.cache_clear()
    assert feed_of_traffic(traffic, 0) == one != feed_of_traffic(traffic, 1)


# -- conversations and contexts

Kind = Literal["continued", "branching", "resumed"]
KINDS: tuple[Kind, ...] = ("continued", "branching", "resumed")


def conversations(kind: Kind) -> Sequence[SimRequest]:
    return feed_of_traffic(ConversationTraffic(kind=kind, requests=600, starts_per_s=2.0), seed=1)


def followers(feed: Sequence[SimRequest], request: SimRequest) -> list[SimRequest]:
    """Return later requests that begin with all full blocks of a request and its answer."""
    whole = request.blocks + request.output_blocks
    return [other for other in feed[request.index + 1 :] if other.blocks.startswith(whole)]


def test_prompts_of_the_same_texts_have_the_same_blocks() -> None:
    start = TextChain(block_tokens=4).followed_by(7, 6)
    assert start.followed_by(8, 5).blocks == TextChain(block_tokens=4).followed_by(7, 6).followed_by(8, 5).blocks
    assert start.followed_by(8, 5).blocks[:8] == start.followed_by(9, 5).blocks[:8], "the first text alone"
    assert start.followed_by(8, 5).blocks[8:] != start.followed_by(9, 5).blocks[8:], "from the block that has both"


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_have_their_rate_and_go_on_with_the_answers(kind: Kind) -> None:
    feed = conversations(kind)
    assert len(feed) == 600
    assert [request.index for request in feed] == list(range(600))
    assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(feed))
    assert np.mean([bool(followers(feed, request)) for request in feed[:200]]) > 0.5
    assert all(request.boundaries[-1] == request.prompt_tokens for request in feed)
    assert all(len(request.blocks) // 8 == request.prompt_tokens // 16 for request in feed)
    assert feed == feed_of_traffic.__wrapped__(ConversationTraffic(kind=kind, requests=600, starts_per_s=2.0), seed=1)


def test_branches_begin_with_the_same_texts() -> None:
    """The prompts that have all of a prompt but its last text."""
    siblings = {}
    for kind in KINDS:
        feed = conversations(kind)
        shared = [request.blocks[: request.boundaries[-2] // 16 * 8] for request in feed if len(request.boundaries) > 2]
        siblings[kind] = len(shared) - len(set(shared))
    assert siblings["continued"] == siblings["resumed"] == 0
    assert siblings["branching"] > 50


def test_resumed_conversations_pause() -> None:
    pauses = {}
    for kind in KINDS:
        feed = feed_of_traffic(ConversationTraffic(kind=kind, requests=600, starts_per_s=0.3), seed=1)
        gaps_s = [one[0].arrival_s - request.arrival_s for request in feed if (one := followers(feed, request))]
        pauses[kind] = sum(gap_s > 70.0 for gap_s in gaps_s)
    assert pauses["resumed"] > 20 > 2 * pauses["continued"]


def test_a_share_of_the_requests_is_on_the_first_context() -> None:
    traffic = ContextTraffic(
        name="one", contexts=20, context_tokens=640, first_share=0.8, requests=2000, rate_per_s=50.0
    )
    feed = feed_of_traffic(traffic, seed=1)
    on_first = np.mean([request.prefix_hash == 0 for request in feed])
    assert 0.77 < on_first < 0.83
    assert {request.boundaries[0] for request in feed} == {640}
    assert 35.0 < feed[-1].arrival_s < 45.0


def test_popular_contexts_are_drawn_more_often() -> None:
    traffic = ContextTraffic(
        name="many", contexts=100, context_tokens=64, popularity=1.0, requests=2000, rate_per_s=50.0
    )
    drawn = [request.prefix_hash for request in feed_of_traffic(traffic, seed=1)]
    assert drawn.count(0) > 3 * drawn.count(9) > 0


def test_a_prefix_returns_after_an_even_number_of_others_and_answers_are_normal() -> None:
    traffic = ReuseTraffic(
        name="even", requests=3000, rate_per_s=50.0, lengths=(1000, 9000), output_mean=100.0, output_deviation=10.0,
        distance_max=20,
    )  # fmt: skip
    feed = feed_of_traffic(traffic, seed=1)
    prompts, answers = (np.array([getattr(one, f"{kind}_tokens") for one in feed]) for kind in ("prompt", "output"))
    assert prompts.min() >= 1000
    assert prompts.max() <= 9000
    assert 4700 < prompts.mean() < 5300
    assert 99 < answers.mean() < 101
    assert 9 < answers.std() < 11
    recent: list[int] = []
    distances = []
    for request in feed:
        if request.prefix_hash in recent:
            distances.append(len(recent) - 1 - recent.index(request.prefix_hash))
            recent.remove(request.prefix_hash)
        recent.append(request.prefix_hash)
    counts = np.bincount(distances)
    assert len(counts) == 21
    assert counts.min() > 90
    assert counts.max() < 180
    of_one = [one.blocks for one in feed if one.prefix_hash == feed[0].prefix_hash]
    shared = round(0.5 * feed[0].prompt_tokens) // 64 * 8
    assert len(of_one) > 1
    assert len({blocks[:shared] for blocks in of_one}) == 1
    assert len(set(of_one)) == len(of_one)
    assert feed == feed_of_traffic.__wrapped__(traffic, seed=1)
