"""A request that has ended is freed at once: nothing of it waits for the collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gorgo.config.model import OverloadConfig
from gorgo.picker.transport.http2.connection import Connection
from tests.picker.transport.http2.peer import data, greeted, headers, message
from tests.picker.virtual import (
    BODY,
    DUPLEX,
    VirtualPicker,
    body_message,
    config_of,
    headers_message,
    in_virtual_time,
)
from tests.proxy.fakes import DONE, delta


@pytest.fixture
def garbage() -> Iterator[Callable[[], set[str]]]:
    """Return the types of GORGO that only the collector could have freed since the start of the test."""

    def found() -> set[str]:
        gc.collect()
        kinds = {type(item) for item in gc.garbage}
        return {kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("gorgo.")}

    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def _entry(picker: VirtualPicker) -> None:
    call, picked = picker.request()
    picker.first_bytes(picked.exchange_id, delta("a")).close()
    call.close()
    picker.log(picked.exchange_id)


def _no_entry(picker: VirtualPicker) -> None:
    call, _ = picker.request()
    call.close()


def _no_body(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers"))
    call.close()


def _refused(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers"))
    call.feed(body_message("request_body", b"{"))
    assert call.last.HasField("immediate_response")
    call.close()


def _duplex(picker: VirtualPicker) -> None:
    call = picker.call()
    call.feed(headers_message("request_headers", mode=DUPLEX, response_mode=DUPLEX))
    call.feed(body_message("request_body", BODY))
    call.feed(headers_message("response_headers", (":status", "200"), ("content-type", "text/event-stream")))
    call.feed(body_message("response_body", delta("a") + DONE))
    call.close()


@pytest.mark.parametrize("exchange", [_entry, _no_entry, _no_body, _refused, _duplex])
def test_an_ended_request_is_freed_at_once(
    exchange: Callable[[VirtualPicker], None], garbage: Callable[[], set[str]]
) -> None:
    async def test(picker: VirtualPicker) -> None:
        for _ in range(2):
            exchange(picker)
        await asyncio.sleep(1.1)  # longer than an entry of the access log is waited for
        assert garbage() == set()

    in_virtual_time(test)


def test_a_queued_request_is_freed_at_its_end(garbage: Callable[[], set[str]]) -> None:
    async def test(picker: VirtualPicker) -> None:
        picker.state.routing.router.replicas.drain("r0", now=picker.state.routing.clock())
        call, _ = picker.request()
        assert picker.state.routing.router.queued == 1
        call.close()
        del call, _
        await asyncio.sleep(0.0)  # a cancelled timer is let go
        assert garbage() == set()

    config = replace(config_of("10.0.0.1:8000"), overload=OverloadConfig(no_replica_wait_s=30.0))
    in_virtual_time(test, config)


def test_a_stream_is_freed_at_its_end(garbage: Callable[[], set[str]]) -> None:
    peer = greeted()
    peer.send(headers(1), data(1, message(b"one")), data(1, b"", end=True))
    assert isinstance(peer.connection, Connection)
    assert peer.connection.is_idle
    peer.calls.clear()
    assert garbage() == set()
