"""The options of one relay, its bounds for doubtful answers, and the proxy's own headers of a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from gorgo.core.messages.actions import Dispatch
from gorgo.core.record import mutable_record
from gorgo.live.http.headers import Header
from gorgo.live.http.request_buffer import RequestBuffer

#: Buffer of one response: above any preamble of an engine, small enough for thousands of responses at once.
BUFFER_BYTES = 64 * 1024
#: Buffer of a withheld answer: forty tokens, so that no long answer waits for its end.
WITHHELD_BYTES = 8 * 1024
#: Headers made once: of a large fleet under a new version of the weights each minute, those of the last ones.
MAX_FIXED = 1024


@mutable_record
class RelayOptions:
    """Options of one relay.

    Parameters
    ----------
    route:
        Path of the request, on which the form of a token depends.
    own_headers:
        Sent after the replica's.
    chunk_limit_s:
        Longest silence between two chunks after the first token, comments aside, and longest stall of the client.
    strip_usage:
        Remove the usage event: the proxy requested it, not the client.
    passed_headers:
        Allowed by an operator beside those that always pass.
    on_content:
        Called once, at the first token: when it is sent, or has to wait for the client.
    on_commit:
        Called before anything is sent: from then on no other attempt may respond.
    on_head:
        Called with the first bytes that are sent.
    """

    route: str
    own_headers: Sequence[Header]
    chunk_limit_s: float
    strip_usage: bool
    on_content: Callable[[], None]
    on_commit: Callable[[], None]
    #: Of the request. Without memory for more of an answer, what is buffered is sent as it is.
    buffer: RequestBuffer
    on_head: Callable[[bytes], None] | None = None
    #: Withhold the answer up to `WITHHELD_BYTES`, and whether one token is less than the request asks for.
    withhold: bool = False
    may_be_short: bool = False
    passed_headers: frozenset[bytes] = frozenset()


def own_headers(request_id: str, dispatch: Dispatch, *, estimates: bool) -> list[Header]:
    """Return the proxy's headers. `estimates` tell a client which prompts others have sent."""
    decision = dispatch.decision
    fixed = _fixed_headers(dispatch.replica, dispatch.region, decision.policy, decision.weights_version)
    headers = [(b"x-request-id", request_id.encode()), *fixed]
    if not estimates:
        return headers
    headers.append((b"x-gorgo-estimated-cached-tokens", b"%d" % decision.estimated_cached_tokens))
    if decision.predicted_ttft_s is not None:
        headers.append((b"x-gorgo-predicted-ttft-ms", b"%.1f" % (decision.predicted_ttft_s * 1e3)))
    return headers


@lru_cache(MAX_FIXED)
def _fixed_headers(replica: str, region: str, policy: str, weights_version: int) -> tuple[Header, ...]:
    """Return the headers that are the same for all responses of a replica under one policy and its weights."""
    return (
        (b"x-gorgo-replica", replica.encode()),
        (b"x-gorgo-region", region.encode()),
        (b"x-gorgo-policy", policy.encode()),
        (b"x-gorgo-weights-version", b"%d" % weights_version),
    )
