"""What the relay reads of a response as it passes, behind one import: pure, incremental, blind to how bytes are split.

The first content is found by `core.content`, token counts by `core.usage`, both over the framing of `core.events`.
"""

from __future__ import annotations

from gorgo.core.content import ContentScanner, Scan
from gorgo.core.usage import Usage, UsageEventFilter, UsageTail, read_usage

__all__ = ["ContentScanner", "Scan", "Usage", "UsageEventFilter", "UsageTail", "read_usage"]
