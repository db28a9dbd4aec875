"""What no policy can know: the oracle's choice, the floor, and sessions pinned to replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.interface import Choice, Policy
from gorgo.core.prefix.residency import SharedRuns
from gorgo.lab.datasets import HerdShape, generate_requests, read_shape, shapes
from gorgo.lab.sim.engine.engines import Engine as AnyEngine
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.profiles import find_profile
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.engine.vllm import VllmModel
from gorgo.lab.sim.fleet import SimFleet, SimReplica, find_fleet, with_accurate_priors
from gorgo.lab.sim.lower_bound import lower_bound
from gorgo.lab.sim.network import Link
from gorgo.lab.sim.oracle import DEAD_MS, Oracle, make_oracle
from gorgo.lab.sim.pinned import EXACT_ASSIGNMENTS, Pinned, _Search, assign, sessions_of
from gorgo.lab.sim.scenarios import find_scenario
from gorgo.lab.sim.simulation import Simulation
from gorgo.lab.sim.workload import SimRequest
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from tests.lab.sim.fleets import round_profile, three_regions
from tests.policies.table import choose, request, table

# --- The oracle's choice on engines that are written down by hand.


NAMES = ("near", "far")


@dataclass(slots=True)
class Engine:
    """What the oracle sees of one; nothing moves."""

    rtt_s: float
    model: AnyEngine[EngineRequest] = field(default_factory=lambda: EngineModel(round_profile(), item_bytes=1))
    in_transit: list[tuple[float, EngineRequest]] = field(default_factory=list)
    alive: bool = True

    def serve(self, prompt: bytes, output_tokens: int = 1) -> None:
        """From 0 on; the step under way is the last word."""
        self.model.submit(a_request(prompt, output_tokens), now=0.0)
        if self.model.step is None:
            self.model.start_step(now=0.0)


def a_request(prompt: bytes, output_tokens: int = 1) -> EngineRequest:
    return EngineRequest(prompt, prompt_tokens=len(prompt), output_tokens=output_tokens)


def ask(prompt: bytes) -> RouteRequest:
    return RouteRequest("r", 0.0, prompt_tokens=len(prompt), blocks=prompt, block_tokens=1.0, prefix_hash=0)


def looking(near: Engine, far: Engine) -> Oracle:
    oracle = make_oracle()
    oracle.observe({"near": near, "far": far})
    return oracle


def test_it_is_a_policy_with_the_preferences_of_gorgo_ms() -> None:
    oracle = make_oracle()
    assert isinstance(oracle, Policy)
    assert [(spec.name, spec.default) for spec in oracle.weight_specs] == [
        ("lambda", 0.15),
        ("delta", 25.0),
        ("eta", 800.0),
    ]


def test_terms_are_as_computed_by_hand() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"x" * 80, 5)  # its prefill ends at 90 ms
    near.in_transit.append((0.004, a_request(b"y" * 40)))  # 50 ms from then on, together with the newcomer
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    terms = {name: column.round(6).tolist() for name, column in chosen.terms.items()}
    # Near: at 90 ms a step of 10 + 40 + 50 ms; the newcomer is there at 5 ms and alone would take 60.
    assert terms == {
        "rtt": [10.0, 100.0],
        "queue": [190.0 - 5.0 - 60.0, 0.0],
        "prefill": [60.0, 60.0],
        "externality": [(0.15 * 60.0 + 25.0) * 2, 0.0],
        "room": [0.0, 0.0],
        "shared": [0.0, 0.0],
    }
    assert chosen.row == 1
    assert chosen.predicted_ttft_s == pytest.approx(0.160)


def test_a_replica_that_was_sent_many_prefills_is_priced_as_by_gorgo_ms() -> None:
    shares: dict[str, Any] = {"prefill_share": [0.5, 0.25], "prefill_share_s": [0.0, 0.0]}
    chosen = choose(looking(Engine(0.010), Engine(0.100)), table(2, names=NAMES, **shares), asked=ask(b"z" * 50))
    assert chosen.terms["externality"].round(6).tolist() == [400.0, 200.0]


def test_it_knows_how_full_a_pool_is_and_who_lacks_a_shared_run() -> None:
    """The near pool has a prompt of 100 tokens, of which the index knows nothing; half of all tokens are found."""
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"s" * 80 + b"x" * 20)
    capacity = near.model.cache.capacity_tokens
    rows = replace(table(2, names=NAMES), shared=SharedRuns([80.0, 0.0], [0.0, 40.0]), found_share=0.5)
    terms = choose(looking(near, far), rows, asked=ask(b"s" * 80 + b"y" * 20)).terms
    full = 1.0 - near.model.cache.free_tokens / capacity
    assert full == pytest.approx(101 / capacity, abs=2 / capacity)
    assert terms["prefill"].round(6).tolist() == [30.0, 110.0]
    assert terms["room"] == pytest.approx([30.0 * full * 0.5, 0.0])
    assert terms["shared"] == pytest.approx([0.0, -110.0 * 40 / 100], rel=1e-6)


def test_an_engine_of_vllm_decodes_beside_the_newcomers_prompt() -> None:
    """Its prompt of 80 ends at 90 ms; then a step has 50 tokens and one more, and a millisecond for who decodes."""
    profile = replace(round_profile(), scheduler="vllm")
    near, far = Engine(0.010, VllmModel(profile, item_bytes=1)), Engine(0.100, VllmModel(profile, item_bytes=1))
    near.serve(b"x" * 80, 5)
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.terms["queue"].round(6).tolist() == [90.0 - 5.0 + 62.0 - 60.0, 0.0]
    assert chosen.terms["prefill"].round(6).tolist() == [60.0, 60.0]


def test_it_knows_what_is_cached_and_what_will_be() -> None:
    near, far = Engine(0.010), Engine(0.100)
    far.in_transit.append((0.001, a_request(b"s" * 95)))
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"s" * 95 + b"t" * 5))
    assert chosen.terms["prefill"].round(6).tolist() == [110.0, 15.0]


def test_a_slow_engine_is_as_slow_as_it_is() -> None:
    near, far = Engine(0.010), Engine(0.010)
    near.model.slowdown = 3.0
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.terms["prefill"].round(6).tolist() == [180.0, 60.0]
    assert chosen.row == 1


def test_a_dead_engine_is_the_last_resort() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.alive = False
    oracle = looking(near, far)
    chosen = choose(oracle, table(2, names=NAMES), asked=ask(b"z" * 50))
    assert chosen.row == 1
    assert chosen.cost is not None
    assert chosen.cost[0] >= DEAD_MS
    assert choose(oracle, table(1, names=("near",)), asked=ask(b"z")).row == 0


def test_a_body_that_does_not_fit_the_window_counts_its_round_trips() -> None:
    near, far = Engine(0.010), Engine(0.100)
    windows: dict[str, Any] = {"cwnd_bytes": [14_600.0] * 2, "rwnd_bytes": [65_535.0] * 2, "sent_s": [0.0] * 2}
    large = replace(ask(b"z" * 50), body_bytes=40_000)
    chosen = choose(looking(near, far), table(2, names=NAMES, **windows), asked=large)
    assert chosen.terms["rtt"].round(6).tolist() == [20.0, 200.0]


def test_an_idle_window_has_shrunk_by_the_time_of_the_decision() -> None:
    """A hundred seconds after it last sent something a connection is as a new one, but for its handshake."""
    near, far = Engine(0.010), Engine(0.100)
    windows: dict[str, Any] = {
        "cwnd_bytes": [200_000.0, 0.0],
        "rwnd_bytes": [200_000.0, 65_535.0],
        "connect_round_trips": [1.0, 2.0],
    }
    large = replace(ask(b"z" * 50), body_bytes=40_000)
    for sent_s, trips in ((99.9, 1), (0.0, 2)):
        rows = replace(table(2, names=NAMES, sent_s=[sent_s, np.inf], **windows), now=100.0)
        chosen = choose(looking(near, far), rows, asked=large)
        assert chosen.terms["rtt"].round(6).tolist() == [10.0 * trips, 100.0 * (2 + 2)]


def test_a_prediction_counts_from_the_receipt() -> None:
    """0.3 s at the proxy, a round trip of 10 ms, and 60 ms of prefill."""
    chosen = choose(
        looking(Engine(0.010), Engine(0.100)),
        replace(table(2, names=NAMES), now=5.3),
        asked=replace(ask(b"z" * 50), received_s=5.0),
    )
    assert chosen.predicted_ttft_s == pytest.approx(0.370)


def test_waiting_running_and_travelling_requests_are_all_in_flight() -> None:
    near, far = Engine(0.010), Engine(0.100)
    for _ in range(3):  # one runs, two wait for the end of its step
        near.serve(b"x" * 20)
    near.in_transit.append((9.0, a_request(b"y")))
    weights: dict[str, Any] = {"lambda": 0.1, "delta": 10.0}
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)
    assert chosen.terms["externality"].round(6).tolist() == [(0.1 * 60.0 + 10.0) * 4, 0.0]


def test_a_prefill_stalls_the_running_batch_at_most() -> None:
    near, far = Engine(0.010), Engine(0.100)
    for _ in range(near.model.profile.max_running_requests + 3):
        near.serve(b"x" * 20)
    weights: dict[str, Any] = {"lambda": 0.1, "delta": 10.0}
    chosen = choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)
    assert chosen.terms["externality"].round(6).tolist() == [(0.1 * 60.0 + 10.0) * 8, 0.0]


def test_weights_price_those_who_are_stalled() -> None:
    near, far = Engine(0.010), Engine(0.100)
    near.serve(b"x" * 20, 50)

    def priced(share: float, delta: float = 0.0) -> Choice:
        weights: dict[str, Any] = {"lambda": share, "delta": delta}
        return choose(looking(near, far), table(2, names=NAMES), asked=ask(b"z" * 50), **weights)

    assert priced(1.0).terms["externality"][0] == pytest.approx(60.0)
    assert (priced(0.1).row, priced(1.0).row, priced(1.0, delta=50.0).row) == (0, 0, 1)


# --- The floor by hand; that nothing is below it is tested where simulations run.


FLEET = three_regions()


def ask_lower_bound(
    index: int, prompt_tokens: int, blocks: str, output_tokens: int = 1, body_bytes: int = 0
) -> SimRequest:
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
    feed = [
        ask_lower_bound(0, 1100, "ab"),
        ask_lower_bound(1, 1700, "abc"),
        ask_lower_bound(2, 1536, "abc"),
        ask_lower_bound(3, 600, "b"),
    ]
    wanted = [p(1100), p(1700 - 1024, 1024), p(512, 1024), p(600)]
    assert lower_bound(feed, FLEET).ttft_s == pytest.approx([0.002 + each for each in wanted])


def test_an_answer_that_a_conversation_goes_on_with_is_in_the_cache() -> None:
    asked = replace(ask_lower_bound(0, 600, "a", output_tokens=500), output_blocks=b"b" * 8)
    feed = [asked, ask_lower_bound(1, 1700, "abc")]
    assert lower_bound(feed, FLEET).ttft_s == pytest.approx([0.002 + p(600), 0.002 + p(1700 - 1024, 1024)])


def test_what_comes_first_is_seen_first_whatever_the_order_of_the_feed() -> None:
    feed = [ask_lower_bound(0, 1100, "ab"), ask_lower_bound(1, 1700, "abc")]
    turned = lower_bound(feed[::-1], FLEET)
    assert turned.ttft_s[::-1] == pytest.approx(lower_bound(feed, FLEET).ttft_s)


def test_a_long_prompt_takes_a_step_per_chunk() -> None:
    tokens = 10_000
    alone_s = 3 * 0.012 + tokens / 11_500 + 1.6e-9 * tokens**2 / 2
    assert lower_bound([ask_lower_bound(0, tokens, "a" * 19)], FLEET).ttft_s == pytest.approx([0.002 + alone_s])


def test_output_is_decoded_alone() -> None:
    floor = lower_bound(
        [ask_lower_bound(0, 1000, "a", output_tokens=3), ask_lower_bound(1, 10, "", output_tokens=2001)], FLEET
    )
    base_s = 0.0075 + 0.0233 * 8 / 256 + 5e-5
    long_s = 2000 * base_s + 1.5e-8 * (2000 * 10 + 2000 * 2001 / 2)
    assert floor.e2e_s - floor.ttft_s == pytest.approx([2 * base_s + 1.5e-8 * (1001 + 1002), long_s], rel=1e-7)


def test_a_body_beyond_the_widest_window_takes_another_round_trip() -> None:
    small, large = (
        lower_bound([ask_lower_bound(0, 100, "", body_bytes=size)], FLEET).ttft_s[0] for size in (1_000_000, 5_000_000)
    )
    assert large - small == pytest.approx(0.002)


def test_in_a_mixed_fleet_each_request_has_the_replica_that_is_best_for_it() -> None:
    mixed = find_scenario("mixed-fleet").applied_to(FLEET)
    feed = [ask_lower_bound(0, 100, ""), ask_lower_bound(1, 60_000, "x" * 117)]
    each = [lower_bound(feed, SimFleet((replica,))).ttft_s for replica in mixed.replicas]
    assert lower_bound(feed, mixed).ttft_s.tolist() == [each[0][0], each[1][1]]


def test_one_token_is_always_computed() -> None:
    """A prompt of two whole blocks that came by has one of them to prefill; one of a token more has that token."""
    feed = [ask_lower_bound(0, 1024, "ab"), ask_lower_bound(1, 1024, "ab"), ask_lower_bound(2, 1025, "ab")]
    assert lower_bound(feed, FLEET).ttft_s[1:] == pytest.approx([0.002 + p(512, 512), 0.002 + p(1, 1024)])


def test_each_flight_takes_a_round_trip_of_the_replica() -> None:
    """The nearest is best even for a body of three flights on a wide open connection."""
    (ttft_s,) = lower_bound([ask_lower_bound(0, 100, "", body_bytes=9_000_000)], FLEET).ttft_s
    assert ttft_s == pytest.approx(3 * 0.002 + p(100))


def test_the_floor_of_nothing_is_nothing() -> None:
    assert len(lower_bound([], FLEET).ttft_s) == 0


# --- Sessions of a trace, the assignment against exhaustive search, and runs under it.


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


def estimate_s(
    feed: Sequence[SimRequest], sessions: Sequence[Sequence[int]], places: Sequence[int], among: SimFleet
) -> float:
    """The estimated cost of an assignment, summed up over all requests."""
    search = _Search(feed, sessions, among, BLOCK)
    for number, place in enumerate(places):
        search.put(number, place)
    return search.cost_s()


def exhaustive(feed: Sequence[SimRequest], sessions: Sequence[Sequence[int]], among: SimFleet) -> float:
    places = product(range(len(among.replicas)), repeat=len(sessions))
    return min(estimate_s(feed, sessions, each, among) for each in places)


@pytest.mark.parametrize("seed", range(6))
def test_few_sessions_are_assigned_as_well_as_by_trying_every_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    feed = drawn_feed(rng, sessions=4)
    among = fleet(0.001, 0.001, *([0.03] if seed % 2 else []), kv_tokens=int(rng.choice([150, 400, 100_000])))
    sessions = sessions_of(feed)[:7]
    feed = [feed[row] for rows in sessions for row in rows]
    sessions = sessions_of(feed)
    assert len(among.replicas) ** len(sessions) <= EXACT_ASSIGNMENTS
    places = assign(feed, sessions, among, block_tokens=BLOCK)
    assert estimate_s(feed, sessions, places, among) == pytest.approx(exhaustive(feed, sessions, among))


@pytest.mark.parametrize("seed", range(6))
def test_moves_and_exchanges_come_close_to_the_best_assignment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.lab.sim.pinned.EXACT_ASSIGNMENTS", 0)
    rng = np.random.default_rng(100 + seed)
    feed = drawn_feed(rng, sessions=5)
    among = fleet(0.001, 0.001, kv_tokens=int(rng.choice([150, 400, 100_000])))
    sessions = sessions_of(feed)
    places = assign(feed, sessions, among, block_tokens=BLOCK)
    found_s = estimate_s(feed, sessions, places, among)
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
