"""A whole run with each kind of report: what the Router estimates against what the engines find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gorgo.core.messages.kv_events import CacheEvictions, CacheSnapshot, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import chain_hashes
from gorgo.lab.sim.engine.engines import Engine, make_engine
from gorgo.lab.sim.engine.kv_cache import BlockPool, KvCache
from gorgo.lab.sim.engine.profiles import as_vllm
from gorgo.lab.sim.engine.request import EngineRequest
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.faults import BadReports, Kill, RouterRestart
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.kv_events import (
    BUFFERED_BATCHES,
    GIVE_UP_S,
    BlockTokens,
    CacheReports,
    EventFeed,
    PathFaults,
    PushFeed,
    ReportPath,
)
from gorgo.lab.sim.network import Link, TripDelays, random_table
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.sim.simulation import Simulation, Startable
from gorgo.lab.sim.workload import SimRequest
from gorgo.policies.registry import make_policy
from tests.lab.sim.fleets import conversations, round_profile, three_regions

# --- One engine with a feed and a sink that applies what arrives, for tests of the feeds.


Kind = Literal["sglang", "vllm"]
ITEM_TOKENS = 16
#: A trip of one eighth of a second.
LINK = Link(rtt_s=0.25, jitter=0.0, spike_probability=0.0)


class Replica:
    """The replica at the other end of the path."""

    def __init__(self) -> None:
        self.link = LINK
        self.alive = True


class Sink:
    """A router's view: the index of events, or the set of the pushes."""

    def __init__(self, kernel: EventQueue) -> None:
        self._kernel = kernel
        self.index = KvEventIndex(block_tokens=ITEM_TOKENS, max_blocks_per_replica=10_000)
        self.pushed: set[int] = set()
        self.calls: list[tuple[float, str]] = []
        self.complete = True

    def on_kv_events(self, replica: str, batch: KvEventBatch, *, block_tokens: int, complete: bool) -> None:
        assert block_tokens == ITEM_TOKENS
        self.complete = complete
        self.index.apply(0, batch)
        kinds = ", ".join(type(event).__name__ for event in batch.events)
        self.calls.append((self._kernel.now, kinds))

    def on_kv_lost(self, replica: str) -> None:
        self.index.clear_replica(0)
        self.calls.append((self._kernel.now, "lost"))

    def on_cache_snapshot(self, replica: str, snapshot: CacheSnapshot) -> None:
        self.pushed = set(snapshot.hashes)
        self.calls.append((self._kernel.now, f"snapshot of {len(snapshot.hashes)}"))

    def on_cache_evictions(self, replica: str, evictions: CacheEvictions) -> None:
        self.pushed.difference_update(evictions.hashes)
        self.calls.append((self._kernel.now, f"evictions of {len(evictions.hashes)}"))

    def matched_items(self, hashes: Sequence[int]) -> int:
        return int(self.index.match(hashes, 1)[0]) // ITEM_TOKENS


class Scene:
    """A queue, a replica, its engine, the path and the sink."""

    def __init__(self, kind: Kind = "sglang", *, items: int = 20) -> None:
        self.kernel = EventQueue()
        self.replica = Replica()
        self.path = ReportPath(self.kernel, self.replica, TripDelays(random_table(1), 5))
        self.tokens = BlockTokens(item_bytes=8, item_tokens=ITEM_TOKENS, block_tokens=ITEM_TOKENS)
        self.sink = Sink(self.kernel)
        self._profile = replace(
            round_profile(kv_tokens=items * ITEM_TOKENS, chunk_tokens=64, max_running_requests=3), scheduler=kind
        )
        self.engine = self.new_engine()
        self.keys: set[bytes] = set()

    def new_engine(self) -> Engine[EngineRequest]:
        self.engine = make_engine(self._profile, item_bytes=8, item_tokens=ITEM_TOKENS)
        return self.engine

    def at(self, time_s: float, act: Callable[[], object]) -> None:
        self.kernel.at(time_s, lambda: (act(), None)[1])

    def serve(self, at_s: float, *items: str) -> None:
        """Serve a prompt of these items, in no time."""
        key = b"".join(item.encode().ljust(8) for item in items)
        self.keys.add(key)
        self.at(at_s, partial(self._serve, key))

    def _serve(self, key: bytes) -> None:
        tokens = len(key) // 8 * ITEM_TOKENS
        self.engine.submit(EngineRequest(key, prompt_tokens=tokens + 1, output_tokens=1), now=0.0)
        now = 0.0
        while (step := self.engine.start_step(now=now)) is not None:
            now = step.ends_s
            self.engine.finish_step(step)

    def cached_items(self, key: bytes) -> int:
        """Return what the engine itself has of a prompt."""
        cache = self.engine.cache
        if isinstance(cache, BlockPool):
            return len(cache.find(cache.contents(key)))
        assert isinstance(cache, KvCache)
        return cache.match(key).items

    def assert_right(self) -> None:
        """Compare the index with the engine's own contents for every prompt so far."""
        for key in self.keys:
            assert self.sink.matched_items(self.tokens.hashes(key)) == self.cached_items(key)
        self.sink.index.check()


#: Of the found tokens: SGLang stores a prompt after its whole prefill, and a dispatched one counts at once.
IN_PREFILL = 0.02
#: One feed's phantoms and misses vary threefold with its seed: what is said of both is of all feeds together.
FEEDS = [conversations(400, every_s=0.6, users=40, seed=seed) for seed in range(4)]
FEED = FEEDS[0]
KINDS = ("sglang", "vllm")
MIDDLE = "eu-frankfurt-0"


def fleet(kind: str = "sglang", *, kv_tokens: int = 150_000) -> SimFleet:
    """Three replicas whose pools evict under the feed."""
    replicas = []
    for replica in three_regions().replicas:
        profile = replace(replica.profile, kv_tokens=kv_tokens)
        replicas.append(replace(replica, profile=as_vllm(profile) if kind == "vllm" else profile))
    return SimFleet(tuple(replicas))


def simulation(reports: CacheReports, faults: Sequence[Startable] = (), **options: object) -> Simulation:
    return Simulation(
        fleet(**options),  # type: ignore[arg-type]
        make_policy("gorgo-ms"),
        seed=0,
        cache_reports=reports,
        faults=faults,
    )


def errors(records: Sequence[SimRecord]) -> tuple[float, float]:
    """Return phantom and missed tokens, of all found tokens."""
    pairs = [(record.estimated_cached_tokens or 0, record.cached_tokens or 0) for record in records]
    found = sum(found for _, found in pairs)
    phantom = sum(max(0, estimated - found) for estimated, found in pairs)
    return phantom / found, sum(max(0, found - estimated) for estimated, found in pairs) / found


@pytest.mark.parametrize("kind", ["sglang", pytest.param("vllm", marks=pytest.mark.system)])
def test_reports_leave_no_phantoms_where_pools_evict(kind: str) -> None:
    phantoms = {}
    for reports in ("none", "push", "events", "exact"):
        records: list[SimRecord] = []
        for feed in FEEDS:
            run = simulation(reports, kind=kind)
            records += run.run(feed).records
            run.router.check()
            assert sum(site.model.cache.evicted_tokens_total for site in run.engines.values()) > 100_000
        phantoms[reports] = errors(records)[0]
    assert max(phantoms["events"], phantoms["exact"]) < (IN_PREFILL if kind == "sglang" else 0.001)
    if kind == "sglang":  # The bounded history evicts in the order of vLLM's pool.
        assert phantoms["push"] < phantoms["none"]
        assert phantoms["none"] > 0.005


def test_what_a_run_without_reports_does_not_know_is_in_its_records() -> None:
    records = simulation("none").run(FEED[:100]).records
    assert any(record.cached_tokens for record in records)


@pytest.mark.parametrize("reports", ["push", "events"])
def test_the_source_of_each_replica_is_what_it_reports(reports: CacheReports) -> None:
    run = simulation(reports)
    run.run(FEED[:200])
    assert {one.source for one in run.router.caches.sources(now=run.kernel.now).values()} == {reports}
    assert all(feed.path.totals.messages > 0 for feed in run.caches.feeds.values())


def test_evictions_of_a_far_replica_are_known_after_a_trip() -> None:
    run = simulation("events")
    run.run(FEED)
    delays_s = run.caches.feeds[MIDDLE].path.totals.eviction_delays_s
    assert len(delays_s) > 20
    assert 0.0475 <= min(delays_s) < sorted(delays_s)[len(delays_s) // 2] < 0.06
    assert {0.0} == {*run_exact().caches.feeds[MIDDLE].path.totals.eviction_delays_s}


def run_exact() -> Simulation:
    run = simulation("exact")
    run.run(FEED)
    return run


@pytest.mark.parametrize(
    "faults",
    [
        PathFaults(lost=0.3),
        PathFaults(doubled=0.5),
        PathFaults(reordered=0.3),
        PathFaults(late_s=3.0),
        PathFaults(cut=True),
    ],
)
@pytest.mark.parametrize("reports", ["push", "events"])
def test_every_request_is_served_while_reports_fail(reports: CacheReports, faults: PathFaults) -> None:
    half_s = FEED[-1].arrival_s / 2
    run = simulation(reports, [BadReports(None, faults, 10.0, half_s)])
    records = run.run(FEED).records
    assert [record.error for record in records] == [None] * len(FEED)
    run.router.check()
    late = [record for record in records if record.scheduled_s > half_s + 15.0]
    if reports == "events":
        assert errors(late)[0] < IN_PREFILL, "replayed"


@pytest.mark.parametrize(("reports", "within_s"), [("push", 5.5), ("events", 0.6)])
def test_a_router_that_restarts_knows_warm_engines_again(reports: CacheReports, within_s: float) -> None:
    known: list[SimRecord] = []
    unknown: list[SimRecord] = []
    for feed in FEEDS:
        at_s = feed[-1].arrival_s / 2
        for source, found in ((reports, known), ("usage", unknown)):
            records = simulation(source, [RouterRestart(at_s)]).run(feed).records
            found += [one for one in records if 0.0 < one.scheduled_s - at_s - within_s < 20.0]
    assert errors(known)[1] < 0.01 < 0.1 < errors(unknown)[1]


@pytest.mark.parametrize("reports", ["push", "events"])
def test_a_replica_that_dies_comes_back_cold(reports: CacheReports) -> None:
    run = simulation(reports, [Kill(MIDDLE, 60.0, 80.0)])
    records = run.run(FEED).records
    run.router.check()
    late = [record for record in records if record.scheduled_s > 90.0 and record.replica == MIDDLE]
    assert errors(late)[0] < 0.05


def test_engines_of_vllms_kind_let_siblings_hit_a_prompt_in_mid_prefill_and_those_of_sglangs_do_not() -> None:
    """Two prompts of 40 blocks, the second one second into the prefill of the first, which takes about two."""
    blocks = b"".join(number.to_bytes(8, "little") for number in range(40))
    one = SimRequest(index=0, arrival_s=1.0, prompt_tokens=40 * 512 + 9, output_tokens=1, blocks=blocks, prefix_hash=0)
    pair = [one, replace(one, index=1, arrival_s=2.0)]
    found = {}
    for kind in KINDS:
        alone = SimFleet(fleet(kind, kv_tokens=900_000).replicas[:1])
        run = Simulation(alone, make_policy("round-robin"), seed=0)
        found[kind] = [record.cached_tokens for record in run.run(pair).records]
    assert found["sglang"] == [0, 0]
    assert found["vllm"] == [0, 40 * 512], "admitted in the step that computes the end of the first one"


KINDS_EVENTS: tuple[Kind, ...] = ("sglang", "vllm")
WHOLE, CUT = PathFaults(), PathFaults(cut=True)


def scene(kind: Kind = "sglang", *, items: int = 20) -> tuple[Scene, EventFeed]:
    made = Scene(kind, items=items)
    feed = EventFeed("replica", made.path, made.tokens, made.sink)
    feed.attach(made.engine)
    return made, feed


def set_faults(scene: Scene, at_s: float, faults: PathFaults) -> None:
    scene.at(at_s, partial(setattr, scene.path, "faults", faults))


@pytest.mark.parametrize("kind", KINDS_EVENTS)
def test_an_event_takes_one_trip(kind: Kind) -> None:
    made, _ = scene(kind)
    made.serve(1.0, "a", "b")
    made.kernel.run()
    assert {at_s for at_s, _ in made.sink.calls} == {1.125}
    made.assert_right()


def test_the_events_of_one_moment_are_one_batch() -> None:
    made, _ = scene(items=4)
    made.serve(1.0, "a", "b", "c")
    made.serve(2.0, "x", "y", "z")
    made.kernel.run()
    assert made.sink.calls == [(1.125, "BlocksStored"), (2.125, "BlocksRemoved, BlocksStored")]
    assert made.path.totals.eviction_delays_s == [0.125]
    made.assert_right()


def test_a_doubled_batch_is_applied_once() -> None:
    made, _ = scene()
    made.path.faults = PathFaults(doubled=1.0)
    made.serve(1.0, "a")
    made.kernel.run()
    assert len(made.sink.calls) == 1
    made.assert_right()


def test_a_lost_batch_comes_again_with_the_next_one() -> None:
    made, _ = scene()
    made.path.faults = PathFaults(lost=1.0)
    made.serve(1.0, "a")
    set_faults(made, 2.0, WHOLE)
    made.serve(3.0, "b")
    made.kernel.run()
    assert [at_s for at_s, _ in made.sink.calls] == [3.375, 3.375], "a question and its answer later"
    made.assert_right()


def test_a_batch_that_is_overtaken_is_applied_in_its_place() -> None:
    made, _ = scene()
    made.path.faults = PathFaults(reordered=1.0)
    made.serve(1.0, "a")
    set_faults(made, 1.05, WHOLE)
    made.serve(1.1, "a", "b")
    made.kernel.run()
    assert made.sink.index.stats[0].unknown_parents == 0
    made.assert_right()


def test_late_batches_stay_in_order() -> None:
    made, _ = scene()
    made.path.faults = PathFaults(late_s=2.0)
    made.serve(1.0, "a")
    set_faults(made, 1.05, WHOLE)
    made.serve(1.1, "a", "b")
    made.kernel.run()
    assert [at_s for at_s, _ in made.sink.calls] == [3.125, 3.125]
    made.assert_right()


def test_after_a_cut_the_feed_is_replayed() -> None:
    made, _ = scene(items=4)
    made.serve(1.0, "a", "b", "c")
    set_faults(made, 2.0, CUT)
    made.serve(3.0, "x", "y", "z")
    set_faults(made, 10.0, WHOLE)
    made.serve(11.0, "x", "q")
    made.kernel.run()
    assert made.sink.complete
    assert "lost" not in [kind for _, kind in made.sink.calls]
    made.assert_right()


def test_a_replay_that_stays_unanswered_for_two_minutes_leaves_a_partial_feed() -> None:
    made, _ = scene()
    made.serve(1.0, "a")
    set_faults(made, 2.0, PathFaults(lost=1.0))
    made.serve(3.0, "b")
    set_faults(made, 4.0, WHOLE)
    made.serve(5.0, "c")
    set_faults(made, 5.1, CUT)  # The third batch is on its way; its gap is seen while nothing answers.
    set_faults(made, 5.2 + 2 * GIVE_UP_S, WHOLE)
    made.serve(6.0 + 2 * GIVE_UP_S, "d")
    made.kernel.run()
    assert [kind for _, kind in made.sink.calls].count("lost") >= 1
    assert not made.sink.complete
    assert made.sink.index.blocks(0) <= 2


def test_batches_that_the_engine_has_no_longer_leave_a_partial_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.lab.sim.kv_events.BUFFERED_BATCHES", 2)
    made, _ = scene()
    set_faults(made, 0.0, PathFaults(lost=1.0))
    for number in range(5):
        made.serve(1.0 + number, f"lost {number}")
    set_faults(made, 7.0, WHOLE)
    made.serve(8.0, "z")
    made.kernel.run()
    assert [kind for _, kind in made.sink.calls] == ["lost", "BlocksStored", "BlocksStored"]
    assert not made.sink.complete
    assert made.sink.index.blocks(0) == 2
    assert BUFFERED_BATCHES == 10_000


def test_a_router_that_restarts_asks_for_all_batches() -> None:
    made, feed = scene()
    made.serve(1.0, "a", "b")
    made.serve(2.0, "c")
    made.at(5.0, feed.rejoin)
    made.kernel.run()
    assert made.sink.calls[2:] == [(5.0, "lost"), (5.25, "BlocksStored"), (5.25, "BlocksStored")]
    assert made.sink.complete
    made.assert_right()


def test_an_engine_that_is_back_has_an_empty_cache() -> None:
    made, feed = scene()
    made.serve(1.0, "a", "b")
    made.at(2.0, lambda: setattr(made.replica, "alive", False))
    made.at(2.0, lambda: feed.attach(made.new_engine()))
    made.at(3.0, lambda: setattr(made.replica, "alive", True))
    made.at(3.0, feed.started)
    made.serve(4.0, "c")
    made.kernel.run()
    assert made.sink.complete
    made.assert_right()


def test_a_replay_of_an_engine_that_has_died_is_not_applied() -> None:
    made, feed = scene()
    set_faults(made, 0.5, PathFaults(lost=1.0))
    made.serve(1.0, "b")
    set_faults(made, 2.0, WHOLE)
    made.serve(4.0, "c")  # Its batch shows the gap at 4.125; the engine reads the question at 4.25.
    set_faults(made, 4.24, PathFaults(late_s=0.4))
    set_faults(made, 4.26, PathFaults(lost=1.0))
    made.at(4.26, lambda: feed.attach(made.new_engine()))
    made.at(4.26, feed.started)
    set_faults(made, 4.3, WHOLE)
    made.serve(4.5, "x")  # The first batch of the new engine that arrives, at 4.625; the old answer comes at 4.775.
    made.kernel.run()
    assert "lost" not in [kind for _, kind in made.sink.calls]
    assert made.sink.complete
    made.assert_right()


PROMPTS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5), min_size=1, max_size=25)
FAULTS = st.builds(
    PathFaults,
    lost=st.sampled_from([0.0, 0.3]),
    doubled=st.sampled_from([0.0, 0.3]),
    reordered=st.sampled_from([0.0, 0.3]),
    late_s=st.sampled_from([0.0, 0.4]),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS_EVENTS), prompts=PROMPTS, faults=FAULTS, cut=st.booleans(), restart=st.booleans())
def test_under_any_faults_the_index_is_the_cache_after_the_next_batch(
    kind: Kind, prompts: list[list[str]], faults: PathFaults, cut: bool, restart: bool
) -> None:
    made, feed = scene(kind, items=8)
    made.path.faults = faults
    for number, prompt in enumerate(prompts):
        made.serve(1.0 + 0.2 * number, *prompt)
    if cut:
        set_faults(made, 2.0, CUT)
        set_faults(made, 3.0, faults)
    if restart:
        made.at(4.1, feed.rejoin)
    set_faults(made, 20.0, WHOLE)
    made.serve(60.0, "last", *"abcd")  # Its batch shows what is missing, and whether there was a gap.
    made.kernel.run()
    made.assert_right()
    assert made.sink.complete
    event(f"{'lost, ' if faults.lost else ''}{'reordered, ' if faults.reordered else ''}{'cut' if cut else ''}")


KINDS_PUSH: tuple[Kind, ...] = ("sglang", "vllm")


def scene_push(kind: Kind = "sglang", *, items: int = 20) -> tuple[Scene, PushFeed]:
    made = Scene(kind, items=items)
    feed = PushFeed("replica", made.path, made.tokens, made.sink, first_s=0.0)
    feed.attach(made.engine)
    return made, feed


@pytest.mark.parametrize("kind", KINDS_PUSH)
def test_the_full_set_comes_each_five_seconds(kind: Kind) -> None:
    made, _ = scene_push(kind)
    made.serve(1.0, "a", "b")
    made.kernel.run(until_s=11.0)
    assert made.sink.calls == [(0.125, "snapshot of 0"), (5.125, "snapshot of 2"), (10.125, "snapshot of 2")]
    assert made.sink.pushed == set(made.tokens.hashes(b"a       b       "))


@pytest.mark.parametrize("kind", KINDS_PUSH)
def test_evictions_of_100_ms_are_one_push(kind: Kind) -> None:
    made, _ = scene_push(kind, items=6)
    for number, prompt in enumerate(("ab", "cd", "ef", "gh")):
        made.serve(1.0 + number, *prompt)
    made.serve(6.0, "i", "j")
    made.serve(6.05, "k", "l")
    made.kernel.run(until_s=8.0)
    pushes = [(at_s, kind) for at_s, kind in made.sink.calls if at_s > 5.5]
    assert [at_s for at_s, _ in pushes] == [pytest.approx(6.225)]
    held = {own for key in made.keys for own in made.tokens.hashes(key)[: made.cached_items(key)]}
    assert made.sink.pushed <= held, "no phantom is left"


def test_a_lost_eviction_is_known_with_the_next_full_set() -> None:
    made, _ = scene_push(items=3)
    made.serve(1.0, "a", "b")
    made.at(5.5, partial(setattr, made.path, "faults", PathFaults(lost=1.0)))
    made.serve(6.0, "c", "d")
    made.at(7.0, partial(setattr, made.path, "faults", PathFaults()))
    made.kernel.run(until_s=9.9)
    assert made.sink.pushed == set(made.tokens.hashes(b"a       b       "))
    made.kernel.run(until_s=10.2)
    assert made.sink.pushed == set(made.tokens.hashes(b"c       d       "))


def test_an_engine_that_is_back_pushes_its_empty_cache() -> None:
    made, feed = scene_push()
    made.serve(1.0, "a")
    made.at(5.5, lambda: feed.attach(made.new_engine()))
    made.at(6.0, feed.started)
    made.kernel.run(until_s=6.2)
    assert made.sink.calls[-1] == (6.125, "snapshot of 0")


def test_a_flush_is_known_with_the_next_full_set() -> None:
    made, _ = scene_push()
    made.serve(1.0, "a")
    made.at(5.5, lambda: made.engine.flush())
    made.kernel.run(until_s=10.2)
    assert made.sink.pushed == set()


ITEMS = b"item---1item---2item---3item---4item---5"


@pytest.mark.parametrize(("item_tokens", "block_tokens"), [(512, 512), (8, 16), (64, 64), (3, 6)])
def test_own_hashes_are_those_of_the_tokens(item_tokens: int, block_tokens: int) -> None:
    tokens = BlockTokens(item_bytes=8, item_tokens=item_tokens, block_tokens=block_tokens)
    assert len(tokens.expand(ITEMS)) == 5 * item_tokens * 4
    expected = chain_hashes(tokens.expand(ITEMS), block_tokens=block_tokens)
    assert tokens.hashes(ITEMS) == expected
    assert tokens.hashes(ITEMS) == expected, "as before"
    per_block = block_tokens // item_tokens * 8
    assert tokens.hashes(ITEMS[per_block:], expected[0]) == expected[1:], "behind a block"


def test_a_served_token_is_its_four_bytes() -> None:
    tokens = BlockTokens(item_bytes=4, item_tokens=1, block_tokens=16)
    assert tokens.expand(b"oneAtwoB") == b"oneAtwoB"


def test_prompts_that_differ_share_no_block_from_there_on() -> None:
    tokens = BlockTokens(item_bytes=8, item_tokens=64, block_tokens=64)
    one, other = tokens.hashes(b"a" * 8 + b"b" * 8 + b"c" * 8), tokens.hashes(b"a" * 8 + b"x" * 8 + b"c" * 8)
    assert [one[place] == other[place] for place in range(3)] == [True, False, False]
