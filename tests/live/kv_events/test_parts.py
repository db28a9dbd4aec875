"""Frames, pieces of batches, states, and the extra."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from gorgo.config.fleet import KvEventsConfig, ReplicaConfig
from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live import extras
from gorgo.live.kv_events.pieces import PIECE_BLOCKS, pieces
from gorgo.live.kv_events.sockets import import_zmq
from gorgo.live.kv_events.subscription import is_end, read_message, replay_request
from gorgo.live.kv_feed_stats import FeedState, worst

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
