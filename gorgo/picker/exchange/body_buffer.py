"""The bytes of a request's body while a picker has them: their bound, and what they reserve.

Owns when a body is reserved: one that comes in parts from its first on, and one that has come whole, as an own Envoy
sends it, only where it has to wait. Most are decided within the step in which they came.
"""

from __future__ import annotations

from gorgo.live.http.errors import HttpError
from gorgo.live.http.request_buffer import BODY_COPIES, RequestBuffer, buffer_client
from gorgo.picker.protocol.heads import RequestHead
from gorgo.picker.protocol.messages import peer_of
from gorgo.picker.state import PickerState


class BodyBuffer:
    """The body of one request.

    Parameters
    ----------
    state:
        The running picker.
    head:
        Of the request.
    client:
        Name of its key, for whom the bytes count; `None`: they count for its address.
    """

    __slots__ = ("_client", "_head", "_reserved", "_size", "_state")

    def __init__(self, state: PickerState, head: RequestHead, client: str | None) -> None:
        self._state = state
        self._head = head
        self._client = client
        self._reserved: RequestBuffer | None = None
        self._size = 0

    def receive(self, count: int, *, end: bool) -> None:
        """Count bytes as they come, the last ones at the `end`. Raises `HttpError` (413, 503)."""
        self._size += count
        limit = min(self._state.live.limits.max_body_bytes, self._state.live.buffers.size_limit // BODY_COPIES)
        if self._size > limit:
            raise HttpError(413, "request_too_large", f"the body is larger than {limit} bytes")
        if not end or self._reserved is not None:
            self.reserve(count)

    def reserve(self, count: int = 0) -> None:
        """Reserve what has come, `count` bytes of it now. Raises `HttpError` (503)."""
        if self._reserved is None:
            client = self._client or buffer_client({"client": peer_of(self._head.varying)})
            self._reserved = RequestBuffer(self._state.live.buffers, client)
        self._reserved.received(count, self._size)

    def release(self) -> None:
        """Release everything. Idempotent."""
        if self._reserved is not None:
            self._reserved.release()
