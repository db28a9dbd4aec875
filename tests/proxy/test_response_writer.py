"""What is known of an answer while it goes out, and one of the app's own that is dropped because it is late."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from gorgo.live.http.errors import Message
from gorgo.live.http.headers import Header
from gorgo.proxy.exchange.response import ResponseWriter, direct_write, no_direct_write
from tests.proxy.conftest import Start, until
from tests.proxy.fakes import answer
from tests.proxy.raw import connected

# --- What is known of an answer while it goes out.


EVENTS = (b"content-type", b"text/event-stream")


class Client:
    """Takes messages, and notes whether the writer says that it waits for it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.waiting: list[bool] = []
        self.writer = ResponseWriter(self.send, lambda _chunk: True)

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.waiting.append(self.writer.sending)


@pytest.mark.parametrize(
    ("status", "headers", "events", "direct"),
    [
        (200, [EVENTS], True, True),
        (201, [EVENTS], True, False),
        (500, [EVENTS], True, False),
        (200, [EVENTS, (b"content-length", b"5")], False, False),
        (200, [EVENTS, (b"content-encoding", b"gzip")], False, False),
        (200, [(b"content-type", b"application/json")], False, False),
        (200, [], False, False),
    ],
)
async def test_only_a_plain_stream_of_events_can_carry_errors_and_only_a_good_one_is_written_directly(
    status: int, headers: list[Header], events: bool, direct: bool
) -> None:
    client = Client()
    await client.writer.start(status, headers)
    assert (client.writer.status, client.writer.started, client.writer.finished) == (status, True, False)
    assert (client.writer.carries_events, client.writer.try_write(b"x")) == (events, direct)
    await client.writer.finish()
    assert not client.writer.try_write(b"x"), "after the last chunk nothing follows"


async def test_a_writer_says_when_it_waits_for_the_client_and_what_it_has_sent() -> None:
    client = Client()
    assert (client.writer.started, client.writer.finished, client.writer.sending) == (False, False, False)
    assert (client.writer.status, client.writer.names_events, client.writer.carries_events) == (0, False, False)
    await client.writer.start(200, [EVENTS], names_events=True)
    assert (client.writer.sending, client.writer.names_events) == (False, True)
    await client.writer.write(b"a")
    await client.writer.finish(b"b")
    assert (client.writer.sending, client.writer.finished) == (False, True)
    assert client.waiting == [True, False, True]
    assert client.sent == [
        {"type": "http.response.start", "status": 200, "headers": [EVENTS]},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b", "more_body": False},
    ]


def test_server_without_the_extension_gets_every_chunk_by_send() -> None:
    assert direct_write({"extensions": {}}) is no_direct_write
    assert not no_direct_write(b"a")


# --- A response of the app's own to a request that the connection has refused meanwhile: dropped, and no fault.


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_timeout_of_a_body_in_the_moment_of_a_bad_chunk_is_no_fault(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = await start.fleet([answer(200)], body_timeout_s=0.1)
    async with connected(fleet.addresses.data) as client:
        client.writer.write(HEAD)
        await until(lambda: fleet.state.exchanges)
        client.writer.write(b"1 \r\na\r\n")
        time.sleep(0.12)  # so that the timeout and the chunk are both due when the loop goes on
        said = await client.rest()
    assert said.startswith(b"HTTP/1.1 4")
    assert said.count(b"HTTP/1.1 4") == 1
    await fleet.idle()
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
