""""""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import Outcome, RouteRequest
from gorgo.core.policy.interface import Candidates, Choice
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.core.prefix.index import Origin
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.core.router import Router
from gorgo.policies.base import rendezvous_scores
from gorgo.policies.multi_depth import (
    MultiDepth,
    RouteKey,
    RouteTable,
    bounded_load,
    jump_hash,
    prefixes_of,
    two_choices,
    whole_hash,
)
from gorgo.policies.registry import make_policy
from tests.core.routers import (
    BROKEN,
    COMPLETED,
    FAILED,
    REFUSED,
    a_request,
    blocks_of,
    dispatched,
    finished,
    make_router,
    submitted,
)
from tests.policies.table import choose, table

NAMES = ("replica-0", "replica-1", "replica-2", "replica-3")


def prompt(*words: int, name: str = "r", model: str | None = None) -> RouteRequest:
    return a_request(name, prompt_tokens=64 * len(words), blocks=blocks_of(*words), model=model)


def route(policy: MultiDepth, asked: RouteRequest, replica: int) -> None:
    """Let a replica answer: the only candidate of the decision."""
    choice = choose(policy, table(1, slots=[replica], names=[NAMES[replica]]), asked=asked)
    assert choice.learn is not None
    choice.learn(0.0)


def taught(replica: int, *words: int) -> MultiDepth:
    policy = MultiDepth()
    route(policy, prompt(*words), replica)
    return policy


def four(*, now: float = 0.0, in_flight_requests: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> Candidates:
    candidates = table(4, names=NAMES, in_flight_requests=in_flight_requests)
    candidates.now = now
    return candidates


def rows(policy: MultiDepth, prompts: Iterable[RouteRequest], *, miss: float = 0.0) -> list[int]:
    return [choose(policy, four(), asked=each, miss=miss).row for each in prompts]


def key_of(asked: RouteRequest) -> int:
    return int.from_bytes(asked.blocks[8:16], "little")


# -- match


@pytest.mark.parametrize("replica", range(4))
def test_a_prompt_that_continues_an_answered_one_goes_to_its_replica(replica: int) -> None:
    choice = choose(taught(replica, 1, 2, 3, 4), four(), asked=prompt(1, 2, 3, 4, 5, 6))
    assert (choice.row, choice.fallback) == (replica, None)
    assert choice.terms["route_tokens"].tolist() == [256.0 * (row == replica) for row in range(4)]


@pytest.mark.parametrize("replica", range(4))
def test_a_prompt_that_shares_only_the_beginning_finds_the_shallow_route(replica: int) -> None:
    choice = choose(taught(replica, 1, 2, 3, 4), four(), asked=prompt(1, 2, 9, 9))
    assert (choice.row, choice.fallback) == (replica, None)
    assert choice.terms["route_tokens"].max() == 128.0


def test_the_longest_match_wins_over_a_newer_shallow_one() -> None:
    policy = taught(0, 1, 2, 3, 4)
    route(policy, prompt(1, 2, 8, 8), 3)
    assert rows(policy, [prompt(1, 2, 3, 4), prompt(1, 2, 8, 8), prompt(1, 2, 7, 7)]) == [0, 3, 3]


@pytest.mark.parametrize(("depths", "routes", "branch"), [(2.0, 1, "no_match"), (1.0, 2, None)])
def test_a_single_depth_finds_prompts_that_continue_and_none_that_branch_off(
    depths: float, routes: int, branch: str | None
) -> None:
    policy = MultiDepth()
    choice = choose(policy, table(1, names=NAMES[:1]), asked=prompt(1, 2, 3, 4), depths=depths)
    assert choice.learn is not None
    choice.learn(0.0)
    found = [choose(policy, four(), asked=each).fallback for each in (prompt(1, 2, 3, 4, 5, 6), prompt(1, 2, 9, 9))]
    assert (len(policy.routes), found) == (routes, [None, branch])


def test_the_number_of_depths_changes_with_the_next_weights() -> None:
    policy = MultiDepth()
    learned = []
    for number, depths in enumerate((2.0, 1.0, 0.0)):
        choice = choose(policy, four(), asked=prompt(number, 2, 3, 4), depths=depths)
        assert choice.learn is not None
        before = len(policy.routes)
        choice.learn(0.0)
        learned.append(len(policy.routes) - before)
    assert learned == [1, 2, 1]


def test_one_depth_of_the_post_has_a_route_for_the_whole_prompt_and_spreads_prompts_with_one_beginning() -> None:
    siblings = [prompt(1, 2, number) for number in range(60)]
    by_whole = [choose(MultiDepth(), four(), asked=each, depths=0.0) for each in siblings]
    assert {choice.row for choice in by_whole} == {0, 1, 2, 3}
    assert {choice.fallback for choice in by_whole} == {"no_match"}
    for depths in (1.0, 2.0):
        rows_found = {choose(MultiDepth(), four(), asked=each, depths=depths).row for each in siblings}
        assert len(rows_found) == 1, "by the hash of the first 128 tokens all go to one replica"


def test_one_depth_of_the_post_finds_what_continues_a_prompt_and_nothing_that_branches_off() -> None:
    policy, asked = MultiDepth(), conversation(1, 2, 3, 4, ends=(64, 256))
    first = choose(policy, four(), asked=asked, depths=0.0)
    assert first.learn is not None
    first.learn(0.0)
    assert len(policy.routes) == 1
    found = choose(policy, four(), asked=conversation(1, 2, 3, 4, 5, 6, ends=(64, 256, 384)), depths=0.0)
    assert (found.row, found.fallback) == (first.row, None)
    assert choose(policy, four(), asked=prompt(1, 2, 9, 9), depths=0.0).fallback == "no_match"


def test_the_hash_of_a_whole_prompt_differs_with_its_end_and_with_its_length() -> None:
    short = replace(a_request("r", prompt_tokens=7, blocks=b""), prefix_hash=11)
    others = [replace(short, prefix_hash=12), replace(short, prompt_tokens=8), prompt(1, 2, 3), prompt(1, 2, 4)]
    assert len({whole_hash(each) for each in (short, *others)}) == 5
    assert whole_hash(replace(short, request_id="again")) == whole_hash(short)


def test_bounds_are_replaced_while_routes_are_in_use() -> None:
    policy = MultiDepth()
    for number in range(6):
        policy.routes.set_route((None, bytes([number])), NAMES[0], Origin.LOCAL, now=float(number))
    policy.set_route_limits(4, 10.0)
    policy.routes.check()
    stats = policy.route_stats(now=12.0)
    assert (stats.max_routes, stats.ttl_s, stats.routes["local"], stats.evicted["local"]) == (4, 10.0, 4, 2)
    assert stats.unused_s == {"local": 10.0}
    assert policy.routes.replica_of((None, bytes([2])), now=12.1) is None
    assert policy.routes.replica_of((None, bytes([3])), now=12.1) == NAMES[0]


def test_a_router_hands_its_bounds_to_the_policy_at_the_start_at_a_change_and_to_another_policy() -> None:
    router = make_router("a", policy="multi-depth", limits=RouterLimits(max_routes=7, route_ttl_s=60.0))
    stats = router.settings.route_stats(now=0.0)
    assert stats is not None
    assert (stats.max_routes, stats.ttl_s, sum(stats.routes.values())) == (7, 60.0, 0)
    router.settings.set_limits(RouterLimits(max_routes=5), now=0.0)
    other = MultiDepth()
    router.settings.set_policy(other, Weights.of(other.weight_specs), now=1.0)
    assert (other.routes.max_routes, other.routes.ttl_s) == (5, 3600.0)
    plain = make_policy("random")
    router.settings.set_policy(plain, Weights.of(plain.weight_specs), now=2.0)
    assert router.settings.route_stats(now=2.0) is None


def test_a_route_to_a_replica_that_is_no_candidate_gives_way_to_a_shallower_one() -> None:
    policy = taught(1, 1, 2)
    policy.routes.set_route((None, prompt(1, 2, 3, 4).blocks[-8:]), "replica-9", Origin.LOCAL, now=0.0)
    choice = choose(policy, four(), asked=prompt(1, 2, 3, 4))
    assert (choice.row, choice.terms["route_tokens"].max()) == (1, 128.0)


def test_models_have_routes_of_their_own() -> None:
    policy = MultiDepth()
    route(policy, prompt(1, 2, model="m"), 2)
    assert choose(policy, four(), asked=prompt(1, 2, model="m")).fallback is None
    assert choose(policy, four(), asked=prompt(1, 2, model="n")).fallback == "no_match"


def test_a_route_ends_an_hour_after_its_last_use() -> None:
    policy = taught(1, 1, 2)
    fallbacks = [choose(policy, four(now=now), asked=prompt(1, 2)).fallback for now in (3600.0, 7200.0, 10800.1)]
    assert fallbacks == [None, None, "no_match"]


def test_a_prompt_below_128_tokens_has_no_route_and_goes_by_its_hash() -> None:
    policy = MultiDepth()
    choice = choose(policy, four(), asked=prompt(1))
    assert (choice.learn, choice.fallback) == (None, "no_match")
    assert choice.row == int(rendezvous_scores(four().salt, 1).argmax())


# -- ends of messages


def conversation(*words: int, ends: Sequence[int], name: str = "r") -> RouteRequest:
    """Return a prompt of blocks of 64 tokens whose messages end after so many tokens."""
    return replace(prompt(*words, name=name), boundaries=tuple(ends))


def exact(*words: int, ends: Sequence[int], block_tokens: int = 16) -> RouteRequest:
    """Return a prompt with exact tokens, a word for each 16 of them, and no block of text."""
    ids = token_bytes([word for word in words for _ in range(16)])
    hashes = chain_hashes(ids, block_tokens=block_tokens)
    asked = a_request("r", prompt_tokens=16 * len(words))
    return replace(asked, kv_hashes={block_tokens: hashes}, boundaries=tuple(ends))


@pytest.mark.parametrize(
    ("ends", "depths"),
    [
        ((64, 192, 256), [64, 192, 256]),
        ((63, 65, 127, 200), [64, 192]),
        ((3, 64), [64]),
        ((330,), []),
        ((), [128, 256]),
    ],
)
def test_a_prompt_has_a_route_at_the_end_of_each_message_else_every_128_tokens(
    ends: Sequence[int], depths: Sequence[int]
) -> None:
    found = prefixes_of(conversation(1, 2, 3, 4, ends=ends))
    assert [prefix.tokens for prefix in found] == depths
    assert [prefix.key[1] for prefix in found] == [
        prompt(1, 2, 3, 4).blocks[8 * (depth // 64 - 1) :][:8] for depth in depths
    ]


@pytest.mark.parametrize("block_tokens", [1, 8, 16])
def test_with_exact_tokens_ends_are_aligned_down_to_16(block_tokens: int) -> None:
    found = prefixes_of(exact(1, 2, 3, 4, ends=(3, 15, 17, 31, 40, 64), block_tokens=block_tokens))
    assert [prefix.tokens for prefix in found] == [16.0, 32.0, 64.0]
    branch = prefixes_of(exact(1, 2, 9, 9, ends=(3, 15, 17, 31, 40, 64), block_tokens=block_tokens))
    assert [one.key == other.key for one, other in zip(found, branch, strict=True)] == [True, True, False]


def test_blocks_that_no_16_tokens_end_are_not_read() -> None:
    asked = replace(conversation(1, 2, ends=(64,)), kv_hashes={32: [1, 2, 3, 4], 3: [1] * 40})
    assert prefixes_of(asked) == prefixes_of(conversation(1, 2, ends=(64,)))


def test_a_shorter_branch_finds_the_replica_of_the_shared_system_prompt() -> None:
    policy = MultiDepth()
    route(policy, conversation(1, 2, 3, 4, ends=(64, 256)), 2)
    assert rows(policy, [conversation(1, 8, 8, 8, ends=(64, 256))]) == [2]
    assert choose(policy, four(), asked=prompt(1, 8, 8, 8)).fallback == "no_match", "it has no end of a message"


def test_a_later_turn_goes_to_the_replica_of_the_longest_turn_before() -> None:
    policy = MultiDepth()
    route(policy, exact(1, ends=(16,)), 0)
    route(policy, exact(1, 2, 3, ends=(16, 40)), 3)
    assert rows(policy, [exact(1, 2, 3, 4, ends=(16, 40, 60)), exact(1, 5, ends=(16, 32))]) == [3, 3]


def test_a_route_of_another_router_is_found_beside_ends_of_messages() -> None:
    policy = MultiDepth()
    asked = conversation(1, 2, 3, 4, ends=(64, 192, 256))
    assert choose(policy, four(), asked=asked).fallback == "no_match"
    policy.add_remote_route(None, asked.blocks[16:24], NAMES[3], now=0.0)
    choice = choose(policy, four(), asked=asked)
    assert (choice.row, choice.terms["route_tokens"].max()) == (3, 192.0)


def test_single_is_the_end_of_the_last_message() -> None:
    policy = MultiDepth()
    asked = conversation(1, 2, 3, 4, ends=(64, 192))
    choice = choose(policy, table(1, names=NAMES[:1]), asked=asked, depths=2.0)
    assert choice.learn is not None
    choice.learn(0.0)
    [key] = [prefix.key for prefix in prefixes_of(asked) if policy.routes.replica_of(prefix.key, now=0.0)]
    assert key == prefixes_of(asked)[-1].key


def test_without_a_route_ends_of_messages_do_not_move_a_prompt() -> None:
    assert rows(MultiDepth(), PROMPTS) == rows(MultiDepth(), [replace(each, boundaries=(64, 192)) for each in PROMPTS])


# -- miss


PROMPTS = [prompt(number, 0, 5) for number in range(60)]


def test_without_a_route_the_bounded_load_hash_of_the_first_128_tokens_decides() -> None:
    by_hash = [int(rendezvous_scores(four().salt, key_of(each)).argmax()) for each in PROMPTS]
    assert rows(MultiDepth(), PROMPTS) == rows(MultiDepth(), PROMPTS, miss=1.0) == by_hash
    assert set(by_hash) == {0, 1, 2, 3}


def test_a_larger_load_factor_lets_a_fuller_replica_serve() -> None:
    asked = PROMPTS[0]
    home = choose(MultiDepth(), four(), asked=asked).row
    busy = four(in_flight_requests=[2.0 * (row == home) + 1.0 for row in range(4)])
    assert choose(MultiDepth(), busy, asked=asked).row != home
    assert choose(MultiDepth(), busy, asked=asked, load_factor=2.0).row == home


def test_two_choices_go_to_the_second_beyond_the_bias() -> None:
    asked = PROMPTS[0]
    second, home = np.argsort(rendezvous_scores(four().salt, key_of(asked)))[-2:].tolist()
    busy = four(in_flight_requests=[3.0 * (row == home) for row in range(4)])
    found = [choose(MultiDepth(), busy, asked=asked, miss=1.0, override=0.0, bias=bias).row for bias in (2.0, 3.0)]
    assert found == [second, home]


def test_jump_and_modular_hash_do_not_read_the_load_without_the_override() -> None:
    busy = four(in_flight_requests=[50.0, 0.0, 60.0, 9.0])
    jump, modular = (
        [choose(MultiDepth(), busy, asked=each, miss=miss, override=0.0).row for each in PROMPTS] for miss in (2.0, 3.0)
    )
    assert jump == [jump_hash(key_of(each), 4) for each in PROMPTS]
    assert modular == [key_of(each) % 4 for each in PROMPTS]


# -- override


@pytest.mark.parametrize(("load", "row", "fallback"), [(8.0, 1, None), (9.0, 0, "overloaded")])
def test_above_twice_the_median_and_two_the_least_loaded_serves(load: float, row: int, fallback: str | None) -> None:
    candidates = four(in_flight_requests=[1.0, load, 3.0, 3.0])
    choice = choose(taught(1, 1, 2), candidates, asked=prompt(1, 2))
    assert (choice.row, choice.fallback) == (row, fallback)


def test_the_override_holds_for_a_hash_too_and_can_be_off() -> None:
    asked = PROMPTS[0]
    home = key_of(asked) % 4
    busy = four(in_flight_requests=[30.0 * (row == home) for row in range(4)])
    diverted = choose(MultiDepth(), busy, asked=asked, miss=3.0)
    assert diverted.row != home
    assert diverted.fallback == "overloaded"
    assert choose(MultiDepth(), busy, asked=asked, miss=3.0, override=0.0).row == home


def test_a_lone_replica_is_never_diverted_from() -> None:
    candidates = table(1, names=NAMES[1:2], in_flight_requests=[90.0])
    assert choose(taught(1, 1, 2), candidates, asked=prompt(1, 2)).fallback is None


def test_a_diversion_leaves_the_route_with_the_replica_first_chosen() -> None:
    policy = taught(1, 1, 2)
    diverted: Choice = choose(policy, four(in_flight_requests=[1.0, 90.0, 3.0, 3.0]), asked=prompt(1, 2, 3, 4))
    assert diverted.row == 0
    assert diverted.learn is not None
    diverted.learn(1.0)
    again = choose(policy, four(), asked=prompt(1, 2, 3, 4))
    assert (again.row, again.terms["route_tokens"].max()) == (1, 256.0)


# -- weights

MISSED = next(each for each in PROMPTS if choose(MultiDepth(), four(), asked=each).row != key_of(each) % 4)
HOME, SECOND = np.argsort(-rendezvous_scores(four().salt, key_of(MISSED)).astype(float))[:2].tolist()
#: Per weight of a decision: a prompt with a route to replica 1 or with none, other weights, loads, and the rows chosen.
EFFECTS = {
    "miss": (MISSED, {}, [0.0] * 4, (HOME, key_of(MISSED) % 4)),
    "load_factor": (MISSED, {"override": 0.0}, [4.0 * (row == HOME) + 1.0 for row in range(4)], (SECOND, HOME)),
    "bias": (MISSED, {"override": 0.0, "miss": 1.0}, [4.0 * (row == HOME) for row in range(4)], (SECOND, HOME)),
    "override": (prompt(1, 2), {}, [1.0, 900.0, 0.0, 1.0], (1, 2)),
    "margin": (prompt(1, 2), {}, [1.0, 90.0, 0.0, 1.0], (2, 1)),
}


@pytest.mark.parametrize("spec", MultiDepth.weight_specs[1:], ids=lambda spec: spec.name)
def test_each_weight_takes_effect_at_once_on_routes_that_are_there(spec: WeightSpec) -> None:
    policy = taught(1, 1, 2)
    asked, others, load, (at_low, at_high) = EFFECTS[spec.name]
    found = []
    for value in (spec.low, spec.high, spec.low):
        weights = Weights.of(policy.weight_specs, {**others, spec.name: value})
        choice = policy.choose(asked, four(in_flight_requests=load), weights, np.random.default_rng(0))
        found.append(choice.row)
    assert found == [at_low, at_high, at_low]


# -- answers


def ended(router: Router, asked: RouteRequest, outcome: Outcome, *, now: float) -> str:
    dispatch = dispatched(submitted(router, asked, now=now))
    finished(router, dispatch.attempt_id, outcome, now=now + 1.0)
    return dispatch.replica


@pytest.mark.parametrize(("outcome", "routes"), [(COMPLETED, 2), (BROKEN, 0), (REFUSED, 0)])
def test_routes_are_learned_from_completed_attempts_alone(outcome: Outcome, routes: int) -> None:
    router = make_router("a", policy="multi-depth")
    ended(router, prompt(1, 2, 3, 4), outcome, now=0.0)
    assert isinstance(router.settings.policy, MultiDepth)
    assert len(router.settings.policy.routes) == routes


def test_a_retry_teaches_the_replica_that_answered() -> None:
    router = make_router("a", "b", "c", policy="multi-depth")
    first = dispatched(submitted(router, prompt(1, 2, name="first"), now=0.0))
    second = dispatched(finished(router, first.attempt_id, FAILED, now=1.0))
    finished(router, second.attempt_id, COMPLETED, now=2.0)
    again = dispatched(submitted(router, prompt(1, 2, name="again"), now=3.0))
    assert again.replica == second.replica != first.replica
    assert again.decision.fallback is None


def test_two_routers_given_the_same_requests_decide_the_same() -> None:
    def replicas() -> list[str]:
        router = make_router("a", "b", "c", policy="multi-depth")
        return [
            ended(router, prompt(number % 7, number % 3, number, name=str(number)), COMPLETED, now=2.0 * number)
            for number in range(40)
        ]

    assert replicas() == replicas()


SALT = np.arange(1, 6, dtype=np.uint64) * np.uint64(7919)
KEYS = range(200)


def order(key: int) -> list[int]:
    return [int(row) for row in np.argsort(rendezvous_scores(SALT, key))[::-1]]


def test_a_bounded_load_hash_is_the_plain_hash_while_loads_are_equal() -> None:
    assert [bounded_load(SALT, key, np.zeros(5), factor=1.25) for key in KEYS] == [order(key)[0] for key in KEYS]


def test_a_bounded_load_hash_skips_the_replicas_at_the_bound() -> None:
    """Nine in flight and this one are two per replica: the bound is ceil(2.5)."""
    for key in KEYS:
        first, second, *others = order(key)
        load = np.zeros(5)
        load[[first, second, others[0]]] = (3, 3, 3)
        assert bounded_load(SALT, key, load, factor=1.25) == others[1]
        load[[first, second, others[0]]] = (4, 2, 3)
        assert bounded_load(SALT, key, load, factor=1.25) == second


def test_no_load_puts_every_replica_at_the_bound() -> None:
    rng = np.random.default_rng(0)
    for key in KEYS:
        load = rng.integers(0, 20, 5).astype(float)
        row = bounded_load(SALT, key, load, factor=1.0)
        assert load[row] < np.ceil((load.sum() + 1.0) / 5)


@pytest.mark.parametrize(("lead", "place"), [(2, 0), (3, 1)])
def test_the_second_choice_serves_where_it_is_better_by_more_than_the_bias(lead: int, place: int) -> None:
    for key in KEYS:
        load = np.full(5, 1.0)
        load[order(key)[0]] += lead
        assert two_choices(SALT, key, load, bias=2.0) == order(key)[place]


def test_one_replica_is_both_choices() -> None:
    assert two_choices(SALT[:1], 9, np.full(1, 50.0), bias=2.0) == 0


def test_jump_hash_moves_keys_to_the_new_bucket_alone() -> None:
    keys = [number * 0x9E37_79B9_7F4A_7C15 % 2**64 for number in range(2000)]
    for buckets in (1, 2, 5, 10):
        before, after = [jump_hash(key, buckets) for key in keys], [jump_hash(key, buckets + 1) for key in keys]
        moved = [new for old, new in zip(before, after, strict=True) if new != old]
        assert set(moved) == {buckets}
        assert len(moved) == pytest.approx(2000 / (buckets + 1), rel=0.15)


def test_jump_hash_gives_the_buckets_of_other_implementations() -> None:
    """Those in Guava's tests."""
    assert [jump_hash(key, 100) for key in range(10)] == [0, 55, 62, 8, 45, 59, 86, 97, 82, 59]
    assert jump_hash(10863919174838991, 11) == 6
    assert jump_hash(2016238256797177309, 11) == 3
    assert jump_hash(1673758223894951030, 11) == 5


LOCAL, PUSH, REMOTE = Origin.LOCAL, Origin.PUSH, Origin.REMOTE


def key(number: int) -> RouteKey:
    return None, number.to_bytes(8, "little")


@dataclass
class Twin:
    """The same contract by one list of routes, longest unused first; each answer is found by looking at everything."""

    max_routes: int
    ttl_s: float
    routes: list[tuple[RouteKey, str, Origin, float]] = field(default_factory=list)

    def replica_of(self, key: RouteKey, *, now: float) -> str | None:
        found = [route for route in self.routes if route[0] == key]
        self.routes = [route for route in self.routes if route[0] != key]
        valid = [route for route in found if now - route[3] <= self.ttl_s]
        self.routes += [(key, replica, origin, now) for _, replica, origin, _ in valid]
        return valid[0][1] if valid else None

    def set_route(self, key: RouteKey, replica: str, origin: Origin, *, now: float) -> None:
        if any(each == key and other > origin and now - used_s <= self.ttl_s for each, _, other, used_s in self.routes):
            return
        self.routes = [route for route in self.routes if route[0] != key] + [(key, replica, origin, now)]
        if len(self.routes) > self.max_routes:
            least = min(route[2] for route in self.routes)
            self.routes.remove(next(route for route in self.routes if route[2] == least))


def test_any_order_of_uses_gives_what_a_plain_list_gives() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        table, twin = RouteTable(6, ttl_s=20.0), Twin(6, ttl_s=20.0)
        now = 0.0
        for step in range(300):
            now += float(rng.choice([0.0, 1.0, 7.0]))
            wanted = key(int(rng.integers(10)))
            if rng.random() < 0.5:
                assert table.replica_of(wanted, now=now) == twin.replica_of(wanted, now=now)
            else:
                origin = Origin(int(rng.integers(3)))
                table.set_route(wanted, f"replica-{step}", origin, now=now)
                twin.set_route(wanted, f"replica-{step}", origin, now=now)
            table.check()
            assert len(table) == len(twin.routes)
        assert [table.replica_of(key(n), now=now) for n in range(10)] == [
            twin.replica_of(key(n), now=now) for n in range(10)
        ]


def test_a_full_table_evicts_foreign_routes_first_then_pushed_ones_then_the_longest_unused() -> None:
    table = RouteTable(3)
    for number, origin in enumerate((LOCAL, PUSH, REMOTE)):
        table.set_route(key(number), "a", origin, now=0.0)
    found = []
    for number in (3, 4, 5):
        table.replica_of(key(0), now=1.0)
        table.set_route(key(number), "a", LOCAL, now=1.0)
        found.append([each for each in range(6) if table.replica_of(key(each), now=1.0) is not None])
    assert found == [[0, 1, 3], [0, 3, 4], [0, 4, 5]]


def test_a_full_table_of_own_routes_takes_no_foreign_one() -> None:
    table = RouteTable(1)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    table.set_route(key(1), "b", REMOTE, now=0.0)
    assert (table.replica_of(key(0), now=0.0), table.replica_of(key(1), now=0.0)) == ("a", None)


def test_a_foreign_route_replaces_an_own_one_only_when_that_is_void() -> None:
    table = RouteTable(ttl_s=10.0)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    table.set_route(key(0), "b", REMOTE, now=10.0)
    assert table.replica_of(key(0), now=10.0) == "a"
    table.set_route(key(0), "b", REMOTE, now=20.1)
    assert table.replica_of(key(0), now=20.1) == "b"
    assert len(table) == 1


def test_a_use_prolongs_a_route() -> None:
    table = RouteTable(ttl_s=10.0)
    table.set_route(key(0), "a", LOCAL, now=0.0)
    assert [table.replica_of(key(0), now=now) for now in (10.0, 20.0, 30.1)] == ["a", "a", None]
    assert len(table) == 0


def test_evicted_routes_are_counted_by_origin() -> None:
    table = RouteTable(2)
    for number, origin in enumerate((LOCAL, REMOTE, REMOTE, LOCAL, LOCAL)):
        table.set_route(key(number), "a", origin, now=float(number))
    assert table.evicted == {REMOTE: 2, LOCAL: 1}
