"""Subscribers of one replica over real sockets on this machine."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from random import Random
from time import thread_time
from typing import Any

import msgspec
import pytest

from gorgo.config.fleet import KvEventsConfig
from gorgo.engines.kv_sources import VLLM_FLAG, VLLM_PATH
from gorgo.live.kv_events import feed, sockets, subscriber, subscription
from gorgo.live.kv_events.sockets import Backlog, KvSockets
from gorgo.live.kv_events.worker import PIECE_BLOCKS
from tests import fuzz
from tests.live.kv_events.feeding import BLOCK_TOKENS, needs_zmq, prompt, publishing, subscribed, until

pytestmark = needs_zmq
ON_BOTH_LOOPS = True

WHOLE = 3 * BLOCK_TOKENS


@pytest.mark.parametrize("vllm", [True, False])
@pytest.mark.parametrize("topic_in_replays", [True, False])
async def test_blocks_stored_before_the_subscription_and_after_it_are_known(vllm: bool, topic_in_replays: bool) -> None:
    async with publishing(vllm=vllm, topic_in_replays=topic_in_replays) as engine:
        await engine.store(prompt(1))
        await engine.store(prompt(2))
        await engine.evict(prompt(2))
        async with subscribed(engine.config) as feeding:
            await feeding.until("live")
            assert (feeding.router.cached(prompt(1)), feeding.router.cached(prompt(2))) == (WHOLE, 0)
            await engine.store(prompt(3))
            await until(lambda: feeding.router.cached(prompt(3)) == WHOLE)
            await engine.evict(prompt(1))
            await until(lambda: feeding.router.cached(prompt(1)) == 0)
            assert (feeding.stats.state, feeding.stats.complete, feeding.router.complete) == ("live", True, True)
            assert (feeding.stats.replays, feeding.stats.gaps, feeding.stats.messages) == (1, 0, 5)


async def test_lost_messages_are_replayed_in_order() -> None:
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1))
        await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
        await engine.evict(prompt(1), sent=False)
        await engine.store(prompt(2), sent=False)
        await engine.store(prompt(3))
        await until(lambda: feeding.router.cached(prompt(3)) == WHOLE)
        assert (feeding.router.cached(prompt(1)), feeding.router.cached(prompt(2))) == (0, WHOLE)
        await feeding.until("live", gaps=1, replays=2)
        assert feeding.stats.complete


async def test_a_gap_that_the_engine_does_not_retain_forgets_and_leaves_a_partial_feed() -> None:
    async with publishing(buffered=1) as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1))
        await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
        await engine.evict(prompt(1), sent=False)
        await engine.store(prompt(2))
        await feeding.until("partial")
        await until(lambda: feeding.router.cached(prompt(2)) == WHOLE)
        assert feeding.router.cached(prompt(1)) == 0
        assert not feeding.router.complete
        engine.log.cleared()
        await engine.publish()
        await feeding.until("live")


async def test_without_replays_a_late_subscriber_is_partial() -> None:
    async with publishing(replay=None) as engine:
        await engine.store(prompt(1))
        async with subscribed(engine.config) as feeding:
            await until(lambda: bool(feeding.feeds.stats) and feeding.stats.state == "waiting")
            number = 2
            while feeding.stats.state != "partial":  # the connection is not there at once
                await engine.store(prompt(number))
                number += 1
                await asyncio.sleep(0.02)
            await until(lambda: feeding.router.cached(prompt(number - 1)) == WHOLE)
            assert feeding.router.cached(prompt(1)) == 0


async def test_an_engine_that_is_killed_is_cut_and_its_next_process_known_from_its_start() -> None:
    async with AsyncExitStack() as running:
        engine = await running.enter_async_context(publishing())
        ports = {"endpoint": engine.publisher.endpoint, "replay": engine.publisher.replay}
        async with subscribed(engine.config) as feeding:
            await engine.store(prompt(1))
            await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
            await running.aclose()
            await feeding.until("cut")
            async with publishing(process=1, **ports) as second:
                await second.store(prompt(2))
                await second.store(prompt(3))
                await feeding.until("live", restarts=1)
                assert feeding.router.cached(prompt(1)) == 0
                assert feeding.router.cached(prompt(2)) == feeding.router.cached(prompt(3)) == WHOLE
                await second.evict(prompt(2))
                await until(lambda: feeding.router.cached(prompt(2)) == 0)


async def test_blocks_are_forgotten_after_a_long_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_CUT_S", 0.0)
    async with AsyncExitStack() as running:
        engine = await running.enter_async_context(publishing())
        async with subscribed(engine.config) as feeding:
            await engine.store(prompt(1))
            await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
            await running.aclose()
            await feeding.until("cut", complete=False)
            assert feeding.router.cached(prompt(1)) == 0


async def test_a_replay_without_an_end_fails_and_live_messages_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "IDLE_TIMEOUT_S", 0.2)
    async with publishing() as engine, publishing() as other:
        # An address that takes requests and never answers.
        silent = KvEventsConfig(endpoint=engine.publisher.endpoint, replay=other.publisher.endpoint)
        async with subscribed(silent) as feeding:
            await until(lambda: feeding.stats.failed_replays == 1)
            await engine.store(prompt(1))
            await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)


async def test_a_replay_fails_where_the_connection_is_refused_before_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscription, "IDLE_TIMEOUT_S", 0.2)

    # ZeroMQ takes the queue of a peer of the wrong kind away, and a request then waits for a place in one.
    @contextmanager
    def unconnected(sockets: KvSockets, _endpoint: str) -> Iterator[tuple[Any, Any, Backlog]]:
        found = sockets._socket(sockets.zmq.DEALER)
        monitor = sockets._monitor(found)
        try:
            yield found, monitor, Backlog(1, sockets.backlogs)
        finally:
            found.disable_monitor()
            monitor.close(linger=0)
            found.close(linger=0)

    monkeypatch.setattr(KvSockets, "requesting", unconnected)
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await until(lambda: feeding.stats.failed_replays == 1)


async def test_the_proxy_binds_where_the_engine_connects(unused_port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_port}"
    config = KvEventsConfig(endpoint=endpoint, mode="bind")
    async with subscribed(config) as feeding, publishing(replay=None) as engine:
        engine.publisher._events.connect(endpoint)
        number = 0
        while not feeding.router.batches:
            number += 1
            await engine.store(prompt(number))
            await asyncio.sleep(0.02)
        await until(lambda: feeding.router.cached(prompt(number)) == WHOLE)


async def test_a_taken_address_is_tried_again(unused_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.live.kv_events.subscription.REOPEN_S", 0.05)
    endpoint = f"tcp://127.0.0.1:{unused_port}"
    async with publishing(endpoint=endpoint) as holder:
        config = KvEventsConfig(endpoint=endpoint, mode="bind")
        async with subscribed(config) as feeding:
            await asyncio.sleep(0.1)
            holder.publisher._events.unbind(endpoint)
            async with publishing(replay=None) as engine:
                engine.publisher._events.connect(endpoint)
                number = 0
                while not feeding.router.batches:
                    number += 1
                    await engine.store(prompt(number))
                    await asyncio.sleep(0.02)


async def test_the_address_comes_from_the_engine() -> None:
    async with publishing() as engine:
        await engine.store(prompt(1))
        async with subscribed(KvEventsConfig(), answers={VLLM_PATH: engine.announced}) as feeding:
            await feeding.until("live")
            assert feeding.stats.endpoints == (engine.publisher.endpoint,)
            assert feeding.router.cached(prompt(1)) == WHOLE


async def test_the_address_of_sglang_is_found_by_its_ports() -> None:
    async with publishing(vllm=False) as engine:
        await engine.store(prompt(1))
        ports = [int(str(each).rpartition(":")[2]) for each in (engine.publisher.endpoint, engine.publisher.replay)]
        events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": ports[0], "topic": ""}
        info = {"kv_events": events | {"replay_endpoint_port_base": ports[1], "dp_size": 1, "block_size": BLOCK_TOKENS}}
        async with subscribed(KvEventsConfig(), engine="sglang", answers={"/server_info": info}) as feeding:
            await feeding.until("live")
            assert feeding.router.cached(prompt(1)) == WHOLE


async def test_an_engine_without_events_is_silent_with_the_flag_in_one_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriber, "RETRY_SILENT_S", 0.01)
    async with publishing() as engine, subscribed(KvEventsConfig(), answers={VLLM_PATH: {}}) as feeding:
        await until(lambda: len(feeding.asked) > 3)
        assert feeding.stats.state == "silent"
        assert VLLM_FLAG in (feeding.stats.advice or "")
        assert [record.message for record in caplog.records] == ["kv_events_silent"]
        feeding.answers[VLLM_PATH] = engine.announced
        await feeding.until("live")
        assert feeding.stats.advice is None


async def test_requests_without_an_event_make_a_replica_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subscriber, "SILENT_AFTER_S", 0.05)
    monkeypatch.setattr(subscriber, "TICK_S", 0.02)
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await asyncio.sleep(0.1)
        assert feeding.stats.state == "live"
        feeding.target.attempts += subscriber.SILENT_REQUESTS
        await feeding.until("silent")
        assert sum(record.message == "kv_events_silent" for record in caplog.records) == 1
        await engine.store(prompt(1))
        await feeding.until("live")


async def test_an_engine_of_another_kind_has_no_events() -> None:
    async with subscribed(KvEventsConfig(), engine="llamacpp") as feeding:
        await until(lambda: feeding.stats.state == "silent")
        assert "publishes no KV events" in (feeding.stats.advice or "")


async def test_a_reload_moves_the_subscription_and_ends_it() -> None:
    async with publishing() as first, publishing(process=1) as second:
        await first.store(prompt(1))
        await second.store(prompt(2))
        async with subscribed(None) as feeding:
            assert feeding.stats.state == "off"
            feeding.configure(first.config)
            await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
            feeding.configure(second.config)
            await until(lambda: feeding.router.cached(prompt(2)) == WHOLE)
            assert feeding.router.cached(prompt(1)) == 0
            feeding.configure(None)
            await until(lambda: feeding.stats.state == "off")
            assert feeding.router.cached(prompt(2)) == 0


async def test_a_run_that_replaces_another_at_once_counts_each_block_once() -> None:
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await engine.store(prompt(1))
        await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
        feeding.restart()
        await feeding.until("live", messages=1)
        assert feeding.router.cached(prompt(1)) == WHOLE
        await engine.evict(prompt(1))
        await until(lambda: feeding.stats.messages == 2)
        await until(lambda: feeding.router.cached(prompt(1)) == 0)
        # The former run may have had both messages, and the one in its place has yet to hear of them.
        await until(lambda: (feeding.stats.state, feeding.router.complete) == ("live", True))


async def test_one_unreadable_message_is_counted_and_the_next_ones_apply(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.publisher.publish(b"\xc1 no message")
        await engine.store(prompt(1))
        await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)
        await feeding.until("partial", rejected_messages=1)
        assert sum(record.message == "kv_events_rejected" for record in caplog.records) == 1


async def test_one_bad_event_is_logged_once_and_the_others_of_its_message_apply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        for number in (1, 2):
            engine.log._add({"type": "BlockRemoved"})
            await engine.store(prompt(number))
            await until(lambda number=number: feeding.router.cached(prompt(number)) == WHOLE)  # type: ignore[misc]
        await feeding.until("partial", rejected_events=2)
        (record,) = [each for each in caplog.records if each.message == "kv_events_rejected"]
        assert "block_hashes" in vars(record)["fields"]["error"]


async def test_a_large_message_is_applied_in_pieces() -> None:
    blocks = 20_000
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1, blocks))
        await until(lambda: feeding.router.index.blocks(0) == blocks)
        assert feeding.router.cached(prompt(1, blocks)) == blocks * BLOCK_TOKENS
        assert feeding.router.batches > 20
        await engine.evict(prompt(1, blocks))
        await until(lambda: feeding.router.index.blocks(0) == 0)


async def test_short_messages_do_not_overtake_a_long_one() -> None:
    blocks = 20_000
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1, blocks))
        await engine.evict(prompt(1, blocks))
        for number in range(2, 12):
            await engine.store(prompt(number))
        await feeding.until("live", messages=12)
        await until(lambda: feeding.router.cached(prompt(11)) == WHOLE)
        assert feeding.router.index.blocks(0) == 10 * 3
        assert feeding.router.index.stats[0].unknown_removals == 0


async def test_a_cleared_cache_is_forgotten_in_slices() -> None:
    blocks = 3000
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1, blocks))
        await until(lambda: feeding.router.index.blocks(0) == blocks)
        engine.log.cleared()
        await engine.store(prompt(2))
        await until(lambda: feeding.router.cached(prompt(2)) == WHOLE)
        assert feeding.router.index.blocks(0) == 3
        assert sum(feeding.router.cleared) == blocks
        assert max(feeding.router.cleared) == PIECE_BLOCKS
        assert feeding.stats.complete


async def test_a_reload_without_events_forgets_them_in_slices() -> None:
    blocks = 3000
    async with publishing() as engine, subscribed(engine.config) as feeding:
        await feeding.until("live")
        await engine.store(prompt(1, blocks))
        await until(lambda: feeding.router.index.blocks(0) == blocks)
        feeding.configure(None)
        await until(lambda: feeding.stats.state == "off")
        await until(lambda: feeding.router.index.blocks(0) == 0)
        await until(lambda: feeding.router.at_loss != [])
        assert set(feeding.router.at_loss) == {0}


def frame(content: bytes, *, more: bool) -> bytes:
    """A frame of ZMTP 3 (RFC 23)."""
    if len(content) < 256:
        return bytes([more, len(content)]) + content
    return bytes([2 | more]) + len(content).to_bytes(8, "big") + content


def greeting(kind: bytes) -> bytes:
    """The first bytes of a peer of ZMTP 3.0."""
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32) + bytes([4, len(ready)]) + ready


@asynccontextmanager
async def hostile(*, kind: bytes, flood: bytes, first: bytes = b"") -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A peer that speaks ZMTP by itself: after the handshake it sends `first`, and `flood` without an end.

    Yields its endpoint, and what is set once a connection has been closed.
    """
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting(kind))
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(64)
            await reader.readexactly(4)  # of the other's READY
            writer.write(first)
            while True:
                writer.write(flood)
                await writer.drain()
                await asyncio.sleep(0)
        closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", closed
    finally:
        server.close()


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of received bytes is Linux's")


@needs_linux
@pytest.mark.parametrize("size", [1, 60_000])
async def test_a_message_without_an_end_is_refused_and_its_connection_closed(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "MAX_LIVE_BYTES", 1_000_000)
    flood = frame(b"x" * size, more=True) * (60_000 // (size + 2) + 1)
    async with (
        hostile(kind=b"PUB", first=frame(b"kv", more=True), flood=flood) as (endpoint, closed),
        subscribed(KvEventsConfig(endpoint=endpoint)) as feeding,
    ):
        await feeding.until("cut", rejected_messages=1)
        (refusal,) = [each for each in caplog.records if each.message == "kv_events_refused"]
        assert "have no end; expected at most 1000000" in vars(refusal)["fields"]["error"]
        await until(closed.is_set)


@needs_linux
async def test_a_replay_that_brings_more_than_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_REPLAY_BYTES", 1_000_000)
    flood = frame(b"x" * 60_000, more=True)
    async with (
        hostile(kind=b"ROUTER", first=frame(b"", more=True), flood=flood) as (endpoint, _),
        publishing() as engine,
        subscribed(replace(engine.config, replay=endpoint)) as feeding,
    ):
        await until(lambda: feeding.stats.failed_replays == 1)
        await engine.store(prompt(1))
        await until(lambda: feeding.router.cached(prompt(1)) == WHOLE)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, greeting(b"PUB") + b"\xff" * 40])
async def test_a_peer_that_once_broke_the_protocol_is_connected_to_again(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ gives such a peer up, and the subscription was without events until a reload."""
    monkeypatch.setattr(subscription, "RECONNECT_S", 0.2)
    monkeypatch.setattr(subscription, "REOPEN_S", 0.01)
    connections = ended = 0
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, ended
        connections += 1
        with suppress(ConnectionError):
            writer.write(said if connections == 1 else greeting(b"PUB"))
            await reader.read(1)
            message = (b"kv", bytes(8), msgspec.msgpack.encode([1.5, [{"type": "AllBlocksCleared"}], None]))
            while connections > 1 and not heard.is_set() and not writer.is_closing():
                writer.write(b"".join(frame(each, more=each is not message[-1]) for each in message))
                await asyncio.sleep(0.01)
        ended += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        async with subscribed(KvEventsConfig(endpoint=endpoint)) as feeding:
            await until(lambda: feeding.stats.messages > 0)
            heard.set()
        await until(lambda: ended == connections)
    assert connections > 1


def payload_of_chance(chance: Random, number: int) -> bytes:
    """Events of an engine: sound ones, with some bytes changed, or of other kinds."""
    stored: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": None,
        "token_ids": [number] * 4,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [chance.randrange(number + 1)]}
    events: list[object] = [
        stored | {"block_size": BLOCK_TOKENS, "lora_id": None},
        removed,
        {"type": "AllBlocksCleared"},
    ]
    found = bytearray(msgspec.msgpack.encode([1.5, chance.sample(events, chance.randrange(1, 4)), None]))
    if chance.random() < 0.7:
        for _ in range(chance.randrange(1, 5)):
            place = chance.randrange(len(found))
            found[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    return bytes(found)


def zmtp_of_chance(chance: Random, number: int) -> bytes:
    """One message, or what no publisher sends."""
    sequence = (number if chance.random() < 0.9 else chance.randrange(1 << 64)).to_bytes(8, "big")
    frames_ = [b"kv", sequence, payload_of_chance(chance, number)]
    if chance.random() < 0.2:
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(frames_) + 1)
            frames_[place:place] = [chance.randbytes(chance.choice((0, 1, 8, 300)))]
    message = b"".join(frame(each, more=at < len(frames_) - 1) for at, each in enumerate(frames_))
    kind = chance.random()
    if kind < 0.02:
        return chance.randbytes(chance.randrange(1, 40)) + message
    if kind < 0.04:  # a command, or a frame of a length that does not come
        return bytes([chance.choice((4, 6)), chance.randrange(20)]) + chance.randbytes(20) + message
    return message[: chance.randrange(len(message))] if kind < 0.05 else message


async def test_cases_of_chance_of_zmtp_delay_nothing_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "RETRY_S", 0.001)
    monkeypatch.setattr(sockets, "MAX_RETRY_S", 0.001)
    monkeypatch.setattr(subscription, "REOPEN_S", 0.001)
    monkeypatch.setattr(subscription, "RECONNECT_S", 0.02)
    chance, sent, connections, ended = Random(6), 0, 0, 0
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, connections, ended
        connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            writer.write(greeting(b"PUB"))
            await reader.readexactly(68)
            while not done.is_set():
                writer.write(b"".join(zmtp_of_chance(chance, sent + at) for at in range(10)))
                sent += 10
                if sent >= fuzz.CASES:
                    done.set()
                await writer.drain()
                await asyncio.sleep(0)
        ended += 1
        writer.close()

    turns: list[float] = []

    async def turn() -> None:
        """The processor time between two turns of the loop: what a request would wait for."""
        while True:
            before = thread_time()
            await asyncio.sleep(0.001)
            turns.append(thread_time() - before)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    threads = threading.active_count()
    async with server:
        async with subscribed(KvEventsConfig(endpoint=endpoint)) as feeding:
            turning = asyncio.create_task(turn())
            async with asyncio.timeout(20 + fuzz.CASES / 100):
                await done.wait()
            turning.cancel()
            await until(lambda: feeding.router.batches > 0)
            backlogs = feeding.feeds.sockets.backlogs
            feeding.router.index.check()
        await until(lambda: ended == connections)
    assert not backlogs
    assert connections > fuzz.CASES // 1000
    assert threading.active_count() <= threads + 1
    assert max(turns) < fuzz.MOST_S, f"the loop stood still for {max(turns):.3f} s"
