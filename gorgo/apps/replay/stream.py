"""Parser of one streamed answer: times of content, usage, result. Pure: bytes and times in, values out."""

from __future__ import annotations

import re

from gorgo.core.stream import FirstTokenDetector, StreamState, Usage, UsageReader

#: The end of a stream is looked for in its last bytes only; an error event or `[DONE]` is far shorter.
TAIL_BYTES = 4096
#: Events without a token: the end, and usage, which some engines write with a space.
_NO_TOKEN = re.compile(rb'\[DONE\]|"usage"\s*:\s*\{')
_ERROR_EVENT = re.compile(rb'(?:^|\n)(?:event: ?error|data: ?\{"error")')


class StreamReader:
    """Timing and usage of one stream of chat completion chunks.

    A gap is the time between two arrivals after the first content. Tokens that arrive together make one gap, and what
    arrives with the end (`[DONE]`, usage) makes none: it carries no token, or the last one together with the end.
    """

    def __init__(self) -> None:
        self.first_content_s: float | None = None
        self.gaps_s: list[float] = []
        self._last_s = 0.0
        self._scanner = FirstTokenDetector("/v1/chat/completions")
        self._usage = UsageReader()
        self._tail = b""

    def feed(self, chunk: bytes, *, now: float) -> None:
        """Bytes as they came, at `now`."""
        self._usage.feed(chunk)
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        if self.first_content_s is not None:
            self._gap(chunk, now)
        elif self._scanner.feed(chunk) is StreamState.CONTENT:
            self.first_content_s = self._last_s = now

    def _gap(self, chunk: bytes, now: float) -> None:
        if _NO_TOKEN.search(chunk) is None:
            self.gaps_s.append(now - self._last_s)
            self._last_s = now

    @property
    def usage(self) -> Usage | None:
        """As the engine reports it."""
        return self._usage.usage()

    def error(self) -> str | None:
        """Why the stream, now at its end, is not a whole answer."""
        if self.first_content_s is None and self._scanner.error_status is not None:
            return f"stream error {self._scanner.error_status}: before any content"
        if _ERROR_EVENT.search(self._tail):
            return "stream error: an error event in the stream"
        if self.first_content_s is None:
            return "no content: the stream ended without any"
        if b"[DONE]" not in self._tail:
            return "truncated: the stream ended without [DONE]"
        return None
