"""KV events as real engines sent them (`fixtures/README.md`): every one of use, and what the engine then had."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import msgpack

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import TOKEN_BYTES, chain_hashes, chain_root
from gorgo.engines.kv_events import decode_each, decode_message
from gorgo.live.kv_events.subscription import read_message

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


def stored(batch: KvEventBatch) -> BlocksStored:
    (event,) = [event for event in batch.events if isinstance(event, BlocksStored)]
    return event


def index() -> KvEventIndex:
    return KvEventIndex(block_tokens=BLOCK_TOKENS, max_blocks_per_replica=10_000)


@pytest.mark.parametrize("payload", payloads(), ids=range(len(MESSAGES)))
def test_each_event_is_decoded_alike_in_both_ways(payload: bytes) -> None:
    quick, each = decode_message(payload), decode_each(payload)
    assert (quick.rejected, quick.skipped, each.rejected, each.skipped) == (0, 0, 0, 0)
    assert quick.sent_events == each.sent_events == len(msgpack.decode(payload)[1])
    assert stored(quick) == stored(each)
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
    salted = stored(decode_message(payloads()[1]))
    assert salted.cache_salt == "tenant"
    for root, found in ((chain_root(cache_salt="tenant"), len(salted.hashes)), (chain_root(), 0)):
        hashes = chain_hashes(salted.tokens, block_tokens=BLOCK_TOKENS, root=root)
        assert known.match(hashes, 1)[0] == found * BLOCK_TOKENS


def test_blocks_behind_a_cached_parent_continue_its_prompt() -> None:
    known = index()
    for payload in payloads()[:3]:
        known.apply(0, decode_message(payload))
    whole, rest = (stored(decode_message(payloads()[number])) for number in (0, 2))
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
