"""Sessions of a trace, the assignment against exhaustive search, and runs under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.policy.interface import Policy
from gorgo.lab.datasets import HerdShape, generate_requests, read_shape, shapes
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.faults.scenarios import with_accurate_priors
from gorgo.lab.sim.fleet import SimFleet, SimReplica
from gorgo.lab.sim.named_fleets import find_fleet
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.pinned import EXACT_ASSIGNMENTS, Pinned, assign, estimate_s, sessions_of
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from tests.policies.table import choose, request, table

BLOCK = 16


def prompt(index: int, blocks: str, *, at_s: float | None = None, tail: int = 1, body_bytes: int = 0) -> SimRequest:
    """A letter is a block of the text up to there; `tail` more tokens follow."""
    hashes = [blocks[: end + 1].encode().ljust(8, b".")[-8:] for end in range(len(blocks))]
    return SimRequest(
        index=index,
        arrival_s=float(index if at_s is None else at_s),
        prompt_tokens=BLOCK * len(blocks) + tail,
        output_tokens=4,
        blocks=b"".join(hashes),
        prefix_hash=0,
        body_bytes=body_bytes,
    )


def fleet(*rtts_s: float, kv_tokens: int = 100_000) -> SimFleet:
    profile = replace(find_profile("1xH100-Llama-3.1-8B"), kv_tokens=kv_tokens)
    replicas = [
        SimReplica(ReplicaSpec(f"r{number}", "here"), profile, Link(rtt_s=rtt_s)) for number, rtt_s in enumerate(rtts_s)
    ]
    return with_accurate_priors(SimFleet(tuple(replicas)))


def prompts(*texts: str) -> list[SimRequest]:
    return [prompt(index, text) for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "sessions"),
    [
        (("sa", "sb", "saa", "sbb", "saaa"), [[0, 2, 4], [1, 3]]),
        (("s", "s", "sa", "sb"), [[0], [1], [2], [3]]),  # a system prompt alone belongs to none of those behind it
        (("a", "ab", "abc", "abd", "abcc"), [[0, 1], [2, 4], [3]]),  # a conversation parts, and each part goes on
        (("a", "a", "ab"), [[0, 1, 2]]),  # the same question again, then the next one
        (("", "", "a"), [[0], [1], [2]]),  # prompts without a full block share nothing
        ((), []),
    ],
)
def test_a_session_is_a_chain_of_prompts_that_go_on_with_the_whole_one_before(
    texts: Sequence[str], sessions: list[list[int]]
) -> None:
    assert sessions_of(prompts(*texts)) == sessions


def test_sessions_are_in_the_order_of_time_whatever_the_order_of_the_feed() -> None:
    feed = [prompt(0, "saa", at_s=2.0), prompt(1, "sa", at_s=0.0), prompt(2, "sb", at_s=1.0)]
    assert sessions_of(feed) == [[1, 0], [2]]


def test_the_sessions_of_a_herd_are_those_that_it_was_made_of() -> None:
    shape = read_shape(shapes()["herd"])
    assert isinstance(shape, HerdShape)
    requests = generate_requests(replace(shape, groups=3, leaving_share=0.2, rounds=6))
    made: dict[str | None, list[int]] = {}
    for row, one in enumerate(requests):
        made.setdefault(one.user, []).append(row)
    assert sorted(sessions_of(feed_of(requests))) == sorted(made.values())


def drawn_feed(rng: np.random.Generator, sessions: int) -> list[SimRequest]:
    """Sessions of two groups in turns of random lengths, in any order."""
    texts = []
    for number in range(sessions):
        text = "st"[int(rng.integers(2))] * int(rng.integers(1, 4)) + "abcdefgh"[number]
        for _ in range(int(rng.integers(1, 5))):
            texts.append(text)
            text += "xyz"[number % 3] * int(rng.integers(1, 6))
    times = np.sort(rng.uniform(0, 3.0, len(texts)))
    return [
        prompt(
            index,
            texts[row],
            at_s=float(times[index]),
            tail=int(rng.integers(1, 16)),
            body_bytes=int(rng.integers(40_000)),
        )
        for index, row in enumerate(rng.permutation(len(texts)).tolist())
    ]


def exhaustive(feed: Sequence[SimRequest], sessions: Sequence[Sequence[int]], among: SimFleet) -> float:
    places = product(range(len(among.replicas)), repeat=len(sessions))
    return min(estimate_s(feed, sessions, each, among, block_tokens=BLOCK) for each in places)


@pytest.mark.parametrize("seed", range(12))
def test_few_sessions_are_assigned_as_well_as_by_trying_every_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feed = drawn_feed(rng, sessions=4)
    among = fleet(0.001, 0.001, *([0.03] if seed % 2 else []), kv_tokens=int(rng.choice([150, 400, 100_000])))
    sessions = sessions_of(feed)[:7]
    feed = [feed[row] for rows in sessions for row in rows]
    sessions = sessions_of(feed)
    assert len(among.replicas) ** len(sessions) <= EXACT_ASSIGNMENTS
    places = assign(feed, sessions, among, block_tokens=BLOCK)
    assert estimate_s(feed, sessions, places, among, block_tokens=BLOCK) == pytest.approx(
        exhaustive(feed, sessions, among)
    )


@pytest.mark.parametrize("seed", range(6))
def test_moves_and_exchanges_come_close_to_the_best_assignment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.lab.sim.pinned.EXACT_ASSIGNMENTS", 0)
    rng = np.random.default_rng(100 + seed)
    feed = drawn_feed(rng, sessions=5)
    among = fleet(0.001, 0.001, kv_tokens=int(rng.choice([150, 400, 100_000])))
    sessions = sessions_of(feed)
    places = assign(feed, sessions, among, block_tokens=BLOCK)
    found_s = estimate_s(feed, sessions, places, among, block_tokens=BLOCK)
    assert found_s <= 1.05 * exhaustive(feed, sessions, among)


def test_near_pools_are_filled_before_far_ones_and_none_beyond_its_size() -> None:
    """Six sessions of 40 blocks; a pool holds two of them, and the third replica is farther."""
    feed = [
        prompt(10 * turn + number, "abcdef"[number] * (10 * (turn + 1)), body_bytes=100)
        for turn in range(4)
        for number in range(6)
    ]
    sessions = sessions_of(feed)
    assert len(sessions) == 6
    places = assign(feed, sessions, fleet(0.001, 0.001, 0.0015, kv_tokens=40 * BLOCK * 2 + 50), block_tokens=BLOCK)
    assert Counter(places) == {0: 2, 1: 2, 2: 2}
    places = assign(feed, sessions, fleet(0.001, 0.001, 0.5, kv_tokens=100_000), block_tokens=BLOCK)
    assert Counter(places) == {0: 3, 1: 3}, "nothing goes far where the near pools have it all"


def test_sessions_of_one_group_stay_together_where_copies_of_its_system_prompt_cost_more_than_the_wait() -> None:
    texts = [head * 60 + own for own in "abcd" for head in "st"]
    feed = [prompt(number, text, at_s=10.0 * number) for number, text in enumerate(texts)]
    places = assign(feed, sessions_of(feed), fleet(0.001, 0.001), block_tokens=BLOCK)
    assert len({places[number] for number in range(0, 8, 2)}) == 1
    assert len({places[number] for number in range(1, 8, 2)}) == 1


def test_an_empty_trace_has_nothing_to_assign() -> None:
    assert assign([], [], fleet(0.001)) == []


def test_every_request_of_a_session_is_served_by_its_replica_alone() -> None:
    shape = read_shape(shapes()["herd"])
    assert isinstance(shape, HerdShape)
    requests = generate_requests(replace(shape, sessions=12, rounds=4, groups=3, gap_s=0.1))
    feed, policy = feed_of(requests), Pinned()
    assert isinstance(policy, Policy)
    records = Simulation(find_fleet("8x1xH100"), policy, seed=0).run(feed).records
    replicas: dict[str | None, set[str | None]] = {}
    for one, record in zip(requests, records, strict=True):
        replicas.setdefault(one.user, set()).add(record.replica)
    assert {len(used) for used in replicas.values()} == {1}
    assert len(set.union(*replicas.values())) >= 3


def test_where_the_replica_is_no_candidate_the_least_loaded_one_serves() -> None:
    policy = Pinned()
    policy.prepare([prompt(0, "a")], fleet(0.001), block_tokens=BLOCK)
    candidates = table(3, names=["x", "y", "z"], in_flight_requests=[2, 1, 3])
    choice = choose(policy, candidates, asked=replace(request(), request_id="0"))
    assert (choice.row, choice.fallback) == (1, "absent")
    there = choose(policy, table(2, names=["x", "r0"]), asked=replace(request(), request_id="0"))
    assert (there.row, there.fallback) == (1, None)


def test_a_herd_that_fits_into_the_pools_is_served_within_a_tenth_of_the_floor() -> None:
    """The gap that no policy which herds can show: `gorgo` sends nearly all to one replica."""
    shape = read_shape(shapes()["herd"])
    assert isinstance(shape, HerdShape)
    feed = feed_of(generate_requests(replace(shape, rounds=6)))
    floor, pinned, herded = (
        run_once(SimJob(trace="herd", feed=feed, policy=name, fleet=find_fleet("8x1xH100"))).row
        for name in ("floor", "pinned", "gorgo")
    )
    assert None not in (floor.ttft_ms.mean, pinned.ttft_ms.mean, herded.ttft_ms.mean)
    assert (pinned.ttft_ms.mean or 0.0) <= 1.1 * (floor.ttft_ms.mean or 0.0)
    assert (pinned.ttft_ms.p95 or 0.0) <= 1.1 * (floor.ttft_ms.p95 or 0.0)
    assert max(pinned.share.values()) < 0.6
    assert max(herded.share.values()) > 0.9
