"""Request bodies, and building them before they are due."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from gorgo.lab.traces import TraceRequest, request_text

#: Bodies built ahead of time. The largest burst on one stamp of the traces in use is 28; 100 kB each is 3 MB.
LOOK_AHEAD = 32


def body_of(request: TraceRequest, model: str) -> bytes:
    """A streaming chat completion that gives exactly the trace's number of output tokens, where engines allow it."""
    body: dict[str, Any] = dict(request.body) if request.body is not None else {"messages": [_message(request)]}
    body.pop("max_completion_tokens", None)  # `max_tokens` below takes its place
    body |= {
        "model": model,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _message(request: TraceRequest) -> dict[str, str]:
    return {"role": "user", "content": request_text(request).decode("ascii")}


class BodiesAhead:
    """Requests with their bodies, in order; idle time is used to build the next few."""

    def __init__(self, requests: Sequence[TraceRequest], model: str, *, look_ahead: int = LOOK_AHEAD) -> None:
        self._left: Iterator[TraceRequest] = iter(requests)
        self._model = model
        self._look_ahead = look_ahead
        self._ready: deque[tuple[TraceRequest, bytes]] = deque()

    def build_one(self) -> bool:
        """Builds one more body; False when enough are ready or none is left."""
        request = next(self._left, None) if len(self._ready) < self._look_ahead else None
        if request is None:
            return False
        self._ready.append((request, body_of(request, self._model)))
        return True

    def next(self) -> tuple[TraceRequest, bytes] | None:
        """The next request and its body; None at the end."""
        if not self._ready:
            self.build_one()
        return self._ready.popleft() if self._ready else None
