"""KV events from an engine to the Router: one trip, and every fault of the way."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gorgo.sim.kv_events.events import GIVE_UP_S, EventFeed
from gorgo.sim.kv_events.path import PathFaults
from gorgo.sim.kv_events.publisher import BUFFERED_BATCHES
from tests.sim.kv_events.feeds import Kind, Scene

KINDS: tuple[Kind, ...] = ("sglang", "vllm")
WHOLE, CUT = PathFaults(), PathFaults(cut=True)


def scene(kind: Kind = "sglang", *, items: int = 20) -> tuple[Scene, EventFeed]:
    made = Scene(kind, items=items)
    feed = EventFeed("replica", made.path, made.tokens, made.sink)
    feed.attach(made.engine)
    return made, feed


def set_faults(scene: Scene, at_s: float, faults: PathFaults) -> None:
    scene.at(at_s, partial(setattr, scene.path, "faults", faults))


@pytest.mark.parametrize("kind", KINDS)
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
    monkeypatch.setattr("gorgo.sim.kv_events.publisher.BUFFERED_BATCHES", 2)
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
@given(kind=st.sampled_from(KINDS), prompts=PROMPTS, faults=FAULTS, cut=st.booleans(), restart=st.booleans())
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
