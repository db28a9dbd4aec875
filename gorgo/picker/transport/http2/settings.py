"""What the client allows: the window of a new stream, and the size of a frame."""

from __future__ import annotations

from gorgo.picker.transport.http2 import frames
from gorgo.picker.transport.http2.frames import Code, Http2Error


class ClientSettings:
    """The settings of one client; `is_known` once it has sent any."""

    __slots__ = ("frame_bytes", "is_known", "stream_window")

    def __init__(self) -> None:
        self.is_known = False
        self.stream_window = frames.FIRST_WINDOW
        self.frame_bytes = frames.FRAME_BYTES

    def read_frame(self, payload: bytes) -> int:
        """Apply a SETTINGS frame; return the change of each open stream's window. Raises `Http2Error`."""
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
        return self.stream_window - before
