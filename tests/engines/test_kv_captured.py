"""KV events as a real vLLM sent them (`fixtures/README.md`): every one of use, and what the engine then had."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import msgpack

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, KvEventBatch
from gorgo.core.prefix.kv_index import KvEventIndex
from gorgo.core.prefix.kv_source import chain_hashes, chain_root
from gorgo.engines.kv_events import decode_each, decode_message
from gorgo.live.kv_events.subscription import read_message

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
