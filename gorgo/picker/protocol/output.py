"""What a call needs of its transport."""

from __future__ import annotations

from typing import Protocol


class CallOutput(Protocol):
    """The transport's end of one call."""

    def send_message(self, message: bytes) -> None:
        """Send one serialized `ProcessingResponse`. Never waits."""
        ...

    def end_call(self) -> None:
        """End the call with status OK."""
        ...
