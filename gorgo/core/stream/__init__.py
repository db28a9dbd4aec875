"""What the relay reads of a response as it passes, behind one import: pure, incremental, blind to how bytes are split.

`core.stream.first_token` finds the first token and `core.stream.usage` the token counts, on the framing of
`core.stream.sse`.
"""

from __future__ import annotations

from gorgo.core.stream.first_token import FirstTokenDetector, StreamState
from gorgo.core.stream.usage import Usage, UsageEventFilter, UsageReader, read_usage

__all__ = ["FirstTokenDetector", "StreamState", "Usage", "UsageEventFilter", "UsageReader", "read_usage"]
