"""Messages of KV events in the event loop: their parts, who decodes them, and the share of a turn that they get."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.msgpack import encode

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.engines.kv_events import decode_message
from gorgo.engines.kv_sources import KvEventSource
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live import extras
from gorgo.live.kv_events import sockets as turns
from gorgo.live.kv_events import subscriber
from gorgo.live.kv_events.feed import Apply
from gorgo.live.kv_events.sockets import Arrivals, Turn, import_zmq
from gorgo.live.kv_events.subscriber import KvDecoder
from gorgo.live.kv_events.subscription import Subscription, is_end, read_message, replay_request
from gorgo.live.kv_events.worker import PIECE_BLOCKS, pieces
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats, worst

# --- Short messages are decoded in one step and applied in another; nothing comes between the two.


class Sink:
    """In the place of the applier: the numbers of the blocks that were removed, in order."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.forgotten = False

    def apply_batch(self, batch: KvEventBatch, era: int, subscription: Subscription) -> None:
        self.applied += [own for event in batch.events if isinstance(event, BlocksRemoved) for own in event.hashes]

    async def apply_message(self, action: Apply, subscription: Subscription) -> None:
        self.applied.append(-1)

    async def forget_blocks(self, subscription: Subscription, *, restarted: bool) -> None:
        self.forgotten = True
        self.applied.append(-2)

    def changed(self) -> None:
        """Ignore it."""


def message(number: int) -> list[bytes]:
    payload = encode([1.0, [{"type": "BlockRemoved", "block_hashes": [number]}], 0])
    return [b"", number.to_bytes(8, "big"), payload]


@pytest.fixture
async def live() -> tuple[Subscription, Sink]:
    """A subscription that has had message 0, without sockets."""
    sink, source = Sink(), KvEventSource("tcp://127.0.0.1:0", None, "")
    sockets: Any = SimpleNamespace()
    slots, stats = asyncio.Semaphore(1), KvFeedStats(state=FeedState.LIVE)
    found = Subscription("r0", source, sockets, slots, sink, stats, lambda: 1.0)
    await found._handle(lambda: found.feed.connected(now=1.0))
    await found._handle(lambda: found.feed.received(0, message(0)[-1], now=1.0))
    sink.applied.clear()
    return found, sink


async def test_a_message_is_applied_in_the_step_after_it_was_decoded(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    assert (sink.applied, subscription._stats.messages) == ([], 0), "a message that counts is applied"
    assert (subscription.finish_message(), sink.applied, subscription.finish_message()) == (True, [1], False)
    assert subscription._stats.messages == 1


async def test_an_input_waits_for_the_message_before_it(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    await subscription._handle(lambda: subscription.feed.received(2, message(2)[-1], now=1.0))
    assert sink.applied == [1, -1]


async def test_blocks_are_forgotten_behind_the_message_before_a_restart(live: tuple[Subscription, Sink]) -> None:
    subscription, sink = live
    assert subscription.take_message(message(1))
    await subscription._handle(lambda: subscription.feed.received(0, message(7)[-1], now=1.0))
    assert (sink.forgotten, sink.applied) == (True, [1, -2, -1])


# --- Large messages are decoded by a process, as short ones are in the event loop.


BLOCKS = 4 * PIECE_BLOCKS
MESSAGE = encode(
    [
        1.0,
        [
            {"type": "BlockStored", "block_hashes": list(range(2**40, 2**40 + BLOCKS)), "block_size": 8}
            | {"parent_block_hash": None, "token_ids": list(range(100_000, 100_000 + 8 * BLOCKS))},
            {"type": "BlockRemoved"},
        ],
        0,
    ]
)


@pytest.fixture
async def decoder() -> AsyncIterator[KvDecoder]:
    found = KvDecoder()
    yield found
    await found.aclose()


async def decoded(decoder: KvDecoder, message: bytes) -> list[KvEventBatch]:
    return [piece async for piece in decoder.decode(message)]


async def test_a_process_decodes_what_the_event_loop_would(decoder: KvDecoder) -> None:
    assert len(MESSAGE) > subscriber.LOOP_BYTES
    by_process = await decoded(decoder, MESSAGE)
    assert by_process == list(pieces(decode_message(MESSAGE)))
    assert len(by_process) == 4
    assert sum(piece.rejected for piece in by_process) == 1
    assert sum(len(event.hashes) for piece in by_process for event in piece.events if isinstance(event, BlocksStored))


async def test_a_large_message_that_is_none_is_refused_and_the_next_one_decoded(decoder: KvDecoder) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        await decoded(decoder, b"\xc1" * (subscriber.LOOP_BYTES + 1))
    assert len(await decoded(decoder, MESSAGE)) == 4


async def test_a_message_is_decoded_whatever_kills_or_stops_the_process(
    decoder: KvDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.live.helper_process.CHECK_S", 0.4)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        await decoded(decoder, MESSAGE)
        pid = decoder._helper.pid
        assert pid is not None
        os.kill(pid, number)
        assert await decoded(decoder, MESSAGE) == list(pieces(decode_message(MESSAGE)))


async def test_a_message_that_no_process_decodes_is_an_error(
    decoder: KvDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ValueError, match="the process that decodes it could not be started"):
        await decoded(decoder, MESSAGE)


async def test_messages_of_several_replicas_wait_for_each_other(decoder: KvDecoder) -> None:
    found = await asyncio.gather(*(decoded(decoder, MESSAGE) for _ in range(3)))
    assert found[0] == found[1] == found[2]


# --- Frames, pieces of batches, states, and the extra.


NUMBER = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("head", [[], [b""], [b"topic"], [b"", b"topic"]])
def test_number_and_payload_are_the_last_two_frames(head: list[bytes]) -> None:
    assert read_message([*head, NUMBER, b"payload"]) == (7, b"payload")


@pytest.mark.parametrize("frames", [[], [b"x"], [b"topic", b"short", b"x"], [b""] * 5, [b"", b"", b"", NUMBER, b"x"]])
def test_other_frames_are_no_message(frames: list[bytes]) -> None:
    assert read_message(frames) is None


@pytest.mark.parametrize("frames", [[b"", END, b""], [b"", b"", END, b""], [b"", b""], [b""]])
def test_a_replay_ends_with_number_minus_one_or_empty_frames(frames: list[bytes]) -> None:
    assert is_end(frames)
    assert not is_end([b"", NUMBER, b"payload"])


def test_a_request_is_an_empty_frame_and_a_number() -> None:
    assert replay_request(7) == [b"", NUMBER]


BLOCK = 2
COUNT = 2 * PIECE_BLOCKS + 3


def stored() -> BlocksStored:
    tokens = token_bytes(range(COUNT * BLOCK))
    extra_keys = {0: b"first", PIECE_BLOCKS: b"image", COUNT - 1: b"last"}
    return BlocksStored(tuple(range(100, 100 + COUNT)), None, tokens, BLOCK, KvTier.GPU, adapter="a", extra=extra_keys)


def known(batches: list[KvEventBatch]) -> list[int]:
    index = KvEventIndex(block_tokens=BLOCK, max_blocks_per_replica=10_000)
    for batch in batches:
        index.apply(0, batch)
    return sorted(index._tiers[KvTier.GPU].masks)


def test_pieces_of_a_long_event_make_the_same_blocks() -> None:
    batch = KvEventBatch(1.0, 0, (stored(),))
    parts = list(pieces(batch))
    assert len(parts) == 3
    assert known(parts) == known([batch])
    assert len(known(parts)) == COUNT


def test_pieces_have_all_events_in_order_and_the_counts_once() -> None:
    events: list[KvEvent] = [CacheCleared(), *(BlocksRemoved((number,), KvTier.GPU) for number in range(COUNT))]
    batch = KvEventBatch(1.0, 3, tuple(events), skipped=4, rejected=5, error="bad")
    parts = list(pieces(batch))
    assert [event for part in parts for event in part.events] == events
    assert max(len(part.events) for part in parts) == PIECE_BLOCKS
    assert sum(part.rejected for part in parts) == 5
    assert sum(part.skipped for part in parts) == 4
    assert {part.rank for part in parts} == {3}


def test_an_empty_batch_is_one_piece() -> None:
    batch = KvEventBatch(None, 0, (), rejected=1)
    assert list(pieces(batch)) == [batch]


def test_blocks_without_tokens_are_split_too() -> None:
    event = replace(stored(), tokens=b"", block_tokens=None, extra={})
    parts = [part for piece in pieces(KvEventBatch(None, 0, (event,))) for part in piece.events]
    assert sum(len(part.hashes) for part in parts if isinstance(part, BlocksStored)) == COUNT


def test_the_worst_state_of_ranks_is_the_replicas() -> None:
    assert worst([FeedState.LIVE, FeedState.CUT, FeedState.PARTIAL]) == FeedState.CUT
    assert worst([]) == FeedState.OFF


REPLICA = ReplicaConfig(name="r", region="here", url="http://r")


def test_without_pyzmq_only_replicas_with_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    extras.check_extras([REPLICA])
    with pytest.raises(InvalidValueError, match=r"replica 'r', kv_events: .*pip install 'gorgo-router\[events\]'"):
        extras.check_extras([REPLICA, replace(REPLICA, kv_events=KvEventsConfig())])


def test_a_missing_pyzmq_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gorgo-router\[events\]'"):
        import_zmq()


# --- The share of subscriptions in the event loop.


class Now:
    """A clock of the module that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 1000.0
        monkeypatch.setattr(turns, "perf_counter", lambda: self.s)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def stepping(now: Now, steps: list[str], name: str, times: int, lasts_s: float) -> Callable[[], bool]:
    """A step to be called so many times."""

    def step() -> bool:
        steps.append(name)
        now.s += lasts_s
        return steps.count(name) < times

    return step


async def test_a_turn_of_the_loop_has_the_steps_of_all_subscriptions_within_its_time(now: Now) -> None:
    turn, steps, by_turn = Turn(), list[str](), []
    for name in "abc":
        turn.add(stepping(now, steps, name, 2, 0.6 * turns.TURN_S))
    while len(steps) < 6:
        before = len(steps)
        await asyncio.sleep(0)
        by_turn.append("".join(steps[before:]))
    assert by_turn == ["ab", "ca", "bc"]


async def test_a_turn_with_other_work_has_no_step_until_the_longest_wait(now: Now) -> None:
    turn, steps, waited_s = Turn(), list[str](), now.s
    turn.add(stepping(now, steps, "a", 3, 0.0))
    began_s = []
    while len(steps) < 3:
        before, now.s = len(steps), now.s + 2 * turns.OTHER_WORK_S  # a request
        await asyncio.sleep(0)
        if len(steps) > before:
            began_s.append(now.s - waited_s)
            waited_s = now.s
    assert len(began_s) == 1, "one step is short, so that a turn has several"
    assert began_s == [pytest.approx(turns.MAX_WAIT_S, abs=2 * turns.OTHER_WORK_S)]


async def test_without_other_work_a_step_is_in_the_next_turn(now: Now) -> None:
    turn, steps = Turn(), list[str]()
    for _ in range(3):
        now.s += 1.0  # work before the step waits is no reason
        turn.add(stepping(now, steps, "a", 1, 0.0))
        await asyncio.sleep(0)
        assert steps.pop() == "a"


async def test_coroutines_have_a_turn_in_order_and_who_has_left_none() -> None:
    turn, order = Turn(), list[str]()

    async def subscribed(name: str) -> None:
        await turn.pause()
        order.append(name)

    tasks = {name: asyncio.create_task(subscribed(name)) for name in "abcd"}
    await asyncio.sleep(0)
    tasks["b"].cancel()
    await asyncio.wait(tasks.values())
    assert order == ["a", "c", "d"]
    assert not turn._waiting


async def test_sockets_in_use_are_looked_at_together_after_an_interval() -> None:
    loop, arrivals, looks, done = asyncio.get_running_loop(), Arrivals(), list[str](), asyncio.Event()

    def look(name: str, times: int) -> bool:
        looks.append(name)
        if len(looks) == 6:
            done.set()
        return looks.count(name) < times

    began_s = loop.time()
    for name, times in (("a", 1), ("b", 3), ("c", 2)):
        arrivals.add(partial(look, name, times))
    assert not looks
    await asyncio.wait_for(done.wait(), timeout=10)
    assert looks == ["a", "b", "c", "b", "c", "b"]
    assert loop.time() - began_s >= 2.9 * turns.MIN_GATHER_S


@pytest.mark.parametrize(("sockets", "gather_s"), [(1, 0.02), (3, 0.02), (5, 0.03), (64, 0.05)])
def test_many_sockets_are_looked_at_less_often(sockets: int, gather_s: float) -> None:
    arrivals, later = Arrivals(), list[float]()
    loop = cast(asyncio.AbstractEventLoop, SimpleNamespace(call_later=lambda delay_s, *_: later.append(delay_s)))
    arrivals._polls = [lambda: True] * sockets
    arrivals._poll_all(loop)
    assert later == [pytest.approx(gather_s)]


async def test_a_wake_waits_for_the_next_look_while_any_socket_is_in_use() -> None:
    arrivals = Arrivals()
    assert arrivals.may_wake()
    arrivals.add(lambda: False)
    assert not arrivals.may_wake()


def test_wakes_of_the_loop_are_bounded_by_a_rate(now: Now) -> None:
    arrivals = Arrivals()
    assert sum(arrivals.may_wake() for _ in range(100)) == turns.MAX_WAKES
    now.s += 5.5 / turns.WAKES_PER_S
    assert sum(arrivals.may_wake() for _ in range(100)) == 5
    now.s += 3600.0
    assert sum(arrivals.may_wake() for _ in range(100)) == turns.MAX_WAKES
