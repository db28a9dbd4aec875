"""Server-sent events out of bytes split anywhere.

Owns the framing of a stream of events (WHATWG HTML, "Server-sent events": lines end in LF, CR or CR LF, a blank line
ends an event, a line that starts with a colon is a comment). What an event means is for `first_token` and `usage`.
"""

from __future__ import annotations

import re

from gorgo.core.record import record

#: A longer event is passed on undecoded: the proxy buffers no more than that before it lets bytes through.
MAX_EVENT_BYTES = 64 * 1024
#: Lines that are read of one stream. Before its first token an engine sends a few, and a comment every some seconds; a
#: hostile one could send thousands in each chunk, and each takes ten microseconds.
MAX_LINES = 1024

_BOM = b"\xef\xbb\xbf"
#: The end of a line. A CR that is the last byte so far may be half of a CR LF, so it ends nothing yet.
_EOL = re.compile(rb"\r\n|\n|\r(?=[^\n])")


@record
class SseEvent:
    """One event: its name (empty unless the stream gives one) and its data lines joined by LF."""

    name: str
    data: bytes


class SseReader:
    """Turns chunks into events; comments and events without data are left out.

    Example
    -------
    >>> reader = SseReader()
    >>> reader.feed(b"data: 1\\n\\nda"), reader.feed(b"ta: 2\\n\\n")
    ([SseEvent(name='', data=b'1')], [SseEvent(name='', data=b'2')])
    """

    def __init__(self) -> None:
        #: A bound was exceeded: bytes of a line or an event, or lines in all. Nothing is read after it.
        self.overflowed = False
        self._pending = b""
        self._searched = 0
        self._started = False
        self._name = ""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._lines = 0

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Events that end in `chunk`."""
        events: list[SseEvent] = []
        if self.overflowed:
            return events
        self._pending += chunk
        if not self._started and not self._skip_bom():
            return events
        start = 0
        for end in _EOL.finditer(self._pending, self._searched):
            self._lines += 1
            if self._lines > MAX_LINES or not self._line(self._pending[start : end.start()], events):
                self.overflowed = True
                return events
            start = end.end()
        self._pending = self._pending[start:]
        # The last byte may be a CR that only the next one can judge; it is not counted as the line's either.
        self._searched = max(0, len(self._pending) - 1)
        self.overflowed = len(self._pending) > MAX_EVENT_BYTES + 1
        return events

    def _skip_bom(self) -> bool:
        """Whether enough has come to know that there is no byte order mark (any more)."""
        if len(self._pending) < len(_BOM) and _BOM.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(_BOM)
        self._started = True
        return True

    def _line(self, line: bytes, events: list[SseEvent]) -> bool:
        """Take in one line; False when the event has grown too long."""
        if len(line) + self._data_bytes > MAX_EVENT_BYTES:
            return False
        if not line:
            self._dispatch(events)
            return True
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(line)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        return True

    def _dispatch(self, events: list[SseEvent]) -> None:
        if self._data:
            events.append(SseEvent(self._name, b"\n".join(self._data)))
        self._name = ""
        self._data = []
        self._data_bytes = 0
