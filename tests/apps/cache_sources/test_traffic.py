from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from gorgo.apps.cache_sources.prompts import TextChain
from gorgo.apps.cache_sources.traffic import ContextTraffic, ConversationTraffic, feed_of_traffic
from gorgo.sim.workload import SimRequest

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
