"""Plain messages decoded at once have the events that they have when each is decoded alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode

from gorgo.core.messages.kv_events import BlocksRemoved, CacheCleared, KvEvent, KvEventBatch
from gorgo.engines.kv_events import decode_each
from gorgo.engines.kv_plain import MAX_PLAIN_BYTES, decode_plain
from tests.engines.test_kv_events import ANYTHING, STORED, STORED_ARRAY

PLAIN = {"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": -1, "token_ids": [1, 2, 3, 4]} | {
    "block_size": 2,
    "medium": "GPU",
    "extra_keys": [None, None],
    "group_idx": 1,
    "cache_salt": "s",
}
CLEARED = {"type": "AllBlocksCleared"}
REMOVED = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU_PINNED", "group_idx": 2}


def message(*events: object) -> bytes:
    return encode([1.5, list(events), 3])


def apart(batch: KvEventBatch) -> KvEventBatch:
    """The same events, each removal of one block."""
    events: list[KvEvent] = []
    for event in batch.events:
        if isinstance(event, BlocksRemoved) and event.hashes:
            events += [replace(event, hashes=(each,)) for each in event.hashes]
        else:
            events.append(event)
    return replace(batch, events=tuple(events), merged=0)


@pytest.mark.parametrize(
    "events",
    [
        [PLAIN, REMOVED, CLEARED],
        [],
        [REMOVED, REMOVED, REMOVED | {"medium": None}, REMOVED | {"medium": "GPU"}],
        [PLAIN | {"token_ids": []}],
        [PLAIN | {"kv_cache_spec_kind": "sliding_window"}, REMOVED],
        [PLAIN | {"medium": "DISK", "further": {"a": 1}}],
    ],
)
def test_plain_events_are_decoded_at_once(events: list[object]) -> None:
    found = decode_plain(message(*events))
    assert found is not None
    assert apart(found) == apart(decode_each(message(*events)))


@pytest.mark.parametrize(
    "event",
    [
        STORED_ARRAY,
        {"type": "Other"},
        PLAIN | {"block_hashes": [bytes(32), bytes(32)]},
        PLAIN | {"token_ids": [1, 2, 3]},
        PLAIN | {"token_ids": [1, 2, 3, 2**32]},
        PLAIN | {"token_ids": [1, 2, 3, -1]},
        PLAIN | {"extra_keys": [None, ["image"]]},
        PLAIN | {"lora_name": "sql"},
        PLAIN | {"block_hashes": None},
        PLAIN | {"medium": "TAPE"},
    ],
)
def test_other_events_are_left_to_the_whole_decoder(event: object) -> None:
    assert decode_plain(message(REMOVED, event)) is None


@pytest.mark.parametrize("batch", [{"ts": 1.0, "events": []}, [1.0], ["now", []], [1.0, [], -1], [1.0, [], 65_536], 3])
def test_other_batches_are_left_to_the_whole_decoder(batch: object) -> None:
    assert decode_plain(encode(batch)) is None


def test_a_long_message_is_left_to_the_whole_decoder() -> None:
    assert decode_plain(message(*[CLEARED] * (MAX_PLAIN_BYTES // 10))) is None


@settings(max_examples=200, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(sorted({**STORED, **PLAIN})), ANYTHING), rest=st.lists(ANYTHING, max_size=2)
)
def test_whatever_is_decoded_at_once_is_decoded_alike_alone(fields: dict[str, object], rest: list[object]) -> None:
    text = message(PLAIN | fields, REMOVED, *rest, CLEARED)
    found = decode_plain(text)
    assert found is None or apart(found) == apart(decode_each(text))


def test_removals_in_a_row_from_one_cache_are_one_event() -> None:
    gpu, cpu = REMOVED | {"medium": "GPU"}, REMOVED | {"block_hashes": [8, -1]}
    found = decode_plain(message(gpu, gpu, REMOVED, cpu, PLAIN, gpu, gpu | {"group_idx": 3}))
    assert found is not None
    assert [event.hashes for event in found.events if not isinstance(event, CacheCleared)] == [
        *((7, 7), (7, 8, 2**64 - 1), (1, 2**64 - 2), (7,), (7,))
    ]
    assert (found.merged, found.sent_events) == (2, 7)
