"""A replica's refusal that waits for the Router: a whole 4xx response, or a stream of nothing but such an error.

Owns the bytes until another replica answers the request or this response is sent to the client, unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gorgo.live.http.headers import Header
from gorgo.proxy.http.response_writer import ResponseWriter


@dataclass(frozen=True, slots=True)
class Refusal:
    """One complete response."""

    status: int
    #: For the client.
    headers: Sequence[Header]
    body: bytes

    async def send(self, writer: ResponseWriter) -> None:
        await writer.start(self.status, self.headers)
        await writer.finish(self.body)
