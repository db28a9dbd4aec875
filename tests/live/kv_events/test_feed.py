"""The feed of one publisher, message by message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.live.kv_events import feed as queue
from gorgo.live.kv_events.feed import (
    COOL_DOWN_S,
    MAX_CUT_S,
    MAX_REPLAYS,
    Apply,
    FeedAction,
    Forget,
    PublisherFeed,
    Replay,
)
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats


def text(number: int, process: int = 0) -> bytes:
    return b"%d of %d" % (number, process)


class Subscriber:
    """A feed with what it knows: the messages applied since the blocks were forgotten."""

    def __init__(self, *, replays: bool = True) -> None:
        self.stats = KvFeedStats()
        self.feed = PublisherFeed(replays=replays, stats=self.stats)
        self.known: list[bytes] = []
        self.wanted: Replay | None = None
        self.now = 0.0

    def act(self, actions: list[FeedAction]) -> list[FeedAction]:
        for action in actions:
            match action:
                case Apply():
                    self.known.append(action.payload)
                case Forget():
                    self.known.clear()
                case Replay():
                    self.wanted = action
        return actions

    def state(self) -> FeedState:
        return FeedState(self.feed.state.value)

    def connect(self) -> None:
        self.act(self.feed.connected(now=self.now))

    def live(self, *numbers: int, process: int = 0) -> None:
        for number in numbers:
            self.act(self.feed.received(number, text(number, process), now=self.now))

    def answer(self, *numbers: int, process: int = 0, ends: bool = True) -> None:
        """Answer the replay wanted with those of `numbers` that it asked for."""
        wanted = self.wanted
        assert wanted is not None
        self.wanted = None
        for number in numbers:
            if number >= wanted.start:
                self.act(self.feed.replayed(wanted.generation, number, text(number, process)))
        end = self.feed.replay_ended if ends else self.feed.replay_failed
        self.act(end(wanted.generation, now=self.now))

    def knows(self, *numbers: int, process: int = 0) -> bool:
        return self.known == [text(number, process) for number in numbers]


def started(*numbers: int, replays: bool = True) -> Subscriber:
    """A live subscriber that has had the messages `numbers`."""
    subscriber = Subscriber(replays=replays)
    subscriber.connect()
    if replays:
        subscriber.answer()
    subscriber.live(*numbers)
    return subscriber


def test_a_subscriber_of_the_first_message_is_live() -> None:
    subscriber = started(0, 1)
    assert (subscriber.feed.state, subscriber.feed.known.complete) == (FeedState.LIVE, True)
    assert subscriber.knows(0, 1)


def test_without_a_message_and_replays_the_feed_waits() -> None:
    subscriber = started(replays=False)
    assert subscriber.state() == FeedState.WAITING
    subscriber.live(0)
    assert subscriber.state() == FeedState.LIVE


def test_a_late_subscriber_without_replays_is_partial() -> None:
    subscriber = started(7, 8, replays=False)
    assert (subscriber.feed.state, subscriber.feed.known.complete) == (FeedState.PARTIAL, False)
    assert subscriber.knows(7, 8)


def test_a_late_subscriber_gets_all_messages_by_a_replay_and_live_ones_wait() -> None:
    subscriber = Subscriber()
    subscriber.connect()
    subscriber.live(3, 4)
    assert subscriber.known == []
    subscriber.answer(0, 1, 2, 3)
    assert subscriber.knows(0, 1, 2, 3, 4)
    assert subscriber.state() == FeedState.LIVE


def test_a_buffer_that_does_not_reach_back_leaves_a_partial_feed() -> None:
    subscriber = Subscriber()
    subscriber.connect()
    subscriber.answer(40, 41)
    assert (subscriber.feed.state, subscriber.feed.known.complete) == (FeedState.PARTIAL, False)
    assert subscriber.knows(40, 41)


def test_a_gap_is_replayed_in_order() -> None:
    subscriber = started(0, 1)
    subscriber.live(4, 5)
    assert subscriber.state() == FeedState.GAP
    subscriber.answer(0, 1, 2, 3, 4)
    assert subscriber.knows(0, 1, 2, 3, 4, 5)
    assert (subscriber.feed.state, subscriber.stats.gaps) == (FeedState.LIVE, 1)


def test_a_gap_that_the_publisher_does_not_retain_forgets_what_was_known() -> None:
    subscriber = started(0, 1)
    subscriber.live(9)
    subscriber.answer(8, 9)
    assert subscriber.knows(8, 9)
    assert subscriber.state() == FeedState.PARTIAL


def test_a_gap_without_replays_forgets_what_was_known() -> None:
    subscriber = started(0, 1, replays=False)
    subscriber.live(3)
    assert subscriber.knows(3)
    assert subscriber.state() == FeedState.PARTIAL


def test_a_number_that_goes_back_is_a_new_process() -> None:
    subscriber = started(0, 1, 2)
    subscriber.live(0, process=1)
    assert subscriber.knows(0, process=1)
    assert (subscriber.feed.state, subscriber.stats.restarts) == (FeedState.LIVE, 1)


def test_a_new_process_whose_first_messages_were_missed_is_replayed() -> None:
    subscriber = started(0, 1, 2)
    subscriber.live(2, process=1)
    assert subscriber.state() == FeedState.RESTARTED
    assert subscriber.known == []
    subscriber.answer(0, 1, 2, process=1)
    assert subscriber.knows(0, 1, 2, process=1)
    assert subscriber.state() == FeedState.LIVE


def test_a_new_process_that_has_passed_the_last_number_is_found_by_the_content_of_that_message() -> None:
    subscriber = started(0, 1, 2)
    subscriber.feed.disconnected(now=1.0)
    subscriber.connect()
    subscriber.live(9, process=1)
    subscriber.answer(*range(9), process=1)
    assert subscriber.known == []
    subscriber.answer(*range(10), process=1)
    assert subscriber.knows(*range(10), process=1)
    assert subscriber.stats.restarts == 1


def test_a_short_cut_is_repaired_without_forgetting() -> None:
    subscriber = started(0, 1)
    subscriber.feed.disconnected(now=0.0)
    assert subscriber.state() == FeedState.CUT
    subscriber.act(subscriber.feed.tick(now=MAX_CUT_S / 2))
    subscriber.connect()
    subscriber.answer(0, 1, 2)
    assert subscriber.knows(0, 1, 2)
    assert subscriber.state() == FeedState.LIVE


def test_a_long_cut_forgets_and_a_replay_of_all_follows_it() -> None:
    subscriber = started(0, 1)
    subscriber.feed.disconnected(now=0.0)
    subscriber.act(subscriber.feed.tick(now=MAX_CUT_S))
    assert subscriber.known == []
    assert not subscriber.feed.known.complete
    subscriber.now = MAX_CUT_S + 1
    subscriber.connect()
    assert subscriber.wanted is not None
    assert subscriber.wanted.start == 0
    subscriber.answer(0, 1, 2)
    assert subscriber.knows(0, 1, 2)


def test_a_short_cut_without_replays_costs_nothing_if_no_message_was_missed() -> None:
    subscriber = started(0, 1, replays=False)
    subscriber.feed.disconnected(now=0.0)
    subscriber.connect()
    subscriber.live(2)
    assert subscriber.knows(0, 1, 2)
    assert subscriber.state() == FeedState.LIVE


def test_a_failed_replay_is_repeated_after_the_cool_down() -> None:
    subscriber = started(0, 1)
    subscriber.live(5)
    subscriber.answer(ends=False)
    assert subscriber.knows(5)
    assert (subscriber.feed.state, subscriber.stats.failed_replays) == (FeedState.PARTIAL, 1)
    assert subscriber.feed.tick(now=COOL_DOWN_S - 1) == []
    subscriber.now = COOL_DOWN_S
    subscriber.act(subscriber.feed.tick(now=subscriber.now))
    subscriber.answer(*range(6))
    assert subscriber.knows(*range(6))
    assert subscriber.state() == FeedState.LIVE


def test_a_gap_within_the_cool_down_is_not_replayed() -> None:
    subscriber = started(0)
    subscriber.live(5)
    subscriber.answer(ends=False)
    subscriber.live(9)
    assert subscriber.wanted is None
    assert subscriber.knows(9)
    assert subscriber.stats.failed_replays == 1


def test_a_hole_in_a_replay_is_requested_again() -> None:
    subscriber = started(0)
    subscriber.live(5)
    subscriber.answer(0, 1, 3, 4)
    assert subscriber.knows(0, 1)
    subscriber.answer(1, 2, 3, 4, 5)
    assert subscriber.knows(0, 1, 2, 3, 4, 5)


def test_replays_that_never_reach_the_live_messages_end() -> None:
    subscriber = started(0)
    subscriber.live(100)
    for number in range(1, MAX_REPLAYS + 1):
        assert subscriber.wanted is not None
        subscriber.answer(number - 1, number, number + 2)
    assert subscriber.wanted is None
    assert subscriber.knows(100)
    assert subscriber.state() == FeedState.PARTIAL


def test_the_queue_of_a_long_replay_is_bounded_and_its_rest_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_MESSAGES", 3)
    subscriber = Subscriber()
    subscriber.connect()
    subscriber.live(*range(10))
    subscriber.answer(0)
    assert subscriber.knows(0, 1, 2)
    subscriber.live(10)
    subscriber.answer(*range(11))
    assert subscriber.knows(*range(11))


def test_the_bytes_of_the_queue_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_BYTES", 10)
    waiting = queue.MessageQueue()
    waiting.add(1, b"12345678")
    waiting.add(2, b"123")
    assert len(waiting) == 1
    assert waiting.pop() == (1, b"12345678")
    waiting.add(3, b"123")
    assert len(waiting) == 1


def test_messages_of_an_older_replay_are_ignored() -> None:
    subscriber = Subscriber()
    subscriber.connect()
    old = subscriber.wanted
    assert old is not None
    subscriber.connect()
    assert subscriber.feed.replayed(old.generation, 0, b"old") == []
    assert subscriber.feed.replay_ended(old.generation, now=0.0) == []
    assert subscriber.feed.replay_failed(old.generation, now=0.0) == []


def test_an_empty_cache_completes_a_partial_feed() -> None:
    subscriber = started(7, replays=False)
    subscriber.feed.known.emptied(0)
    assert subscriber.state() == FeedState.LIVE


def test_an_empty_cache_of_before_a_loss_completes_nothing() -> None:
    subscriber = started(0, replays=False)
    subscriber.live(7)
    subscriber.feed.known.emptied(0)
    assert subscriber.state() == FeedState.PARTIAL


def test_an_unreadable_event_leaves_a_partial_feed() -> None:
    subscriber = started(0)
    subscriber.feed.known.spoiled(0)
    assert subscriber.state() == FeedState.PARTIAL


def test_a_silent_feed_is_live_with_its_next_message() -> None:
    subscriber = started()
    subscriber.feed.silent = True
    assert subscriber.state() == FeedState.SILENT
    subscriber.live(0)
    assert subscriber.state() == FeedState.LIVE


#: Steps of a publisher and of the network.
STEPS = st.lists(
    st.sampled_from(["publish", "lose", "restart", "cut", "connect", "replay", "fail", "hole", "wait"]), max_size=60
)


@settings(max_examples=400, deadline=None)
@given(steps=STEPS, retained=st.integers(1, 6), replays=st.booleans())
def test_a_complete_feed_knows_each_message_of_one_process_up_to_the_last(
    steps: list[str], retained: int, replays: bool
) -> None:
    subscriber, feed = (found := Subscriber(replays=replays)), found.feed
    process, next_number, connected = 0, 0, False
    for step in [*steps, "connect", "wait", "replay"]:
        match step:
            case "publish" | "lose":
                if connected and step == "publish":
                    subscriber.live(next_number, process=process)
                next_number += 1
            case "restart":
                process, next_number = process + 1, 0
                feed.disconnected(now=subscriber.now)
                connected = False
            case "cut":
                feed.disconnected(now=subscriber.now)
                connected = False
            case "connect":
                if not connected:
                    subscriber.connect()
                connected = True
            case "replay":
                if subscriber.wanted is not None:
                    subscriber.answer(*range(max(0, next_number - retained), next_number), process=process)
            case "fail":
                if subscriber.wanted is not None:
                    subscriber.answer(ends=False)
            case "hole":
                if subscriber.wanted is not None:
                    held = range(max(0, next_number - retained), next_number)
                    subscriber.answer(*(number for number in held if number != next_number - 2), process=process)
            case "wait":
                subscriber.now += 31.0
                subscriber.act(feed.tick(now=subscriber.now))
        numbers = [int(found.split()[0]) for found in subscriber.known]
        # What is known is of one process and without a hole, from the start if it is complete.
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if not replays:
            # Without replays, a new process can have exactly the next number; with them its content is compared.
            continue
        assert len({found.split()[2] for found in subscriber.known}) <= 1
        if feed.known.complete and numbers:
            assert numbers[0] == 0
