"""Large messages are decoded by a process, as short ones are in the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from msgspec.msgpack import encode

from gorgo.core.messages.kv_events import BlocksStored, KvEventBatch
from gorgo.engines.kv_events import decode_message
from gorgo.live.kv_events import applier
from gorgo.live.kv_events.applier import KvDecoder
from gorgo.live.kv_events.pieces import PIECE_BLOCKS, pieces

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
    assert len(MESSAGE) > applier.LOOP_BYTES
    by_process = await decoded(decoder, MESSAGE)
    assert by_process == list(pieces(decode_message(MESSAGE)))
    assert len(by_process) == 4
    assert sum(piece.rejected for piece in by_process) == 1
    assert sum(len(event.hashes) for piece in by_process for event in piece.events if isinstance(event, BlocksStored))


async def test_a_large_message_that_is_none_is_refused_and_the_next_one_decoded(decoder: KvDecoder) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        await decoded(decoder, b"\xc1" * (applier.LOOP_BYTES + 1))
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
