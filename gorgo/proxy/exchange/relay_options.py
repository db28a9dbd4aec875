"""The options of one relay, and its bounds for doubtful answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gorgo.proxy.http.headers import Header
from gorgo.proxy.http.request_buffer import RequestBuffer

#: Buffer of one response: above any preamble of an engine, small enough for thousands of responses at once.
BUFFER_BYTES = 64 * 1024
#: Buffer of a withheld answer: forty tokens, so that no long answer waits for its end.
WITHHELD_BYTES = 8 * 1024
#: A longer stream is no short answer.
SHORT_BYTES = 4 * 1024


@dataclass(slots=True, eq=False)  # not frozen: one is made for each attempt, and that takes three times as long
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
        Called once, at the first token, before it is sent.
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
