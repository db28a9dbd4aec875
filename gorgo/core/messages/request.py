"""Inputs of the Router: a request, the outcome of an attempt, and what probes and scrapes report of replicas.

Times are seconds of one monotonic clock that the shell chooses; unknown is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gorgo.core.latency.tcp import Pacing, TcpWindows
from gorgo.core.prompt.tokens import MAX_NAME
from gorgo.core.record import record


@record
class RouteRequest:
    """A request without its text: sizes, fingerprint, options.

    Parameters
    ----------
    request_id:
        Unique among requests in flight.
    received_s:
        When the request reached the proxy; TTFT counts from here.
    prompt_tokens:
        Prompt length, exact or estimated (bytes over the learned bytes per token).
    blocks:
        The fingerprint: one 8-byte hash per *full* block, in order, each hash standing for the whole prefix up to and
        with its block.
    block_tokens:
        Tokens that one block stands for.
    prefix_hash:
        64-bit hash of the first 256 tokens, for affinity.
    model:
        Requested model; `None` means any.
    session_id:
        The client's own session key, where it sends one.
    pinned_replica:
        The only replica that can serve it (a response stored there); `None` for all others.
    streamed:
        Whether its first token is visible. An answer in one piece comes with the last token, and its time teaches
        nothing.
    body_bytes:
        Size of the body: one larger than a connection's window takes more than one round trip.
    slo_ttft_s:
        Its deadline for the first token, s from `received_s`, or its objective under a policy that takes objectives;
        `None`: the deadline of the configuration, or none.
    priority:
        The highest priority leaves the queue first.
    client:
        Name for quotas and for fairness in the queue; `None` is one client like any other.
    regions:
        Where it may be served; `None` is anywhere.
    replicas:
        Names of the only replicas that may serve it, as the gateway before the Router demands; `None` is any.
    idempotent:
        Whether it may be hedged: no replica stores anything of it.
    text_bytes:
        Size of the prompt's text, from which `prompt_tokens` was estimated; `None` if that is exact.
    route:
        Path of the request: a replica may lack one.
    slo_tpot_s:
        Its limit for the mean time per output token after the first, s; `None`: none.
    kv_hashes:
        Own hashes of the prompt's full blocks (`core.prefix.kv_source`), by tokens per block; empty while its exact
        tokens are unknown. Such a prompt is compared with the history of requests alone.
    boundaries:
        Prompt tokens up to the end of each message, ascending, exact or estimated.
    prefix_len:
        First tokens by which `sticky-least-loaded` knows a holder; `None`: its weight.
    credential:
        Hash of the key that the client sent for the engine, which may refuse one and not others; `None` without one.
    """

    request_id: str
    received_s: float
    prompt_tokens: int
    blocks: bytes
    block_tokens: float
    prefix_hash: int
    model: str | None = None
    session_id: str | None = None
    pinned_replica: str | None = None
    streamed: bool = True
    body_bytes: int = 0
    slo_ttft_s: float | None = None
    priority: int = 0
    client: str | None = None
    regions: frozenset[str] | None = None
    idempotent: bool = True
    text_bytes: int | None = None
    route: str = ""
    slo_tpot_s: float | None = None
    kv_hashes: Mapping[int, Sequence[int]] = field(default_factory=dict, hash=False)
    boundaries: Sequence[int] = field(default=(), hash=False)
    replicas: frozenset[str] | None = None
    prefix_len: int | None = None
    credential: int | None = None

    @property
    def recorded_model(self) -> str | None:
        """Return the model for records; `None` for a name longer than any model's, since clients choose it."""
        model = self.model
        return None if model is None or len(model) > MAX_NAME else model


@record
class OpenConnection:
    """The open connection to a replica that its next request takes.

    `windows` are the windows of its two ends. `sent_s` is the time of its last send; infinite where idling costs its
    sender nothing. `pacing` is its sender's pacing, `None` without.
    """

    windows: TcpWindows
    sent_s: float
    pacing: Pacing | None = None


class AttemptResult(Enum):
    """How one attempt ended."""

    #: The request may go to another replica.
    retryable: bool
    #: The request ends with it, even while another attempt is open.
    final: bool
    #: The replica failed the attempt.
    failed: bool

    COMPLETED = "completed"
    #: The client disconnected; the replica is not to blame.
    CLIENT_DISCONNECTED = "client_disconnected"
    #: The replica refused, broke, timed out or answered 5xx before any content: try elsewhere, blame the replica.
    FAILED_BEFORE_CONTENT = "failed_before_content"
    #: 429 or 503 before any content: try elsewhere, the replica is busy, not broken.
    BUSY = "busy"
    #: Broke after content was sent to the client: not retryable.
    FAILED_AFTER_CONTENT = "failed_after_content"
    #: Another 4xx, or 501: the request's fault, unless another replica answers it.
    UPSTREAM_4XX = "upstream_4xx"
    #: Cancelled, because another attempt of the same request answered first.
    SUPERSEDED = "superseded"
    #: The request exceeded its total timeout: not retried, and no replica is to blame.
    DEADLINE_EXCEEDED = "deadline_exceeded"

    def __init__(self, value: str) -> None:
        # Attributes, not properties: they are read for every attempt.
        self.retryable = value in ("failed_before_content", "busy")
        self.final = not self.retryable and value != "superseded"
        self.failed = value in ("failed_before_content", "failed_after_content")


#: How nearly every attempt ends. In Python 3.11 a member of an Enum takes eight times as long to read as a name.
COMPLETED = AttemptResult.COMPLETED

#: Statuses by which an engine refuses a key, a path, a model or a function: the client's fault or the replica's. A 501
#: is no failure: the engine was not built for such requests.
REFUSALS = frozenset({401, 403, 404, 405, 501})


@record
class Outcome:
    """The end of one attempt, with data of its response.

    `status` is the HTTP status sent by the replica, `None` if it sent none. Token counts come from the response's
    `usage`; `None` where it had none. `itl_s_p95` is the 95th percentile of gaps between content events.
    `retry_after_s` is the replica's own. `unsent`: the response is complete, and the client was sent none of it.
    `sent`: the client has the answer or its failure, and nothing is retried. `short`: an answer of one token or none to
    a request that allows more, or a body that is no JSON; `None` for one to a request that allows no more, which says
    nothing of the replica.
    """

    result: AttemptResult
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    itl_s_p95: float | None = None
    error: str | None = None
    retry_after_s: float | None = None
    unsent: bool = False
    sent: bool = False
    short: bool | None = False

    def used_tokens(self, estimated_prompt: int, *, has_content: bool) -> tuple[int, int]:
        """Return prompt and output tokens of the client's account: as reported, else the estimate and none.

        An attempt without an answer or content costs nothing.
        """
        if not has_content and self.result is not COMPLETED:
            return 0, 0
        prompt = estimated_prompt if self.prompt_tokens is None else self.prompt_tokens
        return prompt, self.output_tokens or 0


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's metrics; `None` where the engine does not report one.

    `used_tokens` are KV tokens of running requests, `kv_capacity_tokens` the size of the KV pool,
    `max_running_requests` the engine's limit on its running batch. `prefill_tokens_total` counts prompt tokens computed
    since the engine started, `prefill_busy_s_total` the time spent on them, `prompt_tokens_total` all prompt tokens,
    cached or not; all are sums over its ranks.
    """

    running_requests: float | None = None
    queued_requests: float | None = None
    used_tokens: float | None = None
    kv_capacity_tokens: float | None = None
    max_running_requests: float | None = None
    prefill_tokens_total: float | None = None
    prefill_busy_s_total: float | None = None
    prompt_tokens_total: float | None = None
