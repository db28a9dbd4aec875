"""What the relay reads of a response as it passes, behind one import: pure, incremental, blind to how bytes are split.

`core.stream.first_token` finds the first token, `core.stream.usage` the token counts, and `core.stream.whole` judges
what has ended, on the framing of `core.stream.sse`.
"""

from __future__ import annotations

from gorgo.core.stream.first_token import FirstTokenDetector, StreamState
from gorgo.core.stream.usage import Usage, UsageEventFilter, UsageReader, filled, read_usage
from gorgo.core.stream.whole import StreamEnd, end_of_stream, error_of_body, is_json, is_short

__all__ = [
    "FirstTokenDetector",
    "StreamEnd",
    "StreamState",
    "Usage",
    "UsageEventFilter",
    "UsageReader",
    "end_of_stream",
    "error_of_body",
    "filled",
    "is_json",
    "is_short",
    "read_usage",
]
