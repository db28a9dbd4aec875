"""What was observed of a fleet, between those who ask and the rules that judge: one record for each that was asked.

Owns which facts there are. Leaves their gathering to `gorgo.cli.diagnose`, and what they mean to `gorgo.cli.diagnosis`.
A fact that was not observed is `None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFacts:
    """What an engine answered to the same prompt twice, then for several tokens in a stream."""

    prompt_tokens: int | None = None
    #: By the router's tokenizer; `None` without one.
    counted_tokens: int | None = None
    #: Of the prompt as plain text, where the counts of the chat differ: the engine's, and the router's.
    plain_tokens: int | None = None
    counted_plain_tokens: int | None = None
    #: Of the first answer, and of the second one; `None` if not reported.
    cached_tokens_cold: int | None = None
    cached_tokens_warm: int | None = None
    answered: int = 0
    #: For each stream of several tokens: how much later its first token came than that of a stream of one, and the time
    #: from its first token to its last.
    streams: tuple[tuple[float, float], ...] = ()
    #: A stream came with a length, as a proxy sends what it has read whole.
    has_length: bool = False
    #: Why there is no answer.
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFacts:
    """Where the KV events of a replica come from, and what came while the prompt was computed."""

    #: `None` if regions.yaml has no `kv_events` for it.
    configured: str | None = None
    #: The engine says that it publishes; `None` is unknown.
    announced: bool | None = None
    #: Its own address, which may be of one interface.
    bound: str | None = None
    endpoint: str | None = None
    connect_error: str | None = None
    messages: int = 0
    block_tokens: int | None = None
    #: Of the first block of the prompt that all replicas got: its hash, its tokens, and the salt.
    first_hash: int | None = None
    first_tokens: bytes = b""
    salt: str | None = None
    #: The engine's flag that turns events on.
    flag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """One replica, as it answers itself."""

    name: str
    region: str
    url: str
    #: As configured, and as found by asking.
    engine: str
    found_engine: str | None = None
    version: str | None = None
    accelerator: str | None = None
    configured_models: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    context_tokens: Mapping[str, int] = field(default_factory=dict)
    #: Why it cannot be asked, with its status if it has answered.
    error: str | None = None
    status: int | None = None
    advice: str | None = None
    addresses: str | None = None
    #: Its clock minus that of this machine.
    clock_ahead_s: float | None = None
    certificate_left_s: float | None = None
    #: After this it closed an idle connection; `None` if it did not while it was watched.
    closes_idle_s: float | None = None
    metrics_status: int | None = None
    metrics_flag: str | None = None
    cached_flag: str | None = None
    #: Counters of the engine, which differ between two engines.
    prompt_tokens_total: float | None = None
    has_prefill_prior: bool = False
    requests_usage: bool = False
    probe: ProbeFacts | None = None
    kv: KvFacts = KvFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedReplica:
    """One replica, as the running router sees it."""

    name: str
    region: str
    eligible: bool
    #: Date since when it may be chosen.
    ready_since_s: float
    draining_for_s: float | None
    rtt_ms: float | None
    attempts: int
    restarts: int
    in_flight: int
    prefill_slowdown: float
    prefill_tokens_per_s: float
    decode_slowdown: float | None
    reports_unused: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """One finished request of the running router."""

    finished_s: float
    replica: str
    status: int
    input_tokens: int
    output_tokens: int | None
    cached_tokens: int | None
    ttft_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """Prompts of one client that part, and go on alike."""

    model: str | None
    client: str | None
    compared: int
    parted: int
    at_byte: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFacts:
    """The running router, by its status and its metrics."""

    up_s: float
    replicas: tuple[RoutedReplica, ...] = ()
    samples: tuple[SampleFacts, ...] = ()
    heads: tuple[HeadFacts, ...] = ()
    #: Edits of regions.yaml that are not in force.
    waiting: tuple[str, ...] = ()
    config_refused: bool = False
    requests: float = 0.0
    #: By code.
    rejects: Mapping[str, float] = field(default_factory=dict)
    client_rejects: Mapping[str, float] = field(default_factory=dict)
    log_lines_lost: float = 0.0
    open_files: float | None = None
    most_files: float | None = None
    #: By listener.
    certificates_left_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedFacts:
    """One line of the request log of the last hour."""

    received_s: float
    client: str | None
    model: str | None
    #: Equal for equal prompts.
    prompt: tuple[int, ...]
    status: int
    replica: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerFacts:
    """The tuner's own metrics: polls and samples since its start."""

    error: str | None = None
    polls: float = 0.0
    failed_polls: float = 0.0
    samples: float = 0.0
    lost_samples: float = 0.0
    unreachable: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that was observed; `None` is what could not be."""

    replicas: tuple[ReplicaFacts, ...] = ()
    #: Errors of regions.yaml.
    config_error: str | None = None
    #: Of `gorgo check`: replicas with one address, reports that no policy reads, scrapes that are too slow.
    same_urls: tuple[str, ...] = ()
    unused_reports: tuple[str, ...] = ()
    slow_scrapes: tuple[str, ...] = ()
    #: Whether the policy reads reports of caches.
    reads_events: bool = False
    #: Requests in flight that the router may have.
    max_in_flight: int | None = None
    router: RouterFacts | None = None
    log: tuple[LoggedFacts, ...] | None = None
    tuner: TunerFacts | None = None
