"""What a Router makes of reports of caches: KV events, pushes, and feeds that are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.decision import Decision
from gorgo.core.messages.kv_events import (
    BlocksRemoved,
    BlocksStored,
    CacheChanges,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEvent,
    KvEventBatch,
    KvTier,
    PushedFeed,
)
from gorgo.core.messages.request import AttemptResult, EngineSample, Outcome, RouteRequest
from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
from gorgo.core.router import Router
from tests.core.routers import (
    COMPLETED,
    FAILED,
    a_request,
    blocks_of,
    dispatched,
    make_router,
    set_policy,
    specs,
    submitted,
)

#: Four blocks of 16 tokens, exactly and as the history counts them: one block of 64.
TOKENS = token_bytes(range(64))
HASHES = chain_hashes(TOKENS, block_tokens=16)


def stored(blocks: int = 4) -> BlocksStored:
    return BlocksStored(tuple(range(1, blocks + 1)), None, TOKENS[: blocks * 64], 16, KvTier.GPU)


def report(router: Router, replica: str, *events: KvEvent, complete: bool = True, now: float = 0.0) -> None:
    batch = KvEventBatch(sent_s=None, rank=0, events=events)
    assert router.caches.on_kv_events(replica, batch, model=None, block_tokens=16, complete=complete, now=now) == []
    router.check()


def push(router: Router, replica: str, hashes: list[int], *, now: float = 0.0, model: str | None = None) -> None:
    assert router.caches.on_snapshot(replica, CacheSnapshot(model, 16, hashes), now=now) == []
    router.check()


def exact(request_id: str = "r", replica: str | None = None) -> RouteRequest:
    request = a_request(request_id, prompt_tokens=70, blocks=blocks_of(1), pinned_replica=replica)
    return replace(request, kv_hashes={16: HASHES})


def decide(router: Router, request: RouteRequest, *, now: float = 0.0) -> Decision:
    decision = dispatched(submitted(router, request, now=now)).decision
    router.check()
    return decision


def cached(router: Router, replica: str, *, now: float = 0.0, hashes: bool = True) -> tuple[int, str]:
    """Cached tokens and their source at a decision for one replica, which leaves no trace."""
    request = exact("probe", replica) if hashes else a_request("probe", blocks=blocks_of(1), pinned_replica=replica)
    action = dispatched(submitted(router, request, now=now))
    router.on_finish(action.attempt_id, Outcome(AttemptResult.CLIENT_DISCONNECTED), now=now)
    router.check()
    return action.decision.estimated_cached_tokens, action.decision.cache_source


def serve(router: Router, replica: str, *, now: float = 0.0) -> None:
    """Let the history confirm the prompt on a replica."""
    action = dispatched(submitted(router, exact("served", replica), now=now))
    router.on_first_token(action.attempt_id, now=now)
    router.on_finish(action.attempt_id, COMPLETED, now=now)


def test_events_say_what_is_cached_where_no_request_was_sent() -> None:
    router = make_router("a", "b", policy="gorgo-ms")
    report(router, "b", stored(3))
    assert cached(router, "b") == (48, "events")
    assert cached(router, "a") == (0, "history")


def test_complete_events_count_alone_and_partial_ones_only_where_they_are_better() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    report(router, "a", stored(1), complete=False)
    assert cached(router, "a") == (64, "history")
    report(router, "a", complete=True)
    assert cached(router, "a") == (16, "events")
    report(router, "a", stored(4), complete=False)
    assert cached(router, "a") == (64, "events"), "of equals the events"


def test_a_request_without_exact_tokens_is_compared_with_the_history() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    report(router, "a", stored(1))
    assert cached(router, "a", hashes=False) == (64, "history")


def test_an_evicted_block_is_no_longer_counted() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored(), BlocksRemoved((3,), KvTier.GPU))
    assert cached(router, "a") == (32, "events")


def test_a_lost_feed_leaves_the_history() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    report(router, "a", stored(2))
    router.caches.on_kv_lost("a", now=1.0)
    assert cached(router, "a") == (64, "history")
    report(router, "a", stored(1))
    assert cached(router, "a") == (16, "events"), "no block from before the loss"


def test_a_cleared_cache_empties_the_history_too() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    report(router, "a", CacheCleared(), complete=False)
    assert cached(router, "a") == (0, "events")
    router.caches.on_kv_lost("a", now=1.0)
    assert cached(router, "a") == (0, "history")


def test_a_snapshot_replaces_what_was_pushed_before() -> None:
    router = make_router("a", policy="gorgo-ms")
    push(router, "a", HASHES[:3])
    assert cached(router, "a") == (48, "push")
    push(router, "a", [*HASHES[:2], 77])
    assert cached(router, "a") == (32, "push")
    router.caches.on_evictions("a", CacheEvictions(None, 16, [HASHES[1], 99]), now=0.0)
    assert cached(router, "a") == (16, "push")


def change(router: Router, added: list[int], removed: list[int], *, whole: bool = True, now: float = 0.0) -> None:
    changes = CacheChanges(None, 16, added, removed, whole=whole)
    assert router.caches.on_changes("a", changes, now=now) == []
    router.check()


def test_changes_of_a_snapshot_have_the_effect_of_the_next_one() -> None:
    router = make_router("a", policy="gorgo-ms")
    change(router, HASHES, [])
    assert router.caches.pushed_feed("a", None, 16) is None, "there is no snapshot to change"
    push(router, "a", HASHES[:1])
    change(router, HASHES[1:3], [77])
    assert cached(router, "a") == (48, "push")
    change(router, [], HASHES[1:2], whole=False)
    assert cached(router, "a") == (16, "push")
    assert router.caches.pushed_feed("a", None, 16) == PushedFeed(number=0, reported_blocks=2)


def test_feed_of_pushes_that_was_dropped_and_made_again_has_another_number() -> None:
    router = make_router("a", policy="gorgo-ms")
    push(router, "a", HASHES)
    before = router.caches.pushed_feed("a", None, 16)
    router.caches.flush("a", now=0.0)
    assert router.caches.pushed_feed("a", None, 16) is None
    push(router, "a", HASHES)
    after = router.caches.pushed_feed("a", None, 16)
    assert before is not None
    assert after is not None
    assert before.number != after.number
    assert (
        router.caches.pushed_feed("a", None, 32)
        is router.caches.pushed_feed("a", "m", 16)
        is router.caches.pushed_feed("z", None, 16)
    )


def test_pushes_that_have_ended_leave_the_history() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    push(router, "a", HASHES[:1])
    router.caches.on_kv_lost("a", now=1.0)
    assert cached(router, "a") == (16, "push"), "events are not pushes"
    assert router.caches.on_push_lost("a", now=1.0) == router.caches.on_push_lost("z", now=1.0) == []
    assert cached(router, "a") == (64, "history")


def test_pushes_are_ignored_while_a_replica_sends_events() -> None:
    router = make_router("a", policy="gorgo-ms")
    push(router, "a", HASHES)
    report(router, "a", stored(1))
    push(router, "a", HASHES)
    assert cached(router, "a") == (16, "events")
    router.caches.on_kv_lost("a", now=0.0)
    push(router, "a", HASHES)
    assert cached(router, "a") == (64, "push")


def test_evictions_without_a_snapshot_are_ignored() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    router.caches.on_evictions("a", CacheEvictions(None, 16, HASHES), now=0.0)
    assert cached(router, "a") == (64, "history")


def test_a_restart_seen_by_a_scrape_empties_the_feed() -> None:
    router = make_router("a", policy="gorgo-ms")
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=0.0)
    report(router, "a", stored())
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=10.0), now=1.0)
    assert cached(router, "a") == (0, "history")


def test_a_restart_that_events_have_reported_leaves_what_was_stored_since() -> None:
    router = make_router("a", policy="gorgo-ms")
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=0.0)
    report(router, "a", stored(), CacheCleared(), stored(2))
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=10.0), now=1.0)
    assert cached(router, "a") == (32, "events")
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=5.0), now=2.0)
    assert cached(router, "a") == (0, "history")


def test_a_restart_before_the_events_began_anew_leaves_what_was_stored_since() -> None:
    router = make_router("a", policy="gorgo-ms")
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=0.0)
    report(router, "a", stored())
    router.caches.on_kv_lost("a", now=1.0)  # the killed process closed its connection
    report(router, "a", stored())  # the next one, from its first message on
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=10.0), now=2.0)
    assert cached(router, "a") == (64, "events")
    router.replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=5.0), now=3.0)
    assert cached(router, "a") == (0, "history")
    router.check()


def test_a_replica_in_the_slot_of_another_starts_without_its_blocks() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored())
    router.replicas.set_fleet(specs("b"), now=1.0)
    router.check()
    assert router.caches.block_sizes(None) == frozenset()
    assert cached(router, "b") == (0, "history")
    report(router, "a", stored())
    assert cached(router, "b") == (0, "history"), "reports of one that has left are ignored"
    assert router.caches.sources(now=1.0)["b"].events.stored == 0


def test_a_flush_by_the_operator_makes_events_partial_until_the_cache_is_cleared() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored(4))
    router.caches.flush("a", now=0.0)
    serve(router, "a")
    report(router, "a", stored(1), now=9.0)
    assert cached(router, "a", now=9.0) == (64, "history")
    report(router, "a", CacheCleared(), stored(2), now=9.0)
    assert cached(router, "a", now=9.0) == (32, "events")


@pytest.mark.parametrize("source", ["history", "events", "push"])
def test_a_flush_in_parts_removes_a_bounded_number_of_blocks_each_time(source: str) -> None:
    router = make_router("a", policy="gorgo-ms")
    if source == "history":
        for number in range(160):
            router.index.insert(b"%08d" % number, 0)
    elif source == "events":
        report(router, "a", BlocksStored(tuple(range(160)), None, token_bytes(range(160 * 16)), 16, KvTier.GPU))
    else:
        push(router, "a", list(range(160)))
    counts = [160]
    while router.caches.flush_some("a", blocks=16, now=0.0):
        router.check()
        counts.append(router.index.resident_blocks(0) + router.caches.sources(now=0.0)["a"].blocks)
    assert counts == list(range(160, -1, -16))
    assert not router.caches.flush_some("gone", blocks=16, now=0.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cleared_rank_goes_in_parts_and_the_history_with_the_last_rank(ranks: int) -> None:
    router = make_router("a", policy="gorgo-ms")
    for number in range(40):
        router.index.insert(b"%08d" % number, 0)
    event = BlocksStored(tuple(range(160)), None, token_bytes(range(160 * 16)), 16, KvTier.GPU)
    for rank in range(ranks):
        router.caches.on_kv_events(
            "a", KvEventBatch(None, rank, (event,)), model=None, block_tokens=16, complete=True, now=0.0
        )
    for rank in range(ranks):
        counts = []
        while router.caches.clear_some("a", model=None, rank=rank, blocks=16, now=0.0):
            router.check()
            counts.append((router.caches.sources(now=0.0)["a"].blocks, router.index.resident_blocks(0)))
        left = 160 * (ranks - 1 - rank)
        assert counts[:10] == [(blocks, 40) for blocks in range(left + 144, left - 1, -16)]
        assert counts[10:] == ([] if left else [(0, 24), (0, 8), (0, 0)])
        cleared = KvEventBatch(None, rank, (CacheCleared(),))
        router.caches.on_kv_events("a", cleared, model=None, block_tokens=16, complete=True, now=0.0)
        assert router.caches.sources(now=0.0)["a"].complete
    assert not router.caches.clear_some("gone", model=None, rank=0, blocks=16, now=0.0)


def test_events_within_a_flush_do_not_make_the_feed_complete() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored(4))
    serve(router, "a")
    assert router.caches.forget_some("a", blocks=2, now=0.0)
    report(router, "a", BlocksRemoved((4,), KvTier.GPU))
    assert cached(router, "a") == (64, "history")


@pytest.mark.parametrize("policy", ["gorgo", "round-robin"])
def test_a_policy_with_another_index_reads_no_feed(policy: str) -> None:
    router = make_router("a", policy=policy)
    report(router, "a", stored())
    assert cached(router, "a") == (0, "history")
    set_policy(router, "gorgo-ms")
    assert cached(router, "a") == (64, "events")


def test_block_sizes_are_those_of_feeds_that_can_serve_a_model() -> None:
    router = make_router(replicas=[ReplicaSpec("a", "x", models=("m",)), ReplicaSpec("b", "x", models=("n",))])
    assert router.caches.block_sizes("m") == frozenset()
    report(router, "a", stored())
    router.caches.on_snapshot("b", CacheSnapshot("n", 32, [1]), now=0.0)
    assert router.caches.block_sizes("m") == {16}
    assert router.caches.block_sizes("n") == {32}
    assert router.caches.block_sizes(None) == {16, 32}
    router.replicas.on_models("b", ("m", "n"), now=0.0)
    assert router.caches.block_sizes("m") == {16}
    router.caches.on_kv_lost("a", now=0.0)
    assert router.caches.block_sizes("m") == frozenset()


def test_models_of_one_replica_share_no_block() -> None:
    router = make_router("a", policy="gorgo-ms")
    push(router, "a", HASHES, model="m")
    push(router, "a", HASHES[:1], model="n")
    for model, found in (("m", (64, "push")), ("n", (16, "push")), ("o", (0, "history"))):
        decision = decide(router, replace(exact(f"r-{model}"), model=model, blocks=b""))
        assert (decision.estimated_cached_tokens, decision.cache_source) == found


def test_the_source_of_each_replica_is_stated_with_estimated_and_reported_tokens() -> None:
    router = make_router("a", "b", policy="gorgo-ms")
    report(router, "a", stored(3), now=1.0)
    for number, tokens in enumerate((40, 60)):
        attempt = dispatched(submitted(router, exact(f"r{number}", "a"), now=2.0)).attempt_id
        outcome = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=70, cached_tokens=tokens)
        router.on_finish(attempt, outcome, now=2.0)
    sources = router.caches.sources(now=4.0)
    assert list(sources) == ["a", "b"]
    found = sources["a"]
    assert (found.source, found.complete, found.block_tokens, found.blocks, found.age_s) == ("events", True, 16, 3, 3.0)
    assert (found.requests, found.reported_tokens, found.events.stored) == (2, 100, 3)
    assert found.estimated_tokens - found.reported_tokens == found.phantom_tokens - found.missed_tokens
    assert (sources["b"].source, sources["b"].age_s, sources["b"].requests) == ("history", None, 0)


def test_a_policy_that_reads_token_hashes_has_them_without_a_feed() -> None:
    router = make_router("a", policy="multi-depth")
    assert router.caches.block_sizes(None) == {16}
    batch = KvEventBatch(sent_s=None, rank=0, events=(BlocksStored((1,), None, TOKENS[:128], 32, KvTier.GPU),))
    router.caches.on_kv_events("a", batch, model=None, block_tokens=32, complete=True, now=0.0)
    assert router.caches.block_sizes(None) == {16, 32}
    assert make_router("a", policy="least-request").caches.block_sizes(None) == frozenset()


def send(router: Router, replica: str, request_id: str = "sent", *, now: float) -> str:
    return dispatched(submitted(router, exact(request_id, replica), now=now)).attempt_id


def test_a_dispatched_prompt_counts_for_two_seconds_without_an_event() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored(1))
    attempt = send(router, "a", now=1.0)
    router.on_first_token(attempt, now=1.5)
    assert router.caches.sources(now=2.9)["a"].speculated_blocks == 3
    assert cached(router, "a", now=2.9) == (64, "events")
    assert cached(router, "a", now=3.1) == (16, "events")
    assert router.caches.sources(now=3.1)["a"].speculated_blocks == 0


def test_a_slow_prefill_counts_until_a_second_after_its_predicted_first_token() -> None:
    slow = ReplicaSpec("a", "here", prefill_base_s=0.0, prefill_tokens_per_s=10.0, prefill_kappa_s=0.0)
    router = make_router(policy="gorgo-ms", replicas=[slow])
    report(router, "a", CacheCleared())
    expected_s = dispatched(submitted(router, exact("sent", "a"), now=0.0)).decision.estimate.expected_s
    assert expected_s > 7.0
    assert cached(router, "a", now=expected_s + 0.99) == (64, "events")
    assert cached(router, "a", now=expected_s + 1.01) == (0, "events")


def test_a_reported_block_is_speculated_no_longer_and_its_eviction_counts() -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", CacheCleared())
    send(router, "a", now=1.0)
    report(router, "a", stored(3))
    assert router.caches.sources(now=1.0)["a"].speculated_blocks == 1
    report(router, "a", BlocksRemoved((1,), KvTier.GPU))
    assert cached(router, "a", now=1.1) == (0, "events")


@pytest.mark.parametrize("result", [AttemptResult.CLIENT_DISCONNECTED, AttemptResult.SUPERSEDED])
def test_a_prompt_is_withdrawn_where_its_attempt_ends_before_a_first_token(result: AttemptResult) -> None:
    router = make_router("a", policy="gorgo-ms")
    report(router, "a", stored(1))
    early, late = send(router, "a", now=1.0), send(router, "a", "late", now=1.0)
    router.on_first_token(late, now=1.1)
    router.on_finish(late, Outcome(result), now=1.2)
    assert cached(router, "a", now=1.3) == (64, "events"), "it has its first token"
    router.on_finish(early, Outcome(result), now=1.4)
    assert cached(router, "a", now=1.5) == (16, "events")


def test_a_prompt_that_fails_is_withdrawn_there_and_counts_where_it_is_retried() -> None:
    router = make_router("a", "b", policy="nearest")
    set_policy(router, "gorgo-ms")
    for replica in ("a", "b"):
        report(router, replica, CacheCleared())
    first = dispatched(submitted(router, exact("r"), now=1.0))
    own, _ = router.on_finish(first.attempt_id, FAILED, now=1.1)
    assert own is not None
    (other,) = {"a", "b"} - {first.replica}
    assert cached(router, first.replica, now=1.2) == (0, "events")
    assert cached(router, other, now=1.2) == (64, "events")


def test_a_first_token_counts_until_the_next_snapshot() -> None:
    router = make_router("a", policy="gorgo-ms")
    attempt = send(router, "a", now=0.0)
    push(router, "a", HASHES[:1])
    router.on_first_token(attempt, now=1.0)
    assert cached(router, "a", now=8.0) == (64, "push")
    push(router, "a", HASHES[:2], now=8.0)
    assert cached(router, "a", now=8.0) == (32, "push")


def test_a_pushed_eviction_ends_what_a_first_token_confirmed() -> None:
    router = make_router("a", policy="gorgo-ms")
    push(router, "a", [])
    router.on_first_token(send(router, "a", now=0.0), now=0.1)
    router.caches.on_evictions("a", CacheEvictions(None, 16, HASHES[2:]), now=0.2)
    assert cached(router, "a", now=0.3) == (32, "push")


def test_reports_of_cached_tokens_correct_the_history_and_leave_events_alone() -> None:
    router = make_router("a", policy="gorgo-ms")
    long = replace(a_request(prompt_tokens=6400, blocks=blocks_of(*range(100))), kv_hashes={16: HASHES})
    for number in range(6):
        sent = replace(long, request_id=f"r{number}")
        attempt = dispatched(submitted(router, sent, now=number)).attempt_id
        router.on_first_token(attempt, now=number)
        outcome = Outcome(AttemptResult.COMPLETED, status=200, prompt_tokens=6400, cached_tokens=3200 if number else 0)
        router.on_finish(attempt, outcome, now=number)
    history = decide(router, replace(long, request_id="before")).estimated_cached_tokens
    assert history == 3200, "half of a prefix is found on this engine"
    report(router, "a", stored(4))
    found = decide(router, replace(long, request_id="after"))
    assert (found.estimated_cached_tokens, found.cache_source) == (64, "events")


def test_the_best_source_of_each_replica_decides() -> None:
    router = make_router("a", "b", "c", policy="gorgo-ms")
    serve(router, "a")
    report(router, "b", stored(2))
    push(router, "c", HASHES[:3])
    decision = decide(router, exact())
    assert decision.best_cached_tokens == 64
    assert [cached(router, name) for name in "abc"] == [(64, "history"), (32, "events"), (48, "push")]


def test_a_cache_beyond_the_bound_is_partial_until_it_is_cleared() -> None:
    router = make_router("a", policy="gorgo-ms", limits=RouterLimits(max_index_blocks=3))
    serve(router, "a")
    report(router, "a", stored(4))
    assert router.caches.sources(now=0.0)["a"].complete is False
    assert cached(router, "a", now=9.0) == (64, "history"), "the first block was evicted"
    report(router, "a", CacheCleared(), stored(2), now=9.0)
    assert cached(router, "a", now=9.0) == (32, "events")


def test_a_snapshot_beyond_the_bound_is_partial_and_the_next_one_within_it_is_not() -> None:
    router = make_router("a", policy="gorgo-ms", limits=RouterLimits(max_index_blocks=3))
    serve(router, "a")
    push(router, "a", HASHES)
    assert cached(router, "a") == (64, "history")
    push(router, "a", HASHES[:3])
    assert cached(router, "a") == (48, "push")


def test_a_rank_that_is_cleared_leaves_the_history_of_the_others() -> None:
    router = make_router("a", policy="gorgo-ms")
    serve(router, "a")
    for rank, event in ((0, stored(1)), (1, stored(2)), (0, CacheCleared())):
        batch = KvEventBatch(sent_s=None, rank=rank, events=(event,))
        router.caches.on_kv_events("a", batch, model=None, block_tokens=16, complete=True, now=0.0)
    assert cached(router, "a") == (32, "events")
    router.caches.on_kv_lost("a", now=0.0)
    assert cached(router, "a") == (64, "history")


def fill_of(router: Router, replica: str, *, now: float = 0.0) -> float:
    """As the next decision reads it."""
    decide(router, a_request(f"reader-{now}", prompt_tokens=1, blocks=b""), now=now)
    return float(router._fleet.columns.cache_fill[router._fleet.member(replica).slot])


def test_a_pool_is_as_full_as_its_complete_feed_says() -> None:
    """Of 160 tokens the history expects 64 and the events report 48; CPU memory is no part of the pool."""
    replicas = [ReplicaSpec("a", "here", kv_capacity_tokens=160)]
    router = make_router(policy="gorgo-ms", replicas=replicas, limits=RouterLimits(block_tokens=64))
    serve(router, "a")
    assert fill_of(router, "a") == 0.5, "one of two blocks of the history"
    report(router, "a", stored(3))
    assert fill_of(router, "a", now=0.1) == 48 / 128
    report(router, "a", BlocksRemoved((3,), KvTier.GPU))
    assert fill_of(router, "a", now=0.2) == 32 / 128
    report(router, "a", BlocksStored((1, 2), None, TOKENS[:128], 16, KvTier.CPU))
    assert fill_of(router, "a", now=0.3) == 32 / 128
    report(router, "a", complete=False)
    assert fill_of(router, "a", now=0.4) == 0.5, "a partial feed leaves the history"
    router.caches.on_kv_lost("a", now=1.0)
    assert fill_of(router, "a", now=1.1) == 0.5


def test_a_pool_is_as_full_as_its_last_snapshot_says() -> None:
    router = make_router(policy="gorgo-ms", replicas=[ReplicaSpec("a", "here", kv_capacity_tokens=640)])
    push(router, "a", HASHES[:3])
    assert fill_of(router, "a") == 48 / 640
    change(router, [HASHES[3]], [HASHES[0], HASHES[1]])
    assert fill_of(router, "a", now=0.1) == 32 / 640
    router.caches.on_evictions("a", CacheEvictions(None, 16, [HASHES[3]]), now=0.2)
    assert fill_of(router, "a", now=0.3) == 16 / 640
    router.caches.on_push_lost("a", now=0.4)
    assert fill_of(router, "a", now=0.5) == 0.0
