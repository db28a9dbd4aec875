"""KV events: as real engines sent them (`fixtures/README.md`), as SGLang and vLLM write them, and as nobody should."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.msgpack import encode

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import TOKEN_BYTES, chain_hashes, chain_root, token_bytes
from gorgo.engines.kv_events import (
    MAX_EVENTS,
    MAX_MESSAGE_BYTES,
    MAX_PLAIN_BYTES,
    decode_each,
    decode_message,
    decode_plain,
)
from gorgo.live.kv_events.subscription import read_message

# --- Messages as SGLang and vLLM write them, and as nobody should.


TOKENS = [1, 2, 3, 151_000]
STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [5, 6],
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}
#: vLLM's and SGLang's event as an array, up to 0.23 and 0.5.18.
STORED_ARRAY = ["BlockStored", *[STORED[name] for name in STORED if name != "type"]]
EXPECTED = BlocksStored((5, 6), None, token_bytes(TOKENS), 2, KvTier.GPU)
CLEARED = ["AllBlocksCleared"]


def decoded(*events: object) -> KvEventBatch:
    return decode_message(encode([1.0, list(events), 0]))


def one(event: object) -> KvEvent:
    batch = decoded(event)
    assert (batch.rejected, batch.skipped, batch.error) == (0, 0, None)
    return batch.events[0]


def stored(**fields: object) -> BlocksStored:
    event = one({**STORED, **fields})
    assert isinstance(event, BlocksStored)
    return event


@pytest.mark.parametrize("event", [STORED, STORED_ARRAY], ids=["map", "array"])
@pytest.mark.parametrize("form", ["array", "vllm map", "sglang map"])
def test_both_forms_of_events_come_in_both_forms_of_batches(event: object, form: str) -> None:
    rank_field = {"array": None, "vllm map": "data_parallel_rank", "sglang map": "attn_dp_rank"}[form]
    batch = [1.5, [event], 3] if rank_field is None else {"ts": 1.5, "events": [event], rank_field: 3}
    assert decode_message(encode(batch)) == KvEventBatch(1.5, 3, (EXPECTED,))


@pytest.mark.parametrize("batch", [[1.5, []], [1.5, [], None], {"events": []}, [None, [], 0, "more"]])
def test_missing_and_further_fields_of_a_batch_are_legal(batch: object) -> None:
    found = decode_message(encode(batch))
    assert (found.rank, found.events, found.rejected) == (0, (), 0)


def test_a_time_that_is_none_is_unknown() -> None:
    assert decode_message(encode(["now", [CLEARED], 0])) == KvEventBatch(None, 0, (CacheCleared(),))


def test_missing_and_further_fields_of_an_event_are_legal() -> None:
    short = {name: STORED[name] for name in ("type", "block_hashes", "token_ids", "block_size")}
    assert one(short) == one(STORED_ARRAY[:5]) == EXPECTED
    tail = [None, None, 0, "full_attention", None, "LOCAL", None, "session", {"more": [1]}]
    assert one({**STORED, "lookahead_token_ids": [[{}]], "session_id": 5}) == one([*STORED_ARRAY, *tail]) == EXPECTED


def test_hashes_are_the_low_64_bits_of_any_form() -> None:
    digest = bytes(24) + b"\xff" * 8
    assert one(["BlockRemoved", [-1, 2**64 - 1, digest, 7], "CPU", 1]) == BlocksRemoved(
        (2**64 - 1,) * 3 + (7,), KvTier.CPU, 1
    )
    assert stored(parent_block_hash=-2).parent == 2**64 - 2


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, KvTier.GPU), ("CPU", KvTier.CPU), ("CPU_PINNED", KvTier.CPU), ("DISK", None), ("STORAGE", None)],
)
def test_memories_are_gpu_cpu_or_not_indexed(medium: str | None, tier: KvTier | None) -> None:
    assert stored(medium=medium).tier is tier


def test_adapters_and_salts_are_read_wherever_an_engine_has_them() -> None:
    # vLLM: names and salts are among the extra keys of a block, the name in each.
    event = stored(lora_id=1, lora_name="lora", extra_keys=[["lora", "salt"], ["lora"]])
    assert (event.adapter, event.cache_salt, event.extra) == ("lora", "salt", {})
    # SGLang: a field, or a map in the eighth place.
    assert stored(cache_salt="salt").cache_salt == "salt"
    metadata = one([*STORED_ARRAY, {"cache_salt": "salt", "session_id": 1}])
    assert isinstance(metadata, BlocksStored)
    assert metadata.cache_salt == "salt"
    assert (stored(lora_id=3).adapter, stored(lora_id=0).adapter) == ("#3", None)


def test_images_are_extra_content_of_their_blocks() -> None:
    event = stored(extra_keys=[None, [["image", 3]]])
    assert event.extra == {1: encode(["image", 3])}
    assert event.cache_salt is None
    assert stored(extra_keys=[["salt", ["image", 0]], None]).extra.keys() == {0}
    assert stored(parent_block_hash=1, extra_keys=[["image"], []]).extra == {0: encode("image")}


def test_an_offloaded_block_has_no_tokens() -> None:
    event = stored(token_ids=[], block_size=0, medium="CPU")
    assert (event.tokens, event.block_tokens, event.hashes) == (b"", None, (5, 6))


def test_of_pairs_of_tokens_the_first_counts() -> None:
    pairs = [[first, second] for first, second in zip(TOKENS, [*TOKENS[1:], 9], strict=True)]
    assert stored(token_ids=pairs) == EXPECTED


def test_events_without_use_are_skipped_and_not_rejected() -> None:
    window = {**STORED, "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    batch = decoded({"type": "BlockMigrated", "x": 1}, ["BlockPinned", {}], window, STORED)
    assert (batch.events, batch.skipped, batch.rejected) == ((EXPECTED,), 3, 0)


ODD_KEY: dict[object, object] = {1: 2}
ODD_KEY.update(STORED)
BAD_EVENTS: list[object] = [
    *(
        None,
        5,
        "BlockStored",
        [],
        {},
        [[]],
        {"type": 5},
        {"type": "BlockStored"},
        ["BlockRemoved"],
        ["BlockRemoved", 5],
    ),
    *({**STORED, "block_size": size} for size in (0, -2, 3, 2**63, 2.5, "2", None, True)),
    *({**STORED, "token_ids": ids} for ids in (5, "text", [1], [-1, 0, 0, 0], [2**32, 0, 0, 0], [1.5, 0, 0, 0], [[1]])),
    *({**STORED, "block_hashes": hashes} for hashes in (5, [None], [1.5], [b"short"], [bytes(65)], [[1]], "text")),
    *({**STORED, "extra_keys": keys} for keys in (5, [5], [["x" * 5000]], {"a": 1})),
    *({**STORED, name: {"a": []}} for name in ("medium", "lora_id", "group_idx", "parent_block_hash")),
    *({**STORED, name: value} for name, value in (("lora_name", 5), ("cache_salt", 5), ("kv_cache_spec_kind", [1]))),
    ODD_KEY,
]


@pytest.mark.parametrize("event", BAD_EVENTS, ids=lambda event: repr(event)[-60:])
def test_a_bad_event_is_counted_and_the_others_are_decoded(event: object) -> None:
    batch = decoded(STORED, event, CLEARED)
    assert batch.events == (EXPECTED, CacheCleared())
    assert batch.rejected == 1
    assert batch.error


def test_an_event_that_is_no_legal_text_is_counted_too() -> None:
    bad = encode(STORED).replace(b"GPU", b"G\xffU")
    batch = decode_message(b"\x93\xc0\x93" + bad + encode(STORED) + encode(CLEARED) + b"\x00")
    assert (batch.events, batch.rejected) == ((EXPECTED, CacheCleared()), 1)


@pytest.mark.parametrize(
    "message",
    [b"", b"\xc1", b"text", encode(5), encode([]), encode([1.0]), encode([1.0, {}]), encode({"ts": 1.0}), encode(None)]
    + [encode([1.0, [], rank]) for rank in (-1, 2**40, "0", 1.5, [0])]
    + [
        encode([1.0, [STORED], 0])[:-5],
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xc0\xdd\xff\xff\xff\xff\xc0",
        bytes([0x91]) * 9000,
    ],
    ids=lambda message: repr(message)[:30],
)
def test_a_message_that_is_no_batch_is_an_error(message: bytes) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        decode_message(message)


def test_sizes_of_messages_and_batches_are_bounded() -> None:
    with pytest.raises(ValueError, match="expected at most 16,777,216"):
        decode_message(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ValueError, match="expected at most 262,144 events"):
        decode_message(encode([1.0, [0] * (MAX_EVENTS + 1)]))


@pytest.mark.parametrize(("name", "item"), [("block_hashes", 1), ("token_ids", [1, 2]), ("extra_keys", [])])
def test_a_field_of_millions_is_rejected_before_it_is_decoded(name: str, item: object) -> None:
    message = encode([1.0, [{**STORED, name: [item] * 3_000_000}, STORED], 0])
    tracemalloc.start()
    try:
        batch = decode_message(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (batch.events, batch.rejected) == ((EXPECTED,), 1)
    assert peak < 2 * len(message)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary()
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=9
)


@settings(max_examples=150, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(sorted(STORED)), ANYTHING, min_size=1), rest=st.lists(ANYTHING, max_size=3)
)
def test_no_value_of_any_field_harms_the_other_events(fields: dict[str, object], rest: list[object]) -> None:
    event = {**STORED, **fields}
    batch = decoded(event, [event[name] for name in event], *rest, STORED)
    assert batch.events[-1] == EXPECTED
    assert len(batch.events) + batch.rejected + batch.skipped == len(rest) + 3
    index = KvEventIndex(block_tokens=2, max_blocks_per_replica=50)
    index.apply(0, batch)
    index.check()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_change_of_bytes_breaks_the_decoder(data: st.DataObject) -> None:
    message = bytearray(encode([1.0, [STORED, STORED_ARRAY, ["BlockRemoved", [1, -1, bytes(32)]], CLEARED], 0]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)) | st.just(len(message)))
    try:
        batch = decode_message(bytes(message[:cut]))
    except ValueError:
        return
    index = KvEventIndex(block_tokens=2, max_blocks_per_replica=50)
    index.apply(0, batch)
    index.check()


def test_a_decoded_prompt_matches_one_that_the_router_hashes() -> None:
    index = KvEventIndex(block_tokens=2, max_blocks_per_replica=50)
    salted = {**STORED, "block_hashes": [8], "parent_block_hash": None, "token_ids": TOKENS[:2], "cache_salt": "x"}
    index.apply(0, decoded(STORED_ARRAY, {**STORED, "parent_block_hash": 6, "block_hashes": [7], "token_ids": [8, 9]}))
    index.apply(1, decoded(salted))
    prompt = token_bytes([*TOKENS, 8, 9])
    assert index.match(chain_hashes(prompt, block_tokens=2), 2).tolist() == [6, 0]
    assert index.match(chain_hashes(prompt, block_tokens=2, root=chain_root(None, "x")), 2).tolist() == [0, 2]


PLAIN = {"type": "BlockStored", "block_hashes": [1, -2], "parent_block_hash": -1, "token_ids": [1, 2, 3, 4]} | {
    "block_size": 2,
    "medium": "GPU",
    "extra_keys": [None, None],
    "group_idx": 1,
    "cache_salt": "s",
}
CLEARED_KV_PLAIN = {"type": "AllBlocksCleared"}
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
        [PLAIN, REMOVED, CLEARED_KV_PLAIN],
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
    assert decode_plain(message(*[CLEARED_KV_PLAIN] * (MAX_PLAIN_BYTES // 10))) is None


@settings(max_examples=200, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(sorted({**STORED, **PLAIN})), ANYTHING), rest=st.lists(ANYTHING, max_size=2)
)
def test_whatever_is_decoded_at_once_is_decoded_alike_alone(fields: dict[str, object], rest: list[object]) -> None:
    text = message(PLAIN | fields, REMOVED, *rest, CLEARED_KV_PLAIN)
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


# --- KV events as real engines sent them (`fixtures/README.md`): every one of use, and what the engine then had.


# vLLM.
CAPTURED = Path(__file__).parent / "fixtures" / "vllm-0.32.0-kv-events.msgpack"
BLOCK_TOKENS = 32
#: `--num-gpu-blocks-override 24`, one of which is never used.
POOL_BLOCKS = 23
MESSAGES: list[list[bytes]] = msgpack.decode(CAPTURED.read_bytes())


def payloads() -> list[bytes]:
    found = [read_message(frames) for frames in MESSAGES]
    assert [number for number, _ in filter(None, found)] == list(range(len(MESSAGES)))
    return [payload for _, payload in filter(None, found)]


def stored_kv_captured(batch: KvEventBatch) -> BlocksStored:
    (event,) = [event for event in batch.events if isinstance(event, BlocksStored)]
    return event


def index() -> KvEventIndex:
    return KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=10_000)


@pytest.mark.parametrize("payload", payloads(), ids=range(len(MESSAGES)))
def test_each_event_is_decoded_alike_in_both_ways(payload: bytes) -> None:
    quick, each = decode_message(payload), decode_each(payload)
    assert (quick.rejected, quick.skipped, each.rejected, each.skipped) == (0, 0, 0, 0)
    assert quick.sent_events == each.sent_events == len(msgpack.decode(payload)[1])
    assert stored_kv_captured(quick) == stored_kv_captured(each)
    removed = [
        [own for event in batch.events if isinstance(event, BlocksRemoved) for own in event.hashes]
        for batch in (quick, each)
    ]
    assert removed[0] == removed[1]


def test_the_index_has_at_most_the_pool_and_knows_every_block_that_is_removed() -> None:
    known = index()
    for payload in payloads():
        known.apply(0, decode_message(payload))
        assert 0 < known.blocks(0) <= POOL_BLOCKS
        known.check()
    stats = known.stats[0]
    assert (stats.unknown_parents, stats.unknown_removals, stats.without_tokens, stats.other_tiers) == (0, 0, 0, 0)
    assert stats.stored - stats.removed == known.blocks(0)


def test_a_prompt_is_found_under_its_own_salt_alone() -> None:
    known = index()
    for payload in payloads()[:2]:
        known.apply(0, decode_message(payload))
    salted = stored_kv_captured(decode_message(payloads()[1]))
    assert salted.cache_salt == "tenant"
    for root, found in ((chain_root(cache_salt="tenant"), len(salted.hashes)), (chain_root(), 0)):
        hashes = chain_hashes(salted.tokens, block_tokens=BLOCK_TOKENS, root=root)
        assert known.match(hashes, 1)[0] == found * BLOCK_TOKENS


def test_blocks_behind_a_cached_parent_continue_its_prompt() -> None:
    known = index()
    for payload in payloads()[:3]:
        known.apply(0, decode_message(payload))
    whole, rest = (stored_kv_captured(decode_message(payloads()[number])) for number in (0, 2))
    # The end of the first prompt was evicted, and computed again.
    assert rest.parent == whole.hashes[-len(rest.hashes) - 1]
    assert known.match(chain_hashes(whole.tokens, block_tokens=BLOCK_TOKENS), 1)[0] == len(whole.tokens) // 4


# KV events that SGLang's own cache and publisher sent (`fixtures/README.md`): all of use, and what it then had.
SGLANG_CAPTURED = Path(__file__).parent / "fixtures" / "sglang-0.5.23-kv-events.msgpack"
PAGE_TOKENS = 16
FRAMES: list[list[bytes]] = msgpack.decode(SGLANG_CAPTURED.read_bytes())
SGLANG_MESSAGES = [read_message(frames) for frames in FRAMES]
PAYLOADS = [payload for _, payload in filter(None, SGLANG_MESSAGES)]
#: Messages: a prompt, its next turn, a branch of it, another prompt under a salt and under an adapter, evictions, both
#: ends again with a third prompt, and a flush.
WHOLE, TURN, BRANCH, SALTED, ADAPTER, EVICTION, AGAIN, FLUSH = range(8)


def stored_of_sglang(number: int) -> BlocksStored:
    return next(event for event in decode_message(PAYLOADS[number]).events if isinstance(event, BlocksStored))


def index_after(number: int) -> KvEventIndex:
    """Return the index after the messages up to this one."""
    known = KvEventIndex(block_tokens=PAGE_TOKENS, max_blocks_per_replica=1000)
    for payload in PAYLOADS[: number + 1]:
        known.apply(0, decode_message(payload))
        known.check()
    return known


def found_pages(known: KvEventIndex, tokens: bytes, *, root: int = 0) -> float:
    return float(known.match_blocks(chain_hashes(tokens, block_tokens=PAGE_TOKENS, root=root), 1).blocks[0])


def test_messages_are_numbered_from_zero_under_the_topic() -> None:
    assert [message and message[0] for message in SGLANG_MESSAGES] == list(range(8))
    assert {frames[0] for frames in FRAMES} == {b"kv-events"}


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(8))
def test_each_event_is_decoded_alike_in_both_ways_of_sglang(payload: bytes) -> None:
    quick, each = decode_message(payload), decode_each(payload)
    assert (quick.rejected, quick.skipped, each.rejected, each.skipped) == (0, 0, 0, 0)
    assert quick.sent_events == each.sent_events == len(msgpack.decode(payload)[1])
    assert quick.events == each.events


def test_a_cache_begins_with_a_flush_so_that_its_feed_is_complete() -> None:
    assert isinstance(decode_message(PAYLOADS[WHOLE]).events[0], CacheCleared)


def test_turns_and_branches_continue_the_prompt() -> None:
    whole, turn, branch = (stored_of_sglang(number).tokens for number in (WHOLE, TURN, BRANCH))
    known = index_after(BRANCH)
    assert known.blocks(0) == 20
    assert found_pages(known, whole + turn) == 16
    assert found_pages(known, whole[: 5 * PAGE_TOKENS * TOKEN_BYTES] + branch) == 9


def test_a_prompt_is_found_under_its_own_salt_and_adapter_alone() -> None:
    known, tokens = index_after(ADAPTER), stored_of_sglang(SALTED).tokens
    assert tokens == stored_of_sglang(ADAPTER).tokens
    assert found_pages(known, tokens, root=chain_root(cache_salt="salt-1")) == 6
    assert found_pages(known, tokens, root=chain_root(adapter="sql")) == 6
    assert found_pages(known, tokens) == 0


def test_evicted_pages_are_unknown_until_they_are_stored_again() -> None:
    prompt = stored_of_sglang(WHOLE).tokens + stored_of_sglang(TURN).tokens
    evicted, again, flushed = (index_after(number) for number in (EVICTION, AGAIN, FLUSH))
    assert found_pages(evicted, prompt) == 5
    assert found_pages(again, prompt) == 16
    stats = again.stats[0]
    assert (stats.unknown_parents, stats.unknown_removals, stats.without_tokens, stats.other_tiers) == (0, 0, 0, 0)
    assert stats.stored - stats.removed == again.blocks(0) == 35
    assert flushed.blocks(0) == 0


def test_signed_hashes_are_their_low_64_bits() -> None:
    sent: list[int] = msgpack.decode(PAYLOADS[EVICTION])[1][0]["block_hashes"]
    (removed,) = decode_message(PAYLOADS[EVICTION]).events
    assert isinstance(removed, BlocksRemoved)
    assert min(sent) < 0
    assert removed.hashes == tuple(own & (1 << 64) - 1 for own in sent)
