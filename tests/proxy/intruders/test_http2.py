"""HTTP/2 from clients: the same answers, cut ones that show it, and frames that cost more than they bring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from h2.settings import SettingCodes

from gorgo.config.model import Config, Region, Replica
from tests.proxy.conftest import QUIET, Running, Start
from tests.proxy.fakes import DONE, ROLE, answer, chat, delta, reset_after, stream
from tests.proxy.integrity.engines import lying, says
from tests.proxy.raw import RawClient, connected

CHAT = "/v1/chat/completions"
BODY = chat()
HEAD = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"g"),
    (b":path", CHAT.encode()),
    (b"content-type", b"application/json"),
]
_UNCHECKED = h2.config.H2Configuration(
    client_side=True, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
)


class Frames:
    """One connection of a client that says what it likes."""

    def __init__(self, raw: RawClient) -> None:
        self.raw = raw
        self.h2 = h2.connection.H2Connection(_UNCHECKED)
        self.events: list[h2.events.Event] = []
        self.ended = False

    async def send(self) -> None:
        self.raw.writer.write(self.h2.data_to_send())
        await self.raw.writer.drain()

    async def ask(self, head: list[tuple[bytes, bytes]], body: bytes | None = BODY) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, head, end_stream=body is None)
        if body is not None:
            self.h2.send_data(stream_id, body, end_stream=True)
        await self.send()
        return stream_id

    async def until(self, kind: type[h2.events.Event], stream_id: int | None = None) -> h2.events.Event:
        """The first such event; `ConnectionTerminated` and the end of the connection count as any."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                    return event
            data = await asyncio.wait_for(self.raw.reader.read(1 << 16), 10)
            if not data:
                raise EOFError(self.events)
            self.events += self.h2.receive_data(data)
            await self.send()

    async def end(self) -> None:
        """Until the server has closed the connection."""
        await self.raw.rest()


@asynccontextmanager
async def http2(fleet: Running, settings: dict[int, int] | None = None) -> AsyncIterator[Frames]:
    async with connected(fleet.addresses.data) as raw:
        client = Frames(raw)
        if settings is not None:
            client.h2.update_settings(settings)
            client.h2.local_settings.update(settings)
            client.h2.local_settings.acknowledge()
            client.h2.clear_outbound_data_buffer()
        client.h2.initiate_connection()
        await client.send()
        yield client


def over_http2(fleet: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=fleet.addresses.data_url, http1=False, http2=True)


async def test_answers_over_http_2_are_those_over_http_1(start: Start) -> None:
    fleet = await start.fleet([stream(ROLE, delta("a"), delta("b"), DONE), answer(200, b"y" * 300_000), answer(200)])
    async with over_http2(fleet) as client:
        streamed = await client.post(CHAT, content=chat(stream=True))
        assert (streamed.http_version, streamed.content) == ("HTTP/2", ROLE + delta("a") + delta("b") + DONE)
        assert (await client.post(CHAT, content=chat())).content == b"y" * 300_000
        assert (await client.post(CHAT, content=chat(text="x" * 3_000_000))).status_code == 200
        head = await client.head("/health")
        assert (head.status_code, head.content) == (200, b"")
        assert (await client.post("/nowhere", content=b"{}")).status_code == 404
    assert len(fleet.replicas[0].seen[2].body) > 3_000_000
    await fleet.idle()


async def test_stream_that_breaks_ends_with_an_error_event_over_http_2_too(start: Start) -> None:
    fleet = await start.fleet([reset_after(ROLE, delta("good"))])
    async with over_http2(fleet) as client:
        response = await client.post(CHAT, content=chat(stream=True))
    assert delta("good") in response.content
    assert b'"code": "upstream_failed"' in response.content.rpartition(b"data: ")[2]
    await fleet.idle()


@pytest.mark.parametrize("framing", [b"content-length: 200000\r\n", b""])
async def test_body_that_is_cut_is_reset_over_http_2(start: Start, framing: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    if framing:
        speak = says(head + framing + b"\r\n" + b"x" * 150_000, close=True)
    else:
        speak = says(
            head + b"transfer-encoding: chunked\r\n\r\n249f0\r\n" + b"x" * 150_000 + b"\r\n5\r\nab", close=True
        )
    async with lying(speak) as liar:
        row = Replica(name="liar", region="here", url=liar.url, engine="openai")
        fleet = await start.proxy(Config(proxy=QUIET, regions=(Region(name="here"),), replicas=(row,)), [])
        async with over_http2(fleet) as client:
            with pytest.raises(httpx.RemoteProtocolError, match="StreamReset"):
                await client.post(CHAT, content=chat())
            assert (await client.get("/health")).status_code == 200
        await fleet.idle()


NOT_HTTP_1 = {
    "a path that is none": {b":path": b"v1/chat/completions"},
    "another host in the path": {b":path": b"http://evil" + CHAT.encode()},
    "a path beyond ASCII": {b":path": b"/\xff"},
    "a line end in the path": {b":path": CHAT.encode() + b" HTTP/1.1\tx"},
    "a control character": {b"x-a": b"1\x012"},
    "two lengths": {b"content-length": b"%d" % len(BODY)},
    "a name that is none": {b"x(a)": b"1"},
    "CONNECT": {b":method": b"CONNECT", b":protocol": b"websocket"},
    "a method that is none": {b":method": b"PO ST"},
}


@pytest.mark.parametrize("form", NOT_HTTP_1)
async def test_request_that_http_1_could_not_say_is_reset_and_no_replica_sees_it(start: Start, form: str) -> None:
    fleet = await start.fleet([answer(200)])
    fields = dict(HEAD) | NOT_HTTP_1[form]
    head = [(name, value) for name, value in fields.items() if name[:1] == b":"]
    head += [(name, value) for name, value in fields.items() if name[:1] != b":"]
    if form == "two lengths":
        head.append((b"content-length", b"%d" % len(BODY)))
    async with http2(fleet) as client:
        refused = await client.ask(head)
        await client.until(h2.events.StreamReset, refused)
        good = await client.ask(HEAD)
        await client.until(h2.events.StreamEnded, good)
    assert len(fleet.replicas[0].seen) == 1
    await fleet.idle()


@pytest.mark.parametrize(
    "field", [(b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"x-a", b"1\r\nx-b: 2"), (b"X-A", b"1")]
)
async def test_framing_of_http_1_in_http_2_ends_the_connection(start: Start, field: tuple[bytes, bytes]) -> None:
    fleet = await start.fleet([answer(200)])
    async with http2(fleet) as client:
        await client.ask([*HEAD, field])
        await client.end()
    assert fleet.replicas[0].seen == []
    await fleet.idle()


async def test_answer_before_the_request_is_complete_reaches_the_client_and_the_connection_goes_on(
    start: Start,
) -> None:
    fleet = await start.fleet([answer(200)], max_body_bytes=1000)
    async with http2(fleet) as client:
        refused = client.h2.get_next_available_stream_id()
        client.h2.send_headers(refused, HEAD)
        client.h2.send_data(refused, b"x" * 3000)
        await client.send()
        said = await client.until(h2.events.ResponseReceived, refused)
        assert isinstance(said, h2.events.ResponseReceived)
        assert (b":status", b"413") in [tuple(field) for field in said.headers or ()]
        await client.until(h2.events.StreamEnded, refused)
        good = await client.ask(HEAD)
        await client.until(h2.events.StreamEnded, good)
        for _ in range(20):  # only so much more of it is dropped
            client.h2.send_data(refused, b"x" * 16_000)
        await client.send()
        await client.until(h2.events.StreamReset, refused)
    await fleet.idle()


async def test_many_header_lines_over_http_2_are_a_431(start: Start) -> None:
    fleet = await start.fleet([answer(200)], max_header_lines=20)
    async with http2(fleet) as client:
        refused = await client.ask([*HEAD, *((b"x-%d" % n, b"1") for n in range(20))], body=None)
        said = await client.until(h2.events.ResponseReceived, refused)
        assert isinstance(said, h2.events.ResponseReceived)
        assert (b":status", b"431") in [tuple(field) for field in said.headers or ()]
    assert fleet.replicas[0].seen == []


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"\0\0\x02\x01\x00\0\0\0\x01\x82\x87", id="a head that goes on"),
        pytest.param(b"\0\x10\0\x01\x04\0\0\0\x01", id="a frame that does not come"),
        pytest.param(b"\0\0", id="half a frame's head"),
        pytest.param(b"\xff\xff\xff\x00\x00\0\0\0\x01", id="a frame of 16 MiB"),
        pytest.param(b"\0\0\x08\x06\0\0\0\0\0\0\0\0\0\0\0\0\0" * 1100, id="pings"),
        pytest.param(b"\0\0\0\x04\0\0\0\0\0" * 1100, id="settings"),
        pytest.param(b"\0\0\x05\x02\0\0\0\0\x03\0\0\0\0\x01" * 1100, id="priorities"),
        pytest.param(b"\0\0\0\x00\x01\0\0\0\x09", id="data for no stream"),
    ],
)
async def test_frames_that_drip_or_bring_nothing_end_the_connection(start: Start, begun: bytes) -> None:
    fleet = await start.fleet([answer(200)], header_timeout_s=0.2)
    async with connected(fleet.addresses.data) as raw:
        raw.writer.write(PREFACE + begun)
        await raw.rest()
    async with over_http2(fleet) as client:
        assert (await client.get("/health")).status_code == 200
    await fleet.idle()


async def test_requests_that_are_reset_at_once_end_the_connection_and_leave_nothing(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with http2(fleet) as client:
        for _ in range(1100):
            stream_id = client.h2.get_next_available_stream_id()
            client.h2.send_headers(stream_id, HEAD)
            client.h2.reset_stream(stream_id)
        await client.send()
        await client.end()
    await fleet.idle()


async def test_table_of_header_fields_stays_small_whatever_a_client_offers(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    async with http2(fleet, {SettingCodes.HEADER_TABLE_SIZE: 2**32 - 1}) as client:
        client.h2.decoder.max_allowed_table_size = 2**32 - 1
        for number in range(50):
            asked = await client.ask([*HEAD, (b"x-request-id", b"%0128d" % number)], b"{")
            await client.until(h2.events.StreamEnded, asked)
        assert client.h2.decoder.header_table_size == 4096
    await fleet.idle()


async def test_priority_that_comes_with_a_request_is_not_a_frame_that_brings_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gorgo.proxy.http2.MAX_EMPTY_FRAMES", 20)
    fleet = await start.fleet([answer(200)])
    async with http2(fleet) as client:
        for _ in range(50):
            asked = client.h2.get_next_available_stream_id()
            client.h2.send_headers(asked, HEAD, priority_weight=200)
            client.h2.send_data(asked, BODY, end_stream=True)
            await client.send()
            await client.until(h2.events.StreamEnded, asked)
    await fleet.idle()


async def test_client_that_opens_no_window_is_reset(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.proxy.http2.STALL_S", 0.1)
    fleet = await start.fleet([answer(200, b"y" * 100_000), stream(delta("x" * 40_000), delta("x" * 40_000), DONE)])
    async with http2(fleet, {SettingCodes.INITIAL_WINDOW_SIZE: 0}) as client:
        for body in (chat(), chat(stream=True), b"{"):
            asked = await client.ask(HEAD, body)
            await client.until(h2.events.StreamReset, asked)
    await fleet.idle()


async def test_client_that_opens_no_window_and_leaves_is_not_waited_for(start: Start) -> None:
    fleet = await start.fleet([answer(200, b"y" * 100_000)])
    for body in (chat(), b"{"):
        async with http2(fleet, {SettingCodes.INITIAL_WINDOW_SIZE: 0}) as client:
            asked = await client.ask(HEAD, body)
            await client.until(h2.events.ResponseReceived, asked)
    async with asyncio.timeout(5):
        await fleet.idle()
        while fleet.state.exchanges:
            await asyncio.sleep(0.01)


async def test_client_that_leaves_cancels_its_stream_only(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), DONE)])
    async with over_http2(fleet) as client:
        async with client.stream("POST", CHAT, content=chat(stream=True)) as response:
            async for _ in response.aiter_bytes():
                break
        assert (await client.post(CHAT, content=chat(stream=True))).status_code == 200
    await fleet.idle()
