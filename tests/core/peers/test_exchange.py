"""What routers of one group tell each other, and a Router's membership in a group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.core.fleet.peer_loads import FADE_S
from gorgo.core.latency.prefill import faded
from gorgo.core.limits import OverloadLimits, RouterLimits
from gorgo.core.messages.actions import Hold
from gorgo.core.messages.kv_events import CacheSnapshot
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome
from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.exchange import PeerExchange, is_urgent
from gorgo.core.peers.records import (
    LearnedSpeed,
    PeerReport,
    PeerStatus,
    ReplicaLoad,
    SharedCacheReport,
    StartedPrefill,
)
from gorgo.core.prefix.index import Origin
from gorgo.core.router import Router
from gorgo.policies.multi_depth import MultiDepth, RouteTable
from gorgo.policies.registry import make_policy
from tests.core.learners import LeastPredicted, LinearModel
from tests.core.prefix.test_index import as_blocks
from tests.core.routers import (
    PROMPT,
    STATUS,
    a_request,
    blocks_of,
    dispatched,
    load_of,
    make_parts,
    make_router,
    submitted,
    timed,
)

KEY = "one key"


def group(*names: str, policy: str = "gorgo-ms", count: int = 2, limits: RouterLimits | None = None) -> list[Router]:
    """Routers over the same replicas, which prefill 1,000 tokens a second."""
    routers = []
    for number in range(count):
        replicas = [timed(name) for name in names]
        router = Router(
            replicas,
            make_policy(policy),
            rng=np.random.default_rng(number),
            boot_id="b",
            limits=limits or RouterLimits(),
        )
        for spec in replicas:
            router.replicas.on_probe(spec.name, 0.01, now=0.0)
        router.peers.join(f"router-{number}", key_id=KEY)
        routers.append(router)
    return routers


def peers_of(router: Router) -> PeerExchange:
    assert router.peers.exchange is not None
    return router.peers.exchange


def serve(router: Router, request_id: str, blocks: bytes = PROMPT, *, replica: str | None = None, now: float) -> str:
    """Let a replica answer a prompt; return the attempt, which stays open."""
    request = a_request(request_id, blocks=blocks, pinned_replica=replica)
    attempt_id = dispatched(submitted(router, request, now=now)).attempt_id
    router.on_first_token(attempt_id, now=now + 0.3)
    return attempt_id


def chosen(router: Router, request_id: str = "next", blocks: bytes = b"", *, now: float, tokens: int = 256) -> str:
    request = a_request(request_id, blocks=blocks, prompt_tokens=tokens)
    return dispatched(submitted(router, request, now=now)).replica


def load_report(router: str, *loads: ReplicaLoad, seq: int = 1, status: PeerStatus | None = None) -> PeerReport:
    return PeerReport(router, seq, KEY, loads=loads, status=status or PeerStatus())


def test_a_report_has_the_load_of_each_replica() -> None:
    first, _ = group("a", "b")
    serve(first, "answered", replica="a", now=0.0)
    dispatched(submitted(first, a_request("waits", prompt_tokens=2000, pinned_replica="a"), now=0.3))
    (load,) = first.peers.report(now=1.3).loads
    assert (load.replica, load.requests, load.prompt_tokens) == ("a", 2, 2256)
    assert (load.waiting_requests, load.waiting_tokens, load.uncached_tokens) == (1, 2000, 2000)
    assert load.prefill_s == pytest.approx(1.0, abs=0.02)
    assert load.decoded_s == pytest.approx(1.0)


def test_a_request_goes_where_no_peer_has_work() -> None:
    first, second = group("a", "b")
    dispatched(submitted(first, a_request("long", prompt_tokens=5000, pinned_replica="a"), now=0.0))
    second.peers.on_report(first.peers.report(now=0.0), now=0.1)
    assert chosen(second, now=0.1) == "b"
    second.check()


def test_the_own_counts_stay_those_of_the_own_attempts() -> None:
    _, second = group("a", "b")
    second.peers.on_report(load_report("other", ReplicaLoad("a", 9, 9000, 9, 9000, 9000, 9.0)), now=0.0)
    chosen(second, now=0.1)
    assert load_of(second, "a") == (0, 0, 0)
    assert load_of(second, "b") == (1, 256, 256)
    second.check()


def test_a_silent_peer_fades() -> None:
    _, second = group("a", "b")
    second.peers.on_report(load_report("other", ReplicaLoad("b", 50, 50, 0, 0, 0)), now=0.0)
    assert [chosen(second, f"r{n}", now=1.9) for n in range(3)] == ["a"] * 3
    assert [view.counts for view in peers_of(second).views(now=1.9)] == [True]
    assert chosen(second, "late", now=FADE_S) == "b"
    assert [view.counts for view in peers_of(second).views(now=FADE_S)] == [False]
    second.check()


def test_decisions_are_those_of_a_router_alone_once_its_peers_have_faded() -> None:
    alone, joined = make_router("a", "b", "c", policy="gorgo-ms"), make_router("a", "b", "c", policy="gorgo-ms")
    joined.peers.join("router", key_id=KEY)
    joined.peers.on_report(load_report("other", ReplicaLoad("a", 5, 5000, 5, 5000, 5000, 3.0)), now=0.0)
    for n in range(50):
        request = a_request(f"r{n}", blocks=blocks_of(n % 7, n % 3, n), prompt_tokens=200 + 37 * n)
        decisions = [
            dispatched(submitted(router, request, now=3.0 + n / 10)).decision.as_dict() for router in (alone, joined)
        ]
        assert decisions[0] == decisions[1]


@pytest.mark.parametrize("seq", [1, 0])
def test_a_report_that_is_not_newer_changes_nothing(seq: int) -> None:
    _, second = group("a", "b")
    second.peers.on_report(load_report("other", ReplicaLoad("a", 9, 9, 9, 9, 9, 9.0)), now=0.0)
    second.peers.on_report(load_report("other", ReplicaLoad("b", 9, 9, 9, 9, 9, 9.0), seq=seq), now=0.0)
    assert chosen(second, now=0.0) == "b"


def test_the_next_report_replaces_the_last_one() -> None:
    _, second = group("a", "b")
    second.peers.on_report(load_report("other", ReplicaLoad("a", 9, 9, 9, 9, 9, 9.0)), now=0.0)
    second.peers.on_report(load_report("other", ReplicaLoad("b", 9, 9, 9, 9, 9, 9.0), seq=2), now=0.1)
    second.check()
    assert chosen(second, now=0.1) == "a"


def test_unknown_and_repeated_replicas_of_a_report_are_ignored() -> None:
    _, second = group("a", "b")
    loads = ReplicaLoad("gone", 5), ReplicaLoad("a", 1), ReplicaLoad("a", 2)
    second.peers.on_report(load_report("other", *loads), now=0.0)
    second.check()
    assert peers_of(second).loads.requests(0) == 2.0


def test_a_router_ignores_its_own_reports() -> None:
    first, _ = group("a", "b")
    serve(first, "mine", replica="a", now=0.0)
    first.peers.on_report(first.peers.report(now=0.5), now=0.5)
    assert peers_of(first).views(now=0.5) == []


def test_a_prefix_that_a_peer_confirmed_is_found_and_teaches_what_of_it_the_engine_had() -> None:
    first, second = group("a", "b")
    serve(first, "turn-1", replica="b", now=0.0)
    second.peers.on_report(first.peers.report(now=0.4), now=0.5)
    dispatch = dispatched(submitted(second, a_request("turn-2", blocks=PROMPT + b"next one"), now=3.0))
    assert dispatch.replica == "b"
    assert dispatch.decision.estimated_cached_tokens == 256
    missing = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=256, cached_tokens=0)
    second.on_finish(dispatch.attempt_id, missing, now=4.0)
    assert second.peers.report(now=4.0).cache_reports == (SharedCacheReport("b", None, 256.0, 0.0),)
    second.check()


def test_a_prefix_of_a_peer_is_remote_until_a_first_token_here_confirms_it() -> None:
    first, second = group("a", "b")
    serve(first, "turn-1", replica="b", now=0.0)
    second.peers.on_report(first.peers.report(now=0.4), now=0.5)
    marks = peers_of(second).prefixes
    assert (marks.marks[Origin.REMOTE], marks.marks[Origin.LOCAL]) == (2, 0)
    assert second.index.resident_blocks(1) == 0, "the index has what this Router sent"
    assert second.index.match(PROMPT, 2).tolist() == [0.0, 0.0]
    serve(second, "turn-2", replica="b", now=1.0)
    assert (marks.marks[Origin.REMOTE], marks.marks[Origin.LOCAL]) == (0, 2)
    second.check()


def test_a_prompt_that_waits_less_than_a_report_is_reported_with_its_first_token() -> None:
    first, _ = group("a")
    dispatched(submitted(first, a_request("r", blocks=PROMPT, prompt_tokens=128), now=0.0))
    assert first.peers.report(now=0.1).prefixes == ()


def test_a_prompt_that_waits_for_its_first_token_is_expected_where_it_was_sent() -> None:
    first, second = group("a", "b")
    long = blocks_of(*range(40))
    request = a_request("long", blocks=long, prompt_tokens=2560, pinned_replica="b")
    attempt_id = dispatched(submitted(first, request, now=0.0)).attempt_id
    second.peers.on_report(first.peers.report(now=0.1), now=0.1)
    like = a_request("like", blocks=long, prompt_tokens=2560)
    dispatch = dispatched(submitted(second, like, now=0.2))
    assert (dispatch.replica, dispatch.decision.estimated_cached_tokens) == ("b", 2560)
    # Nothing confirmed it: that the engine did not have it yet contradicts nothing.
    second.on_first_token(dispatch.attempt_id, now=3.0)
    empty = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=2560, cached_tokens=0)
    second.on_finish(dispatch.attempt_id, empty, now=4.0)
    assert second.peers.report(now=4.0).cache_reports == ()
    second.check()
    first.on_first_token(attempt_id, now=4.0)
    assert [marks.kind for marks in first.peers.report(now=4.1).prefixes] == ["confirmed"]


def test_a_prompt_that_ends_before_its_first_token_is_expected_no_longer() -> None:
    first, second = group("a", "b")
    serve(first, "short", PROMPT[:8], replica="b", now=0.0)
    request = a_request("long", blocks=PROMPT, prompt_tokens=2560, pinned_replica="b")
    attempt_id = dispatched(submitted(first, request, now=1.0)).attempt_id
    second.peers.on_report(first.peers.report(now=1.1), now=1.1)
    first.on_finish(attempt_id, Outcome(AttemptResult.FAILED_BEFORE_CONTENT), now=1.2)
    second.peers.on_report(first.peers.report(now=1.3), now=1.3)
    like = dispatched(submitted(second, a_request("like", blocks=PROMPT, pinned_replica="b"), now=2.0))
    assert like.decision.estimated_cached_tokens == 64, "the first block was confirmed before"
    second.check()


def test_marks_are_where_messages_end_and_every_512_tokens() -> None:
    first, second = group("a", "b")
    for number, boundaries in enumerate(((), (200, 1000, 1280))):
        blocks = blocks_of(number, *range(19))
        request = replace(a_request(f"r{number}", blocks=blocks, prompt_tokens=1280), boundaries=boundaries)
        first.on_first_token(dispatched(submitted(first, request, now=0.0)).attempt_id, now=1.0)
    even, by_message = first.peers.report(now=1.1).prefixes
    assert even.blocks == tuple(range(2, 21, 2))
    assert by_message.blocks == (3, 8, 15, 16, 20)
    second.peers.on_report(PeerReport("router-0", 9, KEY, prefixes=(by_message,)), now=1.2)
    branch = a_request("branch", blocks=blocks[: 8 * 15] + blocks_of(99, 98, 97), prompt_tokens=1150)
    dispatch = dispatched(submitted(second, branch, now=9.0))
    assert (dispatch.replica, dispatch.decision.estimated_cached_tokens) == (by_message.replica, 15 * 64)


def test_a_next_turn_is_named_by_the_deepest_mark_that_all_know_and_those_behind_it() -> None:
    first, second, joined = group("a", count=3)
    turns = [blocks_of(*range(count)) for count in (20, 40)]
    for number, blocks in enumerate(turns):
        tokens = 32 * len(blocks)
        request = replace(
            a_request(f"r{number}", blocks=blocks, prompt_tokens=tokens), boundaries=(100, tokens), block_tokens=32.0
        )
        first.on_first_token(dispatched(submitted(first, request, now=float(number))).attempt_id, now=number + 0.5)
    report = first.peers.report(now=2.0)
    assert [marks.blocks for marks in report.prefixes] == [(3, 16, 20), (20, 32, 40)]
    second.peers.on_report(report, now=2.0)
    joined.peers.on_report(PeerReport(report.router, 9, KEY, prefixes=report.prefixes[1:]), now=2.0)
    for number, (router, shared, found) in enumerate(
        ((second, 17, 16), (joined, 17, 0), (second, 30, 20), (joined, 30, 20))
    ):
        blocks = turns[1][: 8 * shared] + blocks_of(*range(99, 69, -1))
        like = replace(a_request(f"like{number}", blocks=blocks, prompt_tokens=1280), block_tokens=32.0)
        decision = dispatched(submitted(router, like, now=9.0)).decision
        assert decision.estimated_cached_tokens == 32 * found
        router.check()


def test_what_was_reported_once_is_not_reported_again() -> None:
    first, _ = group("a")
    serve(first, "r", now=0.0)
    assert len(first.peers.report(now=0.4).prefixes) == 1
    assert first.peers.report(now=0.5).prefixes == ()


def test_prefills_of_peers_take_their_share_of_an_engines_time() -> None:
    alone, first, second = group("a", "b", count=3)
    for at_s, router in ((0.0, first), (1.0, second), (2.0, first)):
        for each in (alone, router):
            request = a_request(f"r{at_s}", prompt_tokens=3000, pinned_replica="a")
            done = dispatched(submitted(each, request, now=at_s))
            each.on_finish(done.attempt_id, Outcome(AttemptResult.COMPLETED, status=200), now=at_s + 0.05)
        for sender, receiver in ((first, second), (second, first)):
            receiver.peers.on_report(sender.peers.report(now=at_s + 0.1), now=at_s + 0.1)
    shares = [router._fleet.columns.prefill_share.tolist() for router in (alone, first, second)]
    assert shares[0][0] > 0.2
    for found in shares[1:]:
        assert found == pytest.approx(shares[0], rel=0.02), "as one router that has sent them all"
    assert first.peers.report(now=2.2).prefills == (), "what was reported once is not reported again"


def test_prefills_of_a_report_that_comes_late_have_faded() -> None:
    _, second = group("a", "b")
    late = PeerReport("late", 1, KEY, prefills=(StartedPrefill("a", 3.0), StartedPrefill("gone", 3.0)))
    second.peers.on_report(late, now=60.0, age_s=30.0)
    assert second._fleet.columns.prefill_share.tolist() == pytest.approx([0.1 * faded(1.0, 30.0), 0.0])


def test_the_next_turn_finds_the_answer_that_a_peer_has_passed() -> None:
    first, second = group("a", "b")
    estimated = []
    for number in range(5):
        now, blocks = 10.0 * number, blocks_of(*range(100 * number, 100 * number + 4))
        turn = replace(a_request(f"first-{number}", blocks=blocks, pinned_replica="b"), boundaries=(256,))
        attempt_id = dispatched(submitted(first, turn, now=now)).attempt_id
        first.on_first_token(attempt_id, now=now + 0.3)
        first.on_finish(attempt_id, Outcome(AttemptResult.COMPLETED, status=200, output_tokens=128), now=now + 1.0)
        second.peers.on_report(first.peers.report(now=now + 1.0), now=now + 1.0)
        longer = blocks + blocks_of(*range(100 * number + 50, 100 * number + 53))
        turn = a_request(f"next-{number}", blocks=longer, prompt_tokens=448, pinned_replica="b")
        dispatch = dispatched(submitted(second, replace(turn, boundaries=(256, 384, 448)), now=now + 2.0))
        estimated.append(dispatch.decision.estimated_cached_tokens)
        second.on_first_token(dispatch.attempt_id, now=now + 2.3)
        found = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=448, cached_tokens=384)
        second.on_finish(dispatch.attempt_id, found, now=now + 3.0)
    assert estimated == [256, 256, 256, 384, 384], "three reports say that this engine finds answers"


@pytest.mark.parametrize(("output_tokens", "told"), [(127, False), (128, True)])
def test_a_short_prompt_is_told_with_its_answer_if_both_are_worth_it(output_tokens: int, told: bool) -> None:
    first, second = group("a", "b")
    prompt = replace(a_request("r", blocks=PROMPT, prompt_tokens=128, pinned_replica="b"), boundaries=(128,))
    attempt_id = dispatched(submitted(first, prompt, now=0.0)).attempt_id
    first.on_first_token(attempt_id, now=0.2)
    assert not first.peers.report(now=0.2).prefixes
    answered = Outcome(
        AttemptResult.COMPLETED, status=200, prompt_tokens=128, cached_tokens=0, output_tokens=output_tokens
    )
    first.on_finish(attempt_id, answered, now=1.0)
    report = first.peers.report(now=1.0)
    assert [len(report.prefixes), len(report.answers), report.cache_reports] == [told, told, ()]
    second.peers.on_report(report, now=1.0)
    assert len(peers_of(first).prefixes) == len(peers_of(second).prefixes) == (2 if told else 0)
    for router in (first, second):
        router.check()


def test_hashes_under_another_key_are_ignored() -> None:
    first, _ = group("a", "b")
    other = make_router("a", "b", policy="gorgo-ms")
    other.peers.join("other", key_id="another key")
    serve(first, "turn-1", replica="b", now=0.0)
    other.peers.on_report(first.peers.report(now=0.4), now=0.5)
    assert len(peers_of(other).prefixes) == 0
    assert [view.same_key for view in peers_of(other).views(now=0.5)] == [False]


def test_an_eviction_that_one_router_detects_is_one_for_all() -> None:
    first, second = group("a", "b")
    old, lost = blocks_of(*range(40)), blocks_of(*range(100, 140))
    for number, blocks in enumerate((old, lost)):
        attempt_id = serve(first, f"turn-{number}", blocks, replica="b", now=number)
        done = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=256, cached_tokens=0)
        first.on_finish(attempt_id, done, now=number + 0.5)
    second.peers.on_report(first.peers.report(now=2.0), now=2.0)
    assert second.peers is not None
    known = len(peers_of(second).prefixes)
    request = a_request("again", blocks=lost, prompt_tokens=2560, pinned_replica="b")
    attempt_id = dispatched(submitted(first, request, now=3.0)).attempt_id
    first.on_first_token(attempt_id, now=3.5)
    empty = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=2560, cached_tokens=0)
    first.on_finish(attempt_id, empty, now=4.0)
    report = first.peers.report(now=4.0)
    assert [marks.kind for marks in report.prefixes] == ["confirmed", "evicted"]
    second.peers.on_report(report, now=4.0)
    # What the engine evicted before the second prompt is not expected there; the prompt itself is there again.
    assert len(peers_of(second).prefixes) == known / 2
    first.check()
    second.check()


def test_prompts_of_peers_leave_less_of_a_cache_to_the_own_ones() -> None:
    first, second = group("a", "b")
    for router in (first, second):
        router.replicas.on_engine_sample("b", EngineSample(None, None, None, kv_capacity_tokens=640.0), now=0.0)
    serve(first, "older", blocks_of(1, 2, 3), replica="b", now=0.0)
    serve(first, "newer", blocks_of(4, 5, 6), replica="b", now=0.5)
    assert first.index.resident_blocks(1) == 6
    serve(second, "theirs", blocks_of(*range(10, 17)), replica="b", now=1.0)
    first.peers.on_report(second.peers.report(now=1.5), now=1.5)
    assert first.index.resident_blocks(1) == 3
    first.check()


def test_what_an_engine_did_not_find_of_a_peers_prefix_is_not_expected_again() -> None:
    first, second = group("a", "b")
    old, wrong = blocks_of(*range(40)), blocks_of(*range(100, 140))
    serve(first, "old", old, replica="b", now=0.0)
    serve(first, "wrong", wrong, replica="b", now=1.0)
    second.peers.on_report(first.peers.report(now=2.0), now=2.0)
    request = a_request("next", blocks=wrong, prompt_tokens=2560, pinned_replica="b")
    attempt_id = dispatched(submitted(second, request, now=3.0)).attempt_id
    second.on_first_token(attempt_id, now=3.5)
    empty = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=2560, cached_tokens=0)
    second.on_finish(attempt_id, empty, now=4.0)
    found = dispatched(submitted(second, a_request("old-again", blocks=old, pinned_replica="b"), now=5.0))
    assert found.decision.estimated_cached_tokens == 0
    second.check()


def test_a_router_reports_what_is_new_and_else_twice_a_second() -> None:
    first, _ = group("a")
    exchange = peers_of(first)
    assert exchange.has_news(now=0.0)
    first.peers.report(now=0.0)
    assert not exchange.has_news(now=0.3)
    serve(first, "r", now=0.1)
    assert exchange.has_news(now=0.4)
    first.peers.report(now=0.4)
    assert not exchange.has_news(now=0.5)
    assert exchange.has_news(now=0.9)


def test_a_restarted_engine_and_a_flush_remove_the_marks() -> None:
    first, second = group("a", "b")
    serve(first, "r", replica="b", now=0.0)
    second.peers.on_report(first.peers.report(now=0.4), now=0.5)
    second.caches.flush("a", now=0.5)
    assert len(peers_of(second).prefixes) == 2
    second.caches.flush("b", now=0.5)
    assert len(peers_of(second).prefixes) == 0


def test_an_old_report_is_a_source_of_prefixes_alone() -> None:
    first, second = group("a", "b")
    serve(first, "r", replica="b", now=0.0)
    second.peers.on_report(first.peers.report(now=0.4), now=60.0, age_s=59.6)
    assert peers_of(second).loads.requests(1) == 0.0
    assert chosen(second, "turn-2", PROMPT, now=60.0) == "b"


def test_multi_depth_takes_in_the_routes_of_its_peers() -> None:
    first, second = group("a", "b", "c", "d", policy="multi-depth")
    home = chosen(first, "r", PROMPT, now=0.0)
    first.on_first_token("r/1", now=0.3)
    away = next(name for name in "abcd" if name != home)
    report = first.peers.report(now=0.4)
    moved = PeerReport(
        report.router, 1, KEY, prefixes=tuple(type(m)(away, m.model, m.blocks, m.hashes) for m in report.prefixes)
    )
    second.peers.on_report(moved, now=0.5)
    assert chosen(second, "turn-2", PROMPT, now=0.6) == away


def test_evictions_are_counted_by_origin() -> None:
    first, second = group("a", "b", policy="multi-depth", limits=RouterLimits(max_index_blocks=4))
    policy = second.settings.policy
    assert isinstance(policy, MultiDepth)
    policy.routes = RouteTable(max_routes=1)
    serve(first, "r", now=0.0)
    report = first.peers.report(now=0.4)
    second.peers.on_report(report, now=0.5)
    marks = sum(len(each.blocks) for each in report.prefixes)
    assert marks > 1
    assert second.peers.evicted_prefixes() == {Origin.REMOTE: marks - 1, Origin.PUSH: 0}, "routes beyond the bound"
    attempt_id = serve(second, "own", blocks_of(*range(50, 60)), now=1.0)
    second.on_finish(attempt_id, Outcome(AttemptResult.COMPLETED, status=200), now=2.0)
    learned = second.peers.evicted_prefixes()
    assert learned[Origin.LOCAL] > 0
    second.caches.on_snapshot("a", CacheSnapshot("m", 16, list(range(10))), now=3.0)
    pushed = second.peers.evicted_prefixes()[Origin.PUSH]
    assert pushed > 0, "reported blocks beyond the bound"
    second.replicas.set_fleet([timed("b")], now=4.0)
    assert second.peers.evicted_prefixes()[Origin.PUSH] == pushed, "those of a replica that has left still count"


LEAST = ("least-request", "least-load", "gorgo-ms", "gorgo")


@pytest.mark.parametrize("policy", LEAST)
def test_equal_replicas_are_different_ones_to_different_routers(policy: str) -> None:
    names = [f"replica-{number}" for number in range(8)]
    routers = group(*names, policy=policy, count=8)
    for router in routers:
        router.peers.on_report(load_report("quiet"), now=0.0)
    firsts = [chosen(router, now=0.1) for router in routers]
    assert len(set(firsts)) >= 4
    again = group(*names, policy=policy, count=8)
    for router in again:
        router.peers.on_report(load_report("quiet"), now=0.0)
    assert [chosen(router, now=0.1) for router in again] == firsts, "by the router's name, not by chance"
    repeated = [chosen(routers[0], f"again-{n}", now=0.1) for n in range(7)]
    assert len({firsts[0], *repeated}) == 8, "an own request outweighs the tie-break"


@pytest.mark.parametrize(
    ("policy", "nearly"),
    [
        ("least-load", ReplicaLoad("", 4, 4010, 4, 4010, 4010, 4.005)),
        ("gorgo-ms", ReplicaLoad("", 4, 4010, 4, 4010, 4010, 4.005)),
        ("gorgo", ReplicaLoad("", 4, 4010, 4, 4010, 4010, 4.005)),
    ],
)
def test_routers_do_not_all_choose_what_is_better_by_a_little(policy: str, nearly: ReplicaLoad) -> None:
    names = [f"replica-{number}" for number in range(8)]
    best = ReplicaLoad(names[0], 4, 4000, 4, 4000, 4000, 4.0)
    routers = group(*names, policy=policy, count=8)
    for router in routers:
        router.peers.on_report(
            load_report("other", best, *(replace(nearly, replica=name) for name in names[1:])), now=0.0
        )
    assert len({chosen(router, now=0.1) for router in routers}) >= 4


@pytest.mark.parametrize("policy", LEAST)
def test_a_request_of_a_peer_outweighs_the_tie_break(policy: str) -> None:
    names = [f"replica-{number}" for number in range(4)]
    for router in group(*names, policy=policy, count=8):
        busy = [ReplicaLoad(name, 1, 256, 1, 256, 256, 0.3) for name in names if name != "replica-2"]
        router.peers.on_report(load_report("other", *busy), now=0.0)
        assert chosen(router, now=0.1) == "replica-2"


def test_an_engine_has_no_place_for_this_router_when_peers_have_filled_it() -> None:
    limits = RouterLimits(overload=OverloadLimits(queue_enabled=True, max_concurrency_per_replica=4))
    _, second = group("a", limits=limits)
    second.peers.on_report(load_report("other", ReplicaLoad("a", 4)), now=0.0)
    (action,) = submitted(second, a_request("r"), now=0.1)
    assert isinstance(action, Hold)
    (action,) = second.peers.on_report(load_report("other", seq=2), now=0.2)
    assert dispatched([action]).replica == "a"


def test_a_router_starts_from_the_speeds_that_its_peers_have_learned() -> None:
    _, second = group("a", "b")
    report = PeerReport("other", 1, KEY, speeds=(LearnedSpeed("b", 60.0, 20.0), LearnedSpeed("gone", 1.0, 1.0)))
    second.peers.on_report(report, now=0.0)
    slowdown = {row.name: row.prefill_slowdown for row in second.view.snapshots(now=0.0)}
    assert slowdown == {"a": 1.0, "b": pytest.approx(2.6)}


def test_a_request_behind_the_prefill_of_a_peer_is_neither_done_nor_late_and_teaches_no_speed() -> None:
    """Two seconds of the first router on the engine, then half a second of the second one."""
    first, second = group("a")
    long = dispatched(submitted(first, a_request("long", blocks=b"", prompt_tokens=2000), now=0.0)).attempt_id
    second.peers.on_report(first.peers.report(now=0.0), now=0.0)
    short = dispatched(submitted(second, a_request("short", blocks=b"", prompt_tokens=500), now=0.1)).attempt_id
    (load,) = second.peers.report(now=1.9).loads
    assert load.prefill_s == pytest.approx(0.5)
    first.on_first_token(long, now=2.01)
    second.peers.on_report(first.peers.report(now=2.02), now=2.02)
    (due_s,) = peers_of(second).loads.added_to_own(now=2.3).head_due_s
    assert due_s == pytest.approx(2.5, abs=0.02)
    second.on_first_token(short, now=2.6)
    assert second.peers.report(now=2.7).speeds == ()
    second.check()


def test_samples_of_a_peer_count_once() -> None:
    _, second = group("a")
    for seq in range(1, 20):
        second.peers.on_report(PeerReport("other", seq, KEY, speeds=(LearnedSpeed("a", 60.0, 20.0),)), now=seq / 10)
    (row,) = second.view.snapshots(now=2.0)
    assert row.prefill_slowdown == pytest.approx(2.6)


def test_cache_reports_of_peers_teach_the_share_that_an_engine_finds() -> None:
    _, second = group("a")
    samples = tuple(SharedCacheReport("a", None, 4000.0, 2000.0) for _ in range(5))
    second.peers.on_report(PeerReport("other", 1, KEY, cache_reports=samples), now=0.0)
    (row,) = second.view.snapshots(now=0.0)
    assert row.found_share == pytest.approx(0.5)


def test_a_report_that_the_learned_share_explains_is_passed_on_too() -> None:
    first, second = group("a")
    shared: list[SharedCacheReport] = []
    for number in range(4):
        request = a_request(f"turn-{number}", blocks=blocks_of(*range(40)), prompt_tokens=2560)
        attempt_id = dispatched(submitted(first, request, now=number)).attempt_id
        first.on_first_token(attempt_id, now=number + 0.3)
        half = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=2560, cached_tokens=1280)
        first.on_finish(attempt_id, half, now=number + 0.5)
        report = first.peers.report(now=number + 0.6)
        shared += report.cache_reports
        second.peers.on_report(report, now=number + 0.6)
    assert shared == [SharedCacheReport("a", None, 2560.0, 1280.0)] * 3, "all but the first turn's, which had no prefix"


def test_a_replica_that_a_peer_has_ejected_is_probed_once() -> None:
    _, second = group("a", "b")
    status = PeerStatus(ejected=("b", "gone"))
    for seq in (1, 2):
        second.peers.on_report(load_report("other", seq=seq, status=status), now=0.1 * seq)
    assert list(peers_of(second).probe_hints) == ["b"]


def test_a_long_prefill_is_reported_at_once() -> None:
    first, _ = group("a")
    short = dispatched(submitted(first, a_request("short", prompt_tokens=150), now=0.0))
    long = dispatched(submitted(first, a_request("long", prompt_tokens=900), now=0.0))
    assert (is_urgent(short), is_urgent(long)) == (False, True)


def test_the_status_has_what_operators_compare() -> None:
    first, second = group("a", "b")
    first.replicas.drain("b", now=0.0)
    first.settings.frozen = True
    second.peers.on_report(first.peers.report(now=0.1), now=0.1)
    (view,) = peers_of(second).views(now=0.1)
    assert view.status == PeerStatus("gorgo-ms", 1, True, None, ("b",), ())


def test_routers_know_the_digests_of_their_peers_models() -> None:
    routers = [
        Router([timed("a")], LeastPredicted(), rng=np.random.default_rng(0), boot_id="b", limits=RouterLimits())
        for _ in range(4)
    ]
    for number, router in enumerate(routers):
        router.peers.join(f"router-{number}", key_id=KEY)
    first, second, third, fourth = routers
    first.learning.adopt(LinearModel(version=2))
    second.learning.adopt(LinearModel(version=2))
    third.learning.adopt(LinearModel((0.5, 0.5, 0.5), version=2))
    assert first.learning.model_digest == second.learning.model_digest != third.learning.model_digest
    for router in (third, first, second):
        fourth.peers.on_report(router.peers.report(now=0.0), now=0.0)
    assert [view.status.model for view in peers_of(fourth).views(now=0.0)] == [
        router.learning.model_digest for router in (third, first, second)
    ]
    assert fourth.learning.model_digest is None
    first.learning.adopt(None)
    assert first.peers.report(now=0.1).status.model is None


def test_replicas_that_leave_take_the_load_of_peers_with_them() -> None:
    first, second = group("a", "b")
    serve(first, "r", replica="b", now=0.0)
    second.peers.on_report(first.peers.report(now=0.4), now=0.5)
    second.replicas.set_fleet([timed("a"), timed("new")], now=0.6)
    second.check()
    assert len(peers_of(second).prefixes) == 0
    second.replicas.on_probe("new", 0.01, now=0.6)
    assert peers_of(second).loads.requests(1) == 0.0
    first.replicas.set_fleet([timed("a"), timed("new"), timed("newer")], now=0.6)
    second.peers.on_report(first.peers.report(now=0.7), now=0.7)
    second.check()


def test_a_first_token_sooner_than_a_round_trip_makes_no_report_that_is_refused() -> None:
    first, second = group("a")
    attempt_id = dispatched(submitted(first, a_request("r"), now=0.0)).attempt_id
    first.on_first_token(attempt_id, now=0.0)
    assert first.peers is not None
    report = decode_report(encode_report(first.peers.report(now=0.1)))
    assert [speed.spent_s for speed in report.speeds] == [0.0]
    second.peers.on_report(report, now=0.1)
    second.check()


# --- A Router's membership in a group of peers, on its own.


KEY_GROUP = "key"


def test_loads_of_peers_count_from_joining_on() -> None:
    parts = make_parts("a", "b")
    exchange = parts.peers.join("me", key_id=KEY_GROUP)
    assert parts.peers.exchange is exchange
    parts.peers.on_report(PeerReport("other", 1, KEY_GROUP, (ReplicaLoad("a", requests=3, prompt_tokens=30),)), now=1.0)
    a, b = (parts.fleet.all_loads(now=1.0).in_flight_requests[parts.fleet.member(name).slot] for name in "ab")
    assert (int(a), int(b)) == (3, 0), "with a fraction of the tie-break"
    with pytest.raises(AssertionError, match="once"):
        parts.peers.join("me", key_id=KEY_GROUP)


def test_a_report_drains_the_queue_and_an_old_one_is_only_the_time() -> None:
    parts = make_parts("a")
    parts.peers.join("me", key_id=KEY_GROUP)
    report = PeerReport("other", 1, KEY_GROUP, (ReplicaLoad("a"),))
    parts.peers.on_report(report, now=1.0)
    parts.peers.on_report(report, now=2.0)
    assert (parts.drained_s, parts.recorded_s) == ([1.0], [2.0])


def test_a_report_has_what_is_in_flight_and_the_status() -> None:
    parts = make_parts("a")
    parts.peers.join("me", key_id=KEY_GROUP)
    parts.dispatch(a_request(prompt_tokens=100), now=0.0)
    report = parts.peers.report(now=0.5)
    assert (report.router, report.status) == ("me", STATUS)
    assert [(load.replica, load.requests, load.prompt_tokens) for load in report.loads] == [("a", 1, 100)]


def test_without_peers_there_is_nothing_to_report_flush_or_check() -> None:
    parts = make_parts("a")
    parts.peers.flush(0)
    parts.peers.check()
    assert parts.peers.evicted_prefixes() == {Origin.PUSH: 0}
    with pytest.raises(AssertionError, match="reports to none"):
        parts.peers.report(now=0.0)
    with pytest.raises(AssertionError, match="hears of none"):
        parts.peers.on_report(PeerReport("other", 1, KEY_GROUP), now=0.0)


def test_evicted_blocks_of_pushes_count_beside_the_marks_of_peers() -> None:
    parts = make_parts("a")
    parts.feeds.set_max_blocks(2)
    parts.feeds.replace(parts.fleet.member("a").slot, CacheSnapshot("m", 16, [1, 2, 3]), now=0.0)
    assert parts.peers.evicted_prefixes()[Origin.PUSH] == 1


def test_prompts_of_peers_fill_a_cache_as_far_as_they_are_reported() -> None:
    """Half of a pool of eight blocks, and as much of the own: together, and not each alone."""
    mine, other = make_parts("a"), make_parts("a")
    for name, parts in (("me", mine), ("other", other)):
        parts.peers.join(name, key_id=KEY_GROUP)
        parts.index.set_capacity(0, 8)
    for parts, words in ((other, (1, 2, 3, 4)), (mine, (5, 6, 7, 8))):
        sent = parts.dispatch(a_request(prompt_tokens=256, blocks=as_blocks(words)), now=0.0)
        parts.prefix_updater.on_first_token(parts.open_attempt(sent.attempt_id), now=0.5)
    mine.prefix_updater.update_fills()
    assert mine.fleet.columns.cache_fill.tolist() == [0.5]
    mine.peers.on_report(other.peers.report(now=1.0), now=1.0)
    mine.prefix_updater.update_fills()
    assert mine.fleet.columns.cache_fill.tolist() == [1.0]
