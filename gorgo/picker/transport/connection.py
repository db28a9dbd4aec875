"""One connection of HTTP/2 as a server of gRPC, sans-IO: bytes in, bytes out, calls opened and ended.

Owns the state of the connection. Leaves single frames and one stream to
`gorgo.picker.transport.frames`, and sockets to the server. Its parts, in the order of the file:

- `ClientSettings`: what the client allows;
- `FrameBudget`: how many frames without a message a client may send;
- `FrameWriter`: what is sent, in order and within the client's windows;
- `Connection`: what each received frame does.

Theory of operation. `receive` acts on each frame at once; what has to be sent gathers in `take_output`. Windows are
summed while frames are read, and what has waited for them is written once, after the last frame: the work of a frame
does not grow with the streams that are open. `receive` ends after `TURN_S`, and goes on in the next turn, so that other
connections have theirs. The client's window of a stream is renewed while few answers wait in it, so that a client that
reads nothing sends nothing either.

Errors of the peer raise `Http2Error`: the caller sends `goaway_for` it and closes the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic

from gorgo.core.limits import BufferBudget
from gorgo.picker.transport import frames
from gorgo.picker.transport.frames import (
    MAX_LIST_BYTES,
    RESPONSE,
    BlockReader,
    CallStream,
    Code,
    HeadDecoder,
    HeaderBlock,
    Http2Error,
    MessageError,
    refusal,
    trailers,
)
from gorgo.picker.transport.services import Services, Status, TransportLimits


class ClientSettings:
    """The settings of one client; `is_known` once it has sent any."""

    __slots__ = ("frame_bytes", "is_known", "stream_window")

    def __init__(self) -> None:
        self.is_known = False
        self.stream_window = frames.FIRST_WINDOW
        self.frame_bytes = frames.FRAME_BYTES

    def read_frame(self, payload: bytes) -> bool:
        """Apply a SETTINGS frame; return whether each open stream's window is another now. Raises `Http2Error`."""
        before = self.stream_window
        for key, value in frames.read_settings(payload):
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise Http2Error(Code.FLOW_CONTROL_ERROR, "expected a window of at most 2^31 - 1")
                self.stream_window = value
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                    raise Http2Error(Code.PROTOCOL_ERROR, "expected frames of 2^14 to 2^24 - 1 bytes")
                self.frame_bytes = value
            elif key == frames.ENABLE_PUSH and value > 1:
                raise Http2Error(Code.PROTOCOL_ERROR, "expected ENABLE_PUSH of 0 or 1")
        self.is_known = True
        return self.stream_window != before


# A flood of frames that carry no part of a message is cheap to send. Rapid resets, pings, settings, windows,
# priorities, unknown frames and empty ones all draw on one budget.


#: Such frames without any message, until the next renewal: an Envoy of thousands of streams that all end at once.
FREE_FRAMES = 10_000
#: Allowed by each message received, and each DATA frame sent: a reset, and windows of stream and connection.
FRAMES_PER_MESSAGE = 4
#: A DATA frame that neither ends a message nor has so many bytes allows none: a window of one byte would pay itself.
LEAST_PAID_BYTES = 1024
#: Open streams that a change of their windows looks at for the price of a frame.
STREAMS_PER_FRAME = 16
#: Time of one `receive`, s: other connections wait for it.
TURN_S = 0.005
#: DATA frames that have waited and that one `receive` sends: some 3 ms.
FRAMES_PER_TURN = 512
#: Bytes of a block that is not cached which cost as much as a frame: its Huffman code is decoded at 4 MB/s.
BLOCK_BYTES_PER_FRAME = 256


class FrameBudget:
    """The budget of one connection."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = FREE_FRAMES

    def renew(self) -> None:
        """Allow all of `FREE_FRAMES` again: called with each look at a connection's signs of life."""
        self._left = FREE_FRAMES

    def earn(self) -> None:
        """Allow some more: a message has come or gone."""
        if self._left < FREE_FRAMES:
            self._left += FRAMES_PER_MESSAGE

    def spend(self, frames_: int = 1) -> None:
        """Count a frame, or one that makes the work of so many. Raises `Http2Error` for one too many."""
        self._left -= frames_
        if self._left < 0:
            raise Http2Error(Code.ENHANCE_YOUR_CALM, f"expected messages: {FREE_FRAMES} frames had no part of one")


class FrameWriter:
    """Gathers output.

    Parameters
    ----------
    wake:
        Called when output gathers while `is_receiving` is false.
    ended:
        Called with each stream whose last frame is in the output.
    drained:
        Called with each stream of which nothing waits any more.
    budget:
        DATA allows the client frames of its own.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        ended: Callable[[CallStream], None],
        drained: Callable[[CallStream], None],
        budget: FrameBudget,
    ) -> None:
        self.client = ClientSettings()
        #: Output is taken by the caller of `Connection.receive`.
        self.is_receiving = False
        self._wake = wake
        self._ended = ended
        self._drained = drained
        self._budget = budget
        self._output: list[bytes] = []
        #: Bytes that the client takes on the connection.
        self._window = frames.FIRST_WINDOW
        self._is_full = False
        #: Streams whose DATA waits for the connection alone, in turn; not those that wait for their own window.
        self._ready: dict[int, CallStream] = {}
        #: Of all streams.
        self.unsent_bytes = 0

    def take_output(self) -> bytes:
        """Return what has to be sent."""
        if not self._output:
            return b""
        output = self._output[0] if len(self._output) == 1 else b"".join(self._output)
        self._output.clear()
        return output

    def add(self, frame: bytes) -> None:
        """Send a frame other than DATA."""
        self._output.append(frame)
        if not self.is_receiving:
            self._wake()

    def set_full(self, is_full: bool) -> None:
        """The transport takes no DATA for now, or does again; `write_waiting` follows."""
        self._is_full = is_full

    def add_window(self, size: int) -> None:
        """The client takes more on the connection; `write_waiting` follows. Raises `Http2Error`."""
        self._window = checked_window(self._window + size)

    def add_stream_window(self, stream: CallStream, size: int) -> None:
        """The client takes more of a stream; `write_waiting` follows. Raises `Http2Error`."""
        checked_window(self.client.stream_window + stream.granted + size)
        stream.granted += size
        self.find_ready(stream)

    def find_ready(self, stream: CallStream) -> None:
        """Let a stream have its turn if its window allows it."""
        if stream.unsent and self.client.stream_window + stream.granted > 0:
            self._ready.setdefault(stream.stream_id, stream)

    def write_waiting(self) -> bool:
        """Send what has waited, a frame of each stream in turn; return whether more could be sent at once."""
        for _ in range(FRAMES_PER_TURN):
            if not self._ready or self._window <= 0 or self._is_full:
                return False
            stream = self._ready.pop(next(iter(self._ready)))
            self.write(stream, most_frames=1)
        return bool(self._ready) and self._window > 0

    def write_message(self, stream: CallStream, message: bytes) -> None:
        """Send a message, in one frame if nothing is in its way, or let it wait."""
        size = len(message) + frames.PREFIX_BYTES
        client = self.client
        if (
            stream.unsent
            or self._is_full
            or size > self._window
            or size > client.frame_bytes
            or size > client.stream_window + stream.granted
        ):
            stream.unsent.append(b"\0" + len(message).to_bytes(4, "big") + message)
            stream.unsent_bytes += size
            self.unsent_bytes += size
            self.write(stream)
            return
        if not stream.is_head_sent:
            self._send_head(stream)
        self._output.append(frames.message_frame(stream.stream_id, message))
        self._budget.earn()
        self._window -= size
        stream.granted -= size
        self._drained(stream)
        if not self.is_receiving:
            self._wake()

    def _send_head(self, stream: CallStream) -> None:
        stream.is_head_sent = True
        self._output.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.stream_id, RESPONSE))

    def write(self, stream: CallStream, most_frames: int | None = None) -> None:
        """Send what of a stream can be sent, or `most_frames` of it."""
        stream_id, unsent, output, client = stream.stream_id, stream.unsent, self._output, self.client
        if unsent and not stream.is_head_sent:
            self._send_head(stream)
        while unsent and not self._is_full and most_frames != 0:
            data = unsent[0]
            size = min(len(data), client.frame_bytes, self._window, client.stream_window + stream.granted)
            if size <= 0:
                break
            if most_frames is not None:
                most_frames -= 1
            unsent.popleft()
            if size == len(data) or size >= LEAST_PAID_BYTES:
                self._budget.earn()
            if size < len(data):
                unsent.appendleft(data[size:])
                data = data[:size]
            output.append(frames.frame(frames.DATA, 0, stream_id, data))
            self._window -= size
            stream.granted -= size
            stream.unsent_bytes -= size
            self.unsent_bytes -= size
        if unsent:
            self.find_ready(stream)
        else:
            self._ready.pop(stream_id, None)
            if stream.end_status is None:
                self._drained(stream)
            else:
                self._end(stream)
        if not self.is_receiving:
            self._wake()

    def drop_stream(self, stream: CallStream) -> None:
        """Drop what waits of a stream."""
        self._ready.pop(stream.stream_id, None)
        self.unsent_bytes -= stream.unsent_bytes
        stream.unsent_bytes = 0
        stream.unsent.clear()

    def _end(self, stream: CallStream) -> None:
        assert stream.end_status is not None, "the caller has looked"
        block = trailers(stream.end_status, stream.end_text, with_head=not stream.is_head_sent)
        flags = frames.END_HEADERS | frames.END_STREAM
        self._output.append(frames.frame(frames.HEADERS, flags, stream.stream_id, block))
        if not stream.input_ended:
            # The client need not send the rest.
            self._output.append(frames.reset(stream.stream_id, Code.NO_ERROR))
        self._ended(stream)


def checked_window(window: int) -> int:
    """Return a window. Raises `Http2Error` for one that is too large."""
    if window > frames.LARGEST_WINDOW:
        raise Http2Error(Code.FLOW_CONTROL_ERROR, "expected a window of at most 2^31 - 1")
    return window


#: Window of each stream: a body in buffered mode comes in one message of about this size, without a pause.
STREAM_WINDOW = 1024 * 1024
#: Window of a connection: some dozens of large bodies on their way.
CONNECTION_WINDOW = 64 * 1024 * 1024
#: Answers of one stream that may wait before its client gets no new window.
UNSENT_BYTES = 256 * 1024
#: Answers of all streams that may wait before the connection gets no new window.
UNSENT_TOTAL_BYTES = 64 * 1024 * 1024
#: Longest time of an incomplete message, s: Envoy sends a body that it has.
PARTIAL_S = 60.0
#: Frames of which most carry a message, or begin a call.
_CARRYING = frozenset({frames.DATA, frames.HEADERS})


class Connection:
    """The server's side of one connection.

    Parameters
    ----------
    wake:
        Called when output gathers outside of `receive`.
    buffers:
        Bytes of incomplete messages count here, with those of all other connections.
    clock:
        Bounds the time of a `receive`, s.
    """

    def __init__(
        self,
        services: Services,
        limits: TransportLimits,
        wake: Callable[[], None],
        buffers: BufferBudget,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._buffers = buffers
        #: Host of the peer, for whom its incomplete messages count.
        self.client = ""
        #: Since when each stream has an incomplete message, s.
        self._partial_since: dict[CallStream, float] = {}
        #: The windows of all streams have changed since what waits for them was last looked at.
        self._windows_changed = False
        #: `receive` has ended before the last whole frame: call it again, with no bytes, before it gets more.
        self.is_behind = False
        self._services = services
        self._limits = limits
        self._blocks = BlockReader()
        self._heads = HeadDecoder()
        self._budget = FrameBudget()
        self._writer = FrameWriter(wake, self._forget, self._drained, self._budget)
        self._streams: dict[int, CallStream] = {}
        self._buffer = b""
        self._greeted = False
        self._last_id = 0
        self._unacknowledged = 0
        self._handlers = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.PRIORITY: self._on_priority,
            frames.RST_STREAM: self._on_reset,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
            frames.WINDOW_UPDATE: self._on_window,
            frames.CONTINUATION: self._on_continuation,
        }
        self._writer.add(
            frames.settings(
                {
                    frames.HEADER_TABLE_SIZE: 0,
                    frames.MAX_CONCURRENT_STREAMS: limits.calls,
                    frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                    frames.MAX_HEADER_LIST_SIZE: MAX_LIST_BYTES,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW - frames.FIRST_WINDOW)
        )

    @property
    def is_idle(self) -> bool:
        """Return whether no stream is open."""
        return not self._streams

    @property
    def is_greeted(self) -> bool:
        """Return whether the client has sent its settings."""
        return self._writer.client.is_known

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes of answers for which the client gives no window."""
        return self._writer.unsent_bytes

    def take_output(self) -> bytes:
        """Return what has to be sent."""
        return self._writer.take_output()

    def receive(self, data: bytes) -> None:
        """Act on received bytes, for `TURN_S`: `is_behind` says whether frames are left. Raises `Http2Error`."""
        buffer = self._buffer + data if self._buffer else data
        position, last = 0, len(buffer) - frames.HEAD_BYTES
        self._writer.is_receiving, self.is_behind = True, False
        due_s = self._clock() + TURN_S
        try:
            if not self._greeted:
                position = self._greet(buffer)
            while position <= last and self._greeted:
                size_and_kind, flags, stream_id = frames.read_head(buffer, position)
                size, kind = size_and_kind >> 8, size_and_kind & 0xFF
                if size > frames.FRAME_BYTES:
                    raise Http2Error(Code.FRAME_SIZE_ERROR, f"expected frames of at most {frames.FRAME_BYTES} bytes")
                if position + size > last:
                    break
                stream_id &= 0x7FFFFFFF
                if self._blocks.partial is not None or not self._writer.client.is_known:
                    self._check_order(kind, stream_id)
                if kind not in _CARRYING:
                    self._budget.spend()
                handler = self._handlers.get(kind)
                position += frames.HEAD_BYTES + size
                if handler is not None:  # others are extensions
                    handler(stream_id, flags, buffer[position - size : position])
                if position <= last and self._clock() > due_s:
                    self.is_behind = True
                    break
            if self._windows_changed:
                self._send_windows()
            if self._writer.write_waiting():
                self.is_behind = True
        finally:
            self._writer.is_receiving = False
        self._buffer = buffer[position:] if position < len(buffer) else b""

    def close(self) -> None:
        """The connection is lost: end all calls."""
        for stream in tuple(self._streams.values()):
            self._forget(stream)

    def goaway_for(self, error: Http2Error) -> bytes:
        """Return the last frame of a connection whose peer broke the protocol."""
        return frames.goaway(self._last_id, error.code, str(error))

    def announce_end(self) -> None:
        """Ask the client to open new streams on another connection; those on their way are served."""
        self._writer.add(frames.goaway(frames.LARGEST_WINDOW, Code.NO_ERROR))

    def announce_last_stream(self) -> None:
        """Announce the last stream."""
        self._writer.add(frames.goaway(self._last_id, Code.NO_ERROR))

    def ping(self) -> None:
        """Ask the client for a sign of life."""
        self._writer.add(frames.frame(frames.PING, 0, 0, bytes(8)))

    def renew_budget(self) -> None:
        """Time has passed: the client may send frames without messages again. Messages that do not end are refused."""
        self._budget.renew()
        due_s = self._clock() - PARTIAL_S
        for stream in [stream for stream, since_s in self._partial_since.items() if since_s <= due_s]:
            self._fail_partial(stream, f"expected a whole message within {PARTIAL_S:g} s")

    def set_full(self, is_full: bool) -> None:
        """The transport takes no more DATA for now, or does again: `receive` writes what has waited."""
        self._writer.set_full(is_full)

    # -- streams

    def _send_windows(self) -> None:
        """Find the streams that a change of their initial window lets go on. Raises `Http2Error`."""
        self._windows_changed = False
        for stream in self._streams.values():
            checked_window(self._writer.client.stream_window + stream.granted)
            self._writer.find_ready(stream)

    def _drained(self, stream: CallStream) -> None:
        """Nothing of a stream waits any more."""
        if stream.unacknowledged >= STREAM_WINDOW // 2:
            self._renew(stream)
        if self._unacknowledged >= CONNECTION_WINDOW // 2:
            self._renew_all()

    def _renew_all(self) -> None:
        """Let the client send more on the connection, unless too much waits for it."""
        if self._writer.unsent_bytes <= UNSENT_TOTAL_BYTES:
            self._writer.add(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0

    def _renew(self, stream: CallStream) -> None:
        """Let the client send more of a stream, unless too much waits for it."""
        if stream.unsent_bytes <= UNSENT_BYTES and not stream.input_ended:
            self._writer.add(frames.window_update(stream.stream_id, stream.unacknowledged))
            stream.unacknowledged = 0

    def _forget(self, stream: CallStream) -> None:
        """Drop a stream, and end its call."""
        if self._streams.pop(stream.stream_id, None) is None:
            return
        self._writer.drop_stream(stream)
        self._count_partial(stream, 0)
        call, stream.call = (
            stream.call,
            None,
        )  # it refers to the stream: without this only the collector would free both
        if call is not None:
            self._services.close(call)

    def _end_input(self, stream: CallStream) -> None:
        stream.input_ended = True
        if stream.call is not None:
            self._services.close(stream.call)
        stream.end_call()

    def _take(self, stream: CallStream, data: bytes) -> None:
        """Pass on the messages that are complete."""
        try:
            for message in stream.reader.feed(data):
                self._budget.earn()
                self._partial_since.pop(stream, None)
                if stream.call is not None:
                    stream.call.feed(message)
        except MessageError as error:
            stream.fail_call(Status.RESOURCE_EXHAUSTED if error.too_large else Status.UNIMPLEMENTED, str(error))
        size = stream.reader.partial_bytes
        if (size or stream.counted is not None) and stream.stream_id in self._streams:
            self._count_partial(stream, size)

    def _count_partial(self, stream: CallStream, size: int) -> None:
        """Count an incomplete message, among those of all connections; refuse it where all of them are too many."""
        buffers, counted = self._buffers, stream.counted
        if not size:
            self._partial_since.pop(stream, None)
            if counted is not None:
                stream.counted = counted.on_evict = None  # it refers to the stream
                buffers.close(counted)
            return
        now = self._clock()
        self._partial_since.setdefault(stream, now)
        if counted is None:
            counted = stream.counted = buffers.new_buffer(self.client, now=now)
            counted.on_evict = partial(self._fail_partial, stream, "others needed the memory of this slow message")
        if size < counted.size:
            buffers.shrink(counted, size)
            return
        counted.received(size - counted.size, now=now)
        if not buffers.reserve(counted, size, now=now):
            self._fail_partial(stream, "too many bytes of incomplete messages")

    def _fail_partial(self, stream: CallStream, text: str) -> None:
        stream.reader.drop_partial()
        self._count_partial(stream, 0)
        stream.fail_call(Status.RESOURCE_EXHAUSTED, text)

    # -- input

    def _greet(self, buffer: bytes) -> int:
        """Read the preface; return its size, 0 while it is not complete."""
        if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
            raise Http2Error(Code.PROTOCOL_ERROR, "expected the preface of HTTP/2")
        if len(buffer) < len(frames.PREFACE):
            return 0
        self._greeted = True
        return len(frames.PREFACE)

    def _check_order(self, kind: int, stream_id: int) -> None:
        self._blocks.check(kind, stream_id)
        if not self._writer.client.is_known and kind != frames.SETTINGS:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected SETTINGS first")

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id == 0 or stream_id > self._last_id):
            raise Http2Error(Code.PROTOCOL_ERROR, "expected DATA of an open stream")
        self._unacknowledged += size
        if self._unacknowledged > CONNECTION_WINDOW:
            raise Http2Error(Code.FLOW_CONTROL_ERROR, "expected no more than the connection's window")
        data = frames.unpadded(flags, payload) if flags & frames.PADDED else payload
        if self._unacknowledged >= CONNECTION_WINDOW // 2:
            self._renew_all()
        if not data:
            self._budget.spend()
        if stream is None:
            return  # it has ended here, and the client did not know yet
        if stream.input_ended:
            raise Http2Error(Code.STREAM_CLOSED, "expected no DATA after the end of a stream")
        stream.unacknowledged += size
        if stream.unacknowledged > STREAM_WINDOW:
            raise Http2Error(Code.FLOW_CONTROL_ERROR, "expected no more than the stream's window")
        if data and stream.end_status is None:  # else it has failed, and its end waits to be sent
            self._take(stream, data)
        if flags & frames.END_STREAM:
            self._end_input(stream)
        elif stream.unacknowledged >= STREAM_WINDOW // 2:
            self._renew(stream)

    def _on_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        self._on_block(self._blocks.start(stream_id, flags, payload))

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        self._on_block(self._blocks.add(flags, payload))

    def _on_block(self, block: HeaderBlock | None) -> None:
        """Act on a whole header block: a new stream, or the end of the client's."""
        if block is None:
            return
        if block.stream_id > self._last_id:
            self._open(block)
            return
        self._budget.spend(1 + len(block.fragment) // BLOCK_BYTES_PER_FRAME)
        self._heads.skip(block.fragment)
        stream = self._streams.get(block.stream_id)
        if stream is None:
            return  # it has ended here, and the client did not know yet
        if not block.ends_stream or stream.input_ended:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected trailers to end the stream")
        self._end_input(stream)

    def _open(self, block: HeaderBlock) -> None:
        if not self._heads.is_cached(block.fragment):
            self._budget.spend(1 + len(block.fragment) // BLOCK_BYTES_PER_FRAME)
        head = self._heads.decode(block.fragment)
        stream_id = self._last_id = block.stream_id
        if len(self._streams) >= self._limits.calls:
            self._budget.spend()
            self._writer.add(frames.reset(stream_id, Code.REFUSED_STREAM))
            return
        if head.refusal is not None:
            self._budget.spend()
            ends = frames.END_HEADERS | frames.END_STREAM
            self._writer.add(frames.frame(frames.HEADERS, ends, stream_id, refusal(head.refusal)))
            return
        stream = CallStream(self._writer, stream_id, message_bytes=self._limits.message_bytes)
        self._streams[stream_id] = stream
        stream.call = self._services.open_call(head.path, stream)
        if stream.call is None:
            stream.fail_call(Status.UNIMPLEMENTED, f"unknown method {head.path[:100]}")
        elif block.ends_stream:
            self._end_input(stream)

    def _on_reset(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        if len(payload) != 4:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 4 bytes of RST_STREAM")
        if stream_id == 0 or stream_id > self._last_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected RST_STREAM of an open stream")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream)

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected SETTINGS of the connection")
        if flags & frames.ACK:
            if payload:
                raise Http2Error(Code.FRAME_SIZE_ERROR, "expected no payload in an acknowledgement")
            self._heads.forbid_table()
            return
        if self._writer.client.read_frame(payload):
            self._budget.spend(len(self._streams) // STREAMS_PER_FRAME)
            self._windows_changed = True
        self._writer.add(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected PING of the connection")
        if len(payload) != 8:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 8 bytes of PING")
        if not flags & frames.ACK:
            self._writer.add(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_window(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        if len(payload) != 4:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 4 bytes of WINDOW_UPDATE")
        size = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if stream_id > self._last_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected WINDOW_UPDATE of an open stream")
        if not size:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected a window that grows")
        if not stream_id:
            self._writer.add_window(size)
            return
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._writer.add_stream_window(stream, size)

    def _on_priority(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        if not stream_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected PRIORITY of a stream")
        if len(payload) != 5:
            raise Http2Error(Code.FRAME_SIZE_ERROR, "expected 5 bytes of PRIORITY")

    def _on_push(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        raise Http2Error(Code.PROTOCOL_ERROR, "expected no PUSH_PROMISE of a client")

    def _on_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:  # noqa: ARG002
        if stream_id:
            raise Http2Error(Code.PROTOCOL_ERROR, "expected GOAWAY of the connection")

        # The client opens no more streams, and ends the connection after the last one.
