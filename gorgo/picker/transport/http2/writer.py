"""What a connection sends: frames in order, DATA within the client's windows and while the transport takes any."""

from __future__ import annotations

from collections.abc import Callable

from gorgo.picker.transport.http2 import frames
from gorgo.picker.transport.http2.budget import FrameBudget
from gorgo.picker.transport.http2.frames import Code, Http2Error
from gorgo.picker.transport.http2.headers import RESPONSE, trailers
from gorgo.picker.transport.http2.settings import ClientSettings
from gorgo.picker.transport.http2.stream import CallStream


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
        #: Streams whose DATA waits, in order.
        self._waiting: dict[int, CallStream] = {}

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
        """The transport takes no DATA for now, or does again."""
        self._is_full = is_full
        self.write_waiting()

    def add_window(self, size: int) -> None:
        """The client takes more on the connection. Raises `Http2Error`."""
        self._window = checked_window(self._window + size)
        self.write_waiting()

    def write_waiting(self) -> None:
        """Send what has waited."""
        for stream in tuple(self._waiting.values()):
            if self._window <= 0 or self._is_full:
                break
            self.write(stream)

    def write_message(self, stream: CallStream, message: bytes) -> None:
        """Send a message, in one frame if nothing is in its way, or let it wait."""
        size = len(message) + frames.PREFIX_BYTES
        most = min(self.client.frame_bytes, self._window, stream.window)
        if stream.unsent or self._is_full or size > most:
            stream.unsent.append(b"\0" + len(message).to_bytes(4, "big") + message)
            stream.unsent_bytes += size
            self.write(stream)
            return
        if not stream.is_head_sent:
            self._send_head(stream)
        self._output.append(frames.message_frame(stream.stream_id, message))
        self._budget.earn()
        self._window -= size
        stream.window -= size
        self._drained(stream)
        if not self.is_receiving:
            self._wake()

    def _send_head(self, stream: CallStream) -> None:
        stream.is_head_sent = True
        self._output.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.stream_id, RESPONSE))

    def write(self, stream: CallStream) -> None:
        """Send what of a stream can be sent."""
        stream_id, unsent, output = stream.stream_id, stream.unsent, self._output
        if unsent and not stream.is_head_sent:
            self._send_head(stream)
        while unsent and not self._is_full:
            data = unsent[0]
            size = min(len(data), self.client.frame_bytes, self._window, stream.window)
            if size <= 0:
                break
            unsent.popleft()
            if size < len(data):
                unsent.appendleft(data[size:])
                data = data[:size]
            output.append(frames.frame(frames.DATA, 0, stream_id, data))
            self._budget.earn()
            self._window -= size
            stream.window -= size
            stream.unsent_bytes -= size
        if unsent:
            self._waiting[stream_id] = stream
        else:
            self._waiting.pop(stream_id, None)
            if stream.end_status is None:
                self._drained(stream)
            else:
                self._end(stream)
        if not self.is_receiving:
            self._wake()

    def drop_stream(self, stream: CallStream) -> None:
        """Drop what waits of a stream."""
        self._waiting.pop(stream.stream_id, None)

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
