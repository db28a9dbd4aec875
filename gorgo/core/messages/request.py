"""Inputs of the Router: a request, the outcome of an attempt, and what probes and scrapes report of replicas.

Times are seconds of one monotonic clock that the shell chooses; unknown is `None`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import Any

from gorgo.core.latency.ttft import Pacing, TcpWindows
from gorgo.core.numeric import MAX_AMOUNT
from gorgo.core.prompt.media import MAX_NAME, MediaParts
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
        Whether it may be sent again though a replica may have begun it, by a retry or a hedge: none stores anything of
        it.
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
    media:
        Its images, audio and video, whose tokens are in `prompt_tokens` and not in `text_bytes`.
    credential:
        Hash of the key that the client sent for the engine, which may refuse one and not others; `None` without one.
    most_output_tokens:
        Most tokens of its answer that it asks for, which an engine adds to its prompt; `None` without a limit.
    answers:
        Answers that it asks for, each of so many tokens: choices of each of its prompts. `None` if that is not known.
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
    media: tuple[MediaParts, ...] = ()
    most_output_tokens: int | None = None
    answers: int | None = 1

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
    #: Its value, which Python 3.11 reads by a chain of calls.
    word: str

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
        self.word = value
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
    `sent`: the client has the answer or its failure, and nothing is retried. `too_long`: a 4xx that says that the
    request is longer than the model's context there. `text`: the engine's own words of its failure, bounded and without
    any of a prompt, or why there was no connection. `short`: an answer of one token or none to
    a request that allows more, or a body that is no JSON; `None` for one to a request that allows no more, which says
    nothing of the replica. `continue_on` are the replicas that could go on with an answer that broke off, of which the
    client has `partial_tokens`; of the end of one, those before it, as the engine that went on has counted them.
    `answer_bytes`: what was relayed of an answer, where the shell sees it.
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
    continue_on: frozenset[str] = frozenset()
    partial_tokens: int = 0
    too_long: bool = False
    text: str | None = None
    answer_bytes: int | None = None

    def used_tokens(self, estimated_prompt: int, *, has_content: bool) -> tuple[int, int]:
        """Return prompt and output tokens of the client's account: as reported, else the estimate and none.

        An attempt without an answer or content costs nothing.
        """
        if not has_content and self.result is not COMPLETED:
            return 0, 0
        prompt = estimated_prompt if self.prompt_tokens is None else self.prompt_tokens
        return prompt, self.output_tokens or 0

    def bounded(self, request: RouteRequest, context_tokens: int | None) -> Outcome:
        """Return the outcome with no larger count than `request` can have used, whatever the engine reports.

        An answer has as many tokens as the request asks for, else as the model's context, else as the answer has bytes.
        `context_tokens` is the longest prompt with its answer of the model there; `None` is unknown.
        """
        prompt, cached, output = self.prompt_tokens, self.cached_tokens or 0, self.output_tokens or 0
        most_output = request.most_output_tokens
        if (
            prompt is not None
            and cached <= prompt <= request.body_bytes
            and request.pinned_replica is None
            and most_output is not None
            and output <= most_output
            and (context_tokens is None or output <= context_tokens)
        ):
            return self  # as nearly always
        return self._bounded(request, context_tokens)

    def _bounded(self, request: RouteRequest, context_tokens: int | None) -> Outcome:
        prompt, cached, output = self.prompt_tokens, self.cached_tokens, self.output_tokens
        most_prompt = _most_prompt_tokens(request, context_tokens)
        if prompt is not None and prompt > most_prompt:
            prompt = most_prompt
        if cached is not None and cached > (most_prompt if prompt is None else prompt):
            cached = most_prompt if prompt is None else prompt
        if output is not None:
            each = request.most_output_tokens
            if context_tokens is not None and (each is None or each > context_tokens):
                each = context_tokens
            answers = request.answers
            if each is None:
                each, answers = self.answer_bytes, 1
            if each is not None and answers is not None and output > each * answers:
                output = each * answers
        if (prompt, cached, output) == (self.prompt_tokens, self.cached_tokens, self.output_tokens):
            return self
        return replace(self, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


#: Tokens that a chat template and tools of the engine's own add to a prompt.
_TEMPLATE_TOKENS = 4096
#: Tokens of images and of other languages than those before, against their estimate.
_MOST_RATIO = 4


def _most_prompt_tokens(request: RouteRequest, context_tokens: int | None) -> int:
    """Return the most tokens that a prompt can have: each has a byte of the body, but for media and the template.

    A prompt that goes on with a response stored at the engine is as long as the model's context.
    """
    if request.pinned_replica is not None:
        return int(MAX_AMOUNT) if context_tokens is None else context_tokens
    return max(request.body_bytes, request.text_bytes or 0, _MOST_RATIO * request.prompt_tokens) + _TEMPLATE_TOKENS


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


# Finished requests as samples, in a bounded ring that a reader follows by sequence number.
#
# Owns the record and the ring behind `GET /admin/samples`. Every request that was dispatched leaves exactly one
# sample, when its last attempt ends. A reader detects a gap when `first_seq` is past its request, and a restart when
# the `boot_id` differs.


@record
class Sample:
    """One finished request as the proxy knows it; `None` is unknown. Milliseconds here, because this is the JSON edge.

    A client's own record of a request is `sim.records.ClientRecord`, which counts from the time in the trace.

    `status` is the HTTP status for the client: 499 when it disconnected, 502 when the stream broke after content.
    `policy`, `weights_version`, `estimated_cached_tokens`, `rtt_ms`, the prediction, `terms` (of the replica's cost, in
    the policy's unit) and the shadow's score are those of the last dispatch. `best_cached_tokens` is
    the estimate of the candidate with most of the prompt. `ttft_parts_ms` (`core.latency.ttft`) adds up to `ttft_ms`.
    `client` is the name of the client's key. `continued`: how often its answer went on at another replica.
    """

    seq: int
    request_id: str
    finished_s: float
    replica: str
    region: str
    policy: str
    weights_version: int
    input_tokens: int
    cached_tokens: int | None
    estimated_cached_tokens: int
    output_tokens: int | None
    rtt_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    e2e_s: float
    itl_ms_p95: float | None
    status: int
    retries: int
    hedged: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    shadow_policy: str | None = None
    shadow_rank: int | None = None
    shadow_cost: float | None = None
    shadow_predicted_ttft_ms: float | None = None
    best_cached_tokens: int | None = None
    ttft_parts_ms: Mapping[str, float] | None = None
    client: str | None = None
    model: str | None = None
    continued: int = 0


class SampleRing:
    """The newest samples, numbered from 1 without gaps.

    Parameters
    ----------
    boot_id:
        Names this run of the proxy; sequence numbers mean nothing across two of them.
    capacity:
        Samples stored; a reader that lags misses older ones.
    """

    def __init__(self, boot_id: str, capacity: int) -> None:
        self.boot_id = boot_id
        self.capacity = capacity
        self.last_seq = 0
        self._samples: deque[Sample] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    @property
    def first_seq(self) -> int:
        """The oldest retained number; the next one if the ring is empty."""
        return self.last_seq + 1 - len(self._samples)

    @property
    def next_seq(self) -> int:
        return self.last_seq + 1

    def newest(self, limit: int) -> list[Sample]:
        """Return the last samples, newest first."""
        return list(islice(reversed(self._samples), limit))

    def append(self, sample: Sample) -> None:
        assert sample.seq == self.next_seq, "samples are numbered without gaps"
        self.last_seq = sample.seq
        self._samples.append(sample)

    def for_request(self, request_id: str) -> Sample | None:
        """Return the newest retained sample of a request."""
        return next((sample for sample in reversed(self._samples) if sample.request_id == request_id), None)

    def after(self, seq: int, limit: int = 1000, *, ahead_s: float = 0.0) -> dict[str, Any]:
        """Return the JSON form: samples numbered above `seq`, oldest first, at most `limit`.

        `ahead_s` is added to their times, which are dates there.
        """
        start = max(0, seq + 1 - self.first_seq)
        chosen = islice(self._samples, start, start + max(0, limit))
        return {
            "boot_id": self.boot_id,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "samples": [asdict(sample) | {"finished_s": sample.finished_s + ahead_s} for sample in chosen],
        }
