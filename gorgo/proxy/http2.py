"""What of HTTP/2 is taken from a client, and how the end of an answer is shown to it.

Owns refusing requests that would be two different ones further on, frames that cost more than they bring, streams whose
client takes nothing, and saying that an answer was cut. Leaves the grammar to h2 and everything else to hypercorn.

Theory of operation. A request goes on to a replica as HTTP/1.1, so its path, names, values and length have to be what
they could be there; h2 refuses most of the rest (lengths that do not fit, fields of one connection, two hosts). In
hypercorn 0.18 a stream that its app has left stays as it is, and data for one that is over ends the connection. Here
such a stream is reset, so that no client takes half an answer for a whole one; and what a client still sends when it
has its answer (413) is dropped up to a bound, because clients that are reset at once do not read that answer. A client
that opens no window holds its stream, not the proxy: after `STALL_S` it is reset. Priorities are not followed, as
RFC 9113 allows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import h2.events
import h2.settings
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol

from gorgo.proxy.headers import CONTROLS, LENGTH, NAME
from gorgo.proxy.wire import HeadLimits

#: Requests at once on one connection; RFC 9113 asks for no fewer.
STREAMS = 100
#: What a client may send of a body before it hears that it was taken: a long prompt in one round trip.
WINDOW_BYTES = 1 << 20
#: Of all its streams; only what the proxy has taken is given back, so this is not what it holds.
CONNECTION_WINDOW_BYTES = 16 << 20
#: Of a request that has its answer: what was under way when its client read it.
DROPPED_BYTES = 256 * 1024
#: Of the fields of answers that are remembered to be said shortly, as much as RFC 7541 has by default: each field is
#: looked for in all of them.
TABLE_BYTES = 4096
#: A client that takes nothing for so long is as good as gone: as long as a replica may be silent.
STALL_S = 60.0
#: Frames that carry nothing (pings, settings, resets, empty data) in `_CALM_S`: ten times what busy clients send.
MAX_EMPTY_FRAMES = 1000
_CALM_S = 10.0

_FORBIDDEN = CONTROLS + b"\r\n"
_METHOD = re.compile(rb"[A-Za-z]{1,32}")
_PATH = re.compile(rb"/[\x21-\x7e]*")
_EMPTY = (
    h2.events.PingReceived,
    h2.events.PingAckReceived,
    h2.events.RemoteSettingsChanged,
    h2.events.SettingsAcknowledged,
    h2.events.StreamReset,
    h2.events.PriorityUpdated,
    h2.events.UnknownFrameReceived,
)

Fields = Sequence[tuple[bytes, bytes]]


class StrictH2Protocol(H2Protocol):
    """hypercorn's side of one HTTP/2 connection. `made` are hypercorn's own arguments."""

    def __init__(self, limits: HeadLimits, *made: Any) -> None:
        super().__init__(*made)
        self._limits = limits
        codes = h2.settings.SettingCodes
        values = {
            codes.MAX_CONCURRENT_STREAMS: STREAMS,
            codes.MAX_HEADER_LIST_SIZE: limits.size_bytes,
            codes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
        }
        self.connection.local_settings = h2.settings.Settings(client=False, initial_values=values)
        self.connection.decoder.max_header_list_size = limits.size_bytes
        #: Streams whose request is not complete.
        self._asking: set[int] = set()
        #: Those of them that have their answer, and how much more of the request is dropped.
        self._answered: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timed: tuple[str, int] | None = None
        self._frames = 0
        self._empty_frames = 0
        self._calm_since = 0.0

    async def initiate(self, headers: Any = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        self.connection.increment_flow_control_window(CONNECTION_WINDOW_BYTES)
        await self._flush()

    async def handle(self, event: Event) -> None:
        if self.closed:
            return
        try:
            await super().handle(event)
        finally:
            if isinstance(event, Closed):  # nobody takes what is left, and whoever waits for that need not
                for stream_id in tuple(self.stream_buffers):
                    await self._drop_buffer(stream_id)
            await self._watch()

    # -- what comes

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        self._frames += len(events)
        if self._is_flood(events):
            await self._refuse(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        for event in events:
            if isinstance(event, h2.events.RequestReceived):
                await self._begin(event)
            elif isinstance(event, h2.events.DataReceived):
                await self._take(event)
            elif isinstance(event, h2.events.StreamEnded):
                self._asked(event.stream_id)
                if event.stream_id in self.streams:
                    await self.streams[event.stream_id].handle(EndBody(stream_id=event.stream_id))
            elif isinstance(event, h2.events.StreamReset):
                self._asked(event.stream_id)
                await self._drop_buffer(event.stream_id)
                await self._close_stream(event.stream_id)
            elif isinstance(event, h2.events.WindowUpdated):
                await self._window_updated(event.stream_id)
            elif isinstance(event, h2.events.RemoteSettingsChanged):
                encoder = self.connection.encoder
                encoder.header_table_size = min(encoder.header_table_size, TABLE_BYTES)
                await self._window_updated(None)
            elif isinstance(event, h2.events.ConnectionTerminated):
                await self.send(Closed())
        await self._flush()

    async def _begin(self, event: h2.events.RequestReceived) -> None:
        stream_id, fields = event.stream_id, event.headers
        assert stream_id is not None
        assert fields is not None
        if self.context.terminated.is_set():
            self.connection.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
        elif len(fields) > self._limits.lines:
            self.connection.send_headers(stream_id, [(b":status", b"431"), (b"content-length", b"0")], end_stream=True)
            if event.stream_ended is None:
                self.connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)
        elif not could_be_http_1(fields):
            self.connection.reset_stream(stream_id, ErrorCodes.PROTOCOL_ERROR)
        else:
            if event.stream_ended is None:
                self._asking.add(stream_id)
            await self.send(Updated(idle=False))
            await self._create_stream(event)

    async def _take(self, event: h2.events.DataReceived) -> None:
        stream_id, length = event.stream_id, event.flow_controlled_length
        assert stream_id is not None
        assert length is not None
        if stream_id in self.streams:
            await self.streams[stream_id].handle(Body(stream_id=stream_id, data=event.data or b""))
        with suppress(ProtocolError):  # it may have been reset while the app took this
            self.connection.acknowledge_received_data(length, stream_id)
            self._drop_more(stream_id, length)

    def _drop_more(self, stream_id: int, length: int) -> None:
        left = self._answered.get(stream_id)
        if left is None:
            return
        self._answered[stream_id] = left - length
        if left < length:
            self._asked(stream_id)
            self.connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def _asked(self, stream_id: int) -> None:
        """Nothing more comes of that request."""
        self._asking.discard(stream_id)
        self._answered.pop(stream_id, None)

    def _is_flood(self, events: Sequence[h2.events.Event]) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._calm_since > _CALM_S:
            self._calm_since, self._empty_frames = now, 0
        for event in events:
            empty = isinstance(event, h2.events.DataReceived) and not event.data and event.stream_ended is None
            self._empty_frames += empty or isinstance(event, _EMPTY)
            if isinstance(event, h2.events.RequestReceived) and event.priority_updated is not None:
                self._empty_frames -= 1  # that priority came with a request
        return self._empty_frames > MAX_EMPTY_FRAMES

    # -- what goes

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, StreamClosed):
            await self._end(event.stream_id)
            await super().stream_send(event)
        elif isinstance(event, EndBody) or (isinstance(event, Body) and self._waits(event)):
            try:
                async with asyncio.timeout(STALL_S):
                    await super().stream_send(event)
            except TimeoutError:
                await self._cut(event.stream_id)
        else:
            await super().stream_send(event)

    def _waits(self, event: Body) -> bool:
        buffer = self.stream_buffers.get(event.stream_id)
        return buffer is not None and len(buffer.buffer) + len(event.data) >= BUFFER_HIGH_WATER

    async def _send_data(self, stream_id: int) -> None:
        """As hypercorn's, and sure of a stream that goes away meanwhile."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is None:
            self.priority.remove_stream(stream_id)
            return
        try:
            window = min(self.connection.local_flow_control_window(stream_id), self.connection.max_outbound_frame_size)
            data = await buffer.pop(max(0, window))
            if data:
                self.connection.send_data(stream_id, data)
            else:
                self.priority.block(stream_id)
            if buffer.complete:
                self.connection.end_stream(stream_id)
                await self._drop_buffer(stream_id)
        except ProtocolError:
            await self._cut(stream_id)
        await self._flush()

    async def _end(self, stream_id: int) -> None:
        """Its app is done: the answer is complete, or it never will be."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None and not buffer.complete:
            await self._cut(stream_id)
        elif stream_id in self._asking:
            self._answered[stream_id] = DROPPED_BYTES

    async def _cut(self, stream_id: int) -> None:
        with suppress(ProtocolError):  # the client has reset it before
            self.connection.reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)
        self._asked(stream_id)
        await self._drop_buffer(stream_id)
        await self._flush()
        await self._close_stream(stream_id)

    async def _drop_buffer(self, stream_id: int) -> None:
        buffer = self.stream_buffers.pop(stream_id, None)
        if buffer is not None:
            self.priority.remove_stream(stream_id)
            await buffer.close()

    # -- what does not come

    async def _watch(self) -> None:
        """A frame that has begun, and a head over several of them, have to be complete in time."""
        if self.closed:
            self._set_timer(None)
            return
        waiting = self.connection.incoming_buffer
        begun = bytes(waiting._data[:3])
        if len(begun) == 3 and int.from_bytes(begun) > self.connection.max_inbound_frame_size:
            # h2 would gather all of it before it looks.
            await self._refuse(ErrorCodes.FRAME_SIZE_ERROR)
        elif waiting._headers_buffer:
            self._set_timer(("head", 0))
        else:
            self._set_timer(("frame", self._frames) if begun or 0 < waiting._preamble_len < _PREFACE_BYTES else None)

    def _set_timer(self, timed: tuple[str, int] | None) -> None:
        if timed == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed, self._timer = timed, None
        if timed is not None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.timeout_s, self._late)

    def _late(self) -> None:
        self.task_group.spawn(self._refuse, ErrorCodes.PROTOCOL_ERROR)

    async def _refuse(self, code: ErrorCodes) -> None:
        """End the connection; what is open on it is cut."""
        self._set_timer(None)
        with suppress(ProtocolError):
            self.connection.close_connection(code)
        data = self.connection.data_to_send()
        if data:
            await self.send(RawData(data=data))
        await self.send(Closed())


_PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def could_be_http_1(fields: Fields) -> bool:
    """Whether a request's fields say on one HTTP/1.1 connection what they say on a stream.

    >>> could_be_http_1([(b":method", b"POST"), (b":path", b"/v1/chat/completions"), (b"content-length", b"+2")])
    False
    """
    lengths = 0
    path = method = b""
    for name, value in fields:
        if len(value.translate(None, _FORBIDDEN)) != len(value):
            return False
        if name == b":path":
            path = value
        elif name == b":method":
            method = value
        elif name[:1] != b":" and not NAME.fullmatch(name):
            return False
        elif name == b"content-length":
            lengths += 1
            if lengths > 1 or not LENGTH.fullmatch(value):
                return False
    return bool(_METHOD.fullmatch(method) and _PATH.fullmatch(path) and method.upper() != b"CONNECT")
