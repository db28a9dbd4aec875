"""EventConnections to publishers of libzmq: changes and messages in order, and bounds while nobody receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.kv_events import connections as module
from gorgo.live.kv_events.connections import Change, EventConnections, connections
from gorgo.live.kv_events.extra import import_zmq
from tests.live.kv_events.extra import needs_zmq
from tests.live.kv_events.feeding import free_port, publishing, until

pytestmark = needs_zmq
ON_BOTH_LOOPS = True


async def payloads(found: EventConnections, count: int) -> list[bytes]:
    items = [await found.receive() for _ in range(count)]
    return [item[-1] for item in items if isinstance(item, list)]


async def test_messages_come_in_order_after_the_connection_and_before_its_end() -> None:
    async with connections(KvEventSource(f"tcp://127.0.0.1:{(port := free_port())}", None, "")) as found:
        async with publishing(endpoint=f"tcp://127.0.0.1:{port}", replay=None) as engine:
            assert await found.receive() is Change.CONNECTED
            await _subscribed(engine.publisher)
            await found.receive()
            for burst in (1, 300, 1):
                for number in range(burst):
                    await engine.publisher.publish(b"%d" % number * 1000)
                assert await payloads(found, burst) == [b"%d" % number * 1000 for number in range(burst)]
        assert await found.receive() is Change.DISCONNECTED


async def _subscribed(publisher: Any) -> None:
    """Publish until the subscription has arrived, which the publisher does not say."""
    await asyncio.sleep(0.1)
    await publisher.publish(b"first")


async def test_a_topic_is_left_out_by_the_publisher() -> None:
    async with (
        publishing(replay=None) as engine,
        connections(KvEventSource(engine.publisher.endpoint, None, "other")) as found,
    ):
        assert await found.receive() is Change.CONNECTED
        await _subscribed(engine.publisher)
        await engine.publisher._events.send_multipart([b"other topic", bytes(8), b"wanted"])
        assert await payloads(found, 1) == [b"wanted"]


async def test_a_socket_of_the_file_system_is_an_address_too(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    async with (
        publishing(endpoint=endpoint, replay=None) as engine,
        connections(KvEventSource(endpoint, None, "")) as found,
    ):
        assert await found.receive() is Change.CONNECTED
        await _subscribed(engine.publisher)
        assert await payloads(found, 1) == [b"first"]


async def test_nothing_is_read_while_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MESSAGES", 10)
    async with (
        publishing(replay=None) as engine,
        connections(KvEventSource(engine.publisher.endpoint, None, "")) as found,
    ):
        assert await found.receive() is Change.CONNECTED
        await _subscribed(engine.publisher)
        await found.receive()
        sent = 400
        for number in range(sent):
            await engine.publisher.publish(number.to_bytes(4, "big") + bytes(100_000))
        await asyncio.sleep(0.1)
        assert len(found._items) <= 20, "one more read at most after the bound"
        numbers = [int.from_bytes(each[:4], "big") for each in await payloads(found, sent)]
        assert numbers == list(range(sent))


@asynccontextmanager
async def listener(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """The port of a server of another kind, which reads, answers and waits for the end; and what each client sent."""
    begun: list[bytes] = []
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(end := asyncio.Event())
        with suppress(OSError):
            begun.append(await reader.read(100))
            writer.write(answer)
            await reader.read(-1)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        end.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], begun
    for end in ended:
        await end.wait()


async def test_a_peer_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    async with (
        listener(b"") as (port, begun),
        connections(KvEventSource(f"tcp://127.0.0.1:{port}", None, "")),
    ):
        await until(lambda: len(begun) >= 2)


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "127.0.0.1"], ids=["no name", "no listener"])
async def test_an_address_that_cannot_be_reached_is_tried_again(host: str) -> None:
    trying = asyncio.create_task(EventConnections(KvEventSource(f"tcp://{host}:{free_port()}", None, "")).keep())
    await asyncio.wait((trying,), timeout=0.1)
    assert not trying.done(), "it waits for the next attempt"
    trying.cancel()
    await asyncio.wait((trying,))


async def test_heartbeats_of_libzmq_are_answered_and_its_answers_count() -> None:
    zmq = import_zmq()
    context = zmq.asyncio.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.HEARTBEAT_IVL, 20)
    publisher.setsockopt(zmq.HEARTBEAT_TIMEOUT, 100)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "HEARTBEAT_S", 0.02)
            patch.setattr(module, "HEARTBEAT_TIMEOUT_S", 0.2)
            async with connections(KvEventSource(f"tcp://127.0.0.1:{port}", None, "")) as found:
                assert await found.receive() is Change.CONNECTED
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(found.receive(), 0.6)
    finally:
        context.destroy(linger=0)


async def test_another_protocol_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    async with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (port, begun),
        connections(KvEventSource(f"tcp://127.0.0.1:{port}", None, "")),
    ):
        await until(lambda: len(begun) >= 3)
    (record,) = [each for each in caplog.records if each.message == "kv_events_refused"]
    assert "ZMTP" in vars(record)["fields"]["error"]
