"""One response from its source to the client: buffered up to the first token, then passed on chunk by chunk.

Owns which of two kinds a response is. Leaves retries and records to the exchange. Bytes are never decoded, split or
joined, except that the buffer is sent in one piece.

Theory of operation: up to the first token (of an event stream) or the end (of any other body) nothing has been sent. A
response that fails before can be replaced by another replica's without the client's notice. A 4xx is not sent at all:
`refusal` has it for the Router's decision. Beyond `BUFFER_BYTES` the response is sent as it is. With `withhold` a short
stream is treated like a 4xx, and one that breaks off like any failure.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from gorgo.core.messages.request import Outcome
from gorgo.live.http.headers import is_encoded, is_event_stream
from gorgo.proxy.exchange.event_stream import relay_events
from gorgo.proxy.exchange.passage import Passage
from gorgo.proxy.exchange.relay_options import BUFFER_BYTES
from gorgo.proxy.exchange.whole_body import relay_body


def relay(passage: Passage) -> Coroutine[Any, Any, Outcome]:
    """Relay a response; return its outcome. A failure of the source is raised through it."""
    source = passage.source
    if source.status >= 300 or not is_event_stream(source.headers):
        return relay_body(passage, BUFFER_BYTES)
    if is_encoded(source.headers):
        # Unreadable, and its client waits for events: not buffered.
        return relay_body(passage, 0)
    return relay_events(passage)
