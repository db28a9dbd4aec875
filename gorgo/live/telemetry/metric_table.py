"""The table of what `/metrics` shows: every metric, and every label with its values and how many there can be.

Owns names, types, labels, help and buckets. The README's tables are tested against `METRICS` and `LABELS`, and what is
exposed against both. No label ever carries anything that a client sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from gorgo.core.latency.ttft import PARTS
from gorgo.core.messages.request import AttemptResult
from gorgo.core.metric_spec import LabelSpec, MetricSpec
from gorgo.core.prefix.index import Origin

_REPLICA = ("replica", "region")
#: Values of OpenTelemetry's "gen_ai.operation.name" by route; the routes that generate or embed nothing have none.
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/v1/embeddings": "embeddings",
}
#: Of OpenTelemetry's attributes, as its exporters for Prometheus spell them.
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
#: This router, to its clients; "gen_ai.provider.name" of the span of an attempt is the engine.
PROVIDER = "gorgo"

# The part of a router among its peers, and what its labels can be.


#: Why the store does not serve.
StoreFault = Literal["unreachable", "slow", "full", "refused", "not_ready", "error"]
#: What became of reports: of own ones, then of those of others.
ReportResult = Literal["written", "read", "missed", "malformed", "foreign", "other_format", "forged"]
#: Where a peer differs from this router.
Subject = Literal["policy", "weights", "freeze", "model", "key", "format"]

PEER_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("gorgo_peer_store_up", "gauge", (), "1 while the store takes and gives reports."),
    MetricSpec("gorgo_peers", "gauge", (), "Other routers whose load counts."),
    MetricSpec("gorgo_peers_differing", "gauge", ("subject",), "Other routers that differ."),
    MetricSpec("gorgo_peer_reports_total", "counter", ("result",), "Reports."),
    MetricSpec("gorgo_peer_bytes_total", "counter", ("way",), "Bytes of reports."),
    MetricSpec("gorgo_peer_write_seconds_total", "counter", (), "Time of writes."),
    MetricSpec("gorgo_peer_dropped_entries_total", "counter", (), "Entries beyond a report's bounds."),
    MetricSpec("gorgo_peer_evictions_total", "counter", ("origin",), "Evicted knowledge of caches, by origin."),
    MetricSpec("gorgo_peer_store_failures_total", "counter", ("reason",), "Failed commands to the store."),
)

PEER_LABELS: tuple[LabelSpec, ...] = (
    LabelSpec("reason", ("gorgo_peer_store_failures_total",), "of the failure", get_args(StoreFault)),
    LabelSpec("result", ("gorgo_peer_reports_total",), "of a report", get_args(ReportResult)),
    LabelSpec("way", (), "to or from the store", ("written", "read")),
    LabelSpec(
        "origin",
        (),
        "of marks and routes (this router's, others'), or of an engine's reported blocks",
        tuple(origin.name.lower() for origin in reversed(Origin)),
    ),
    LabelSpec("subject", (), "of the difference", get_args(Subject)),
)

#: Every metric of the proxy's own; the process metrics of prometheus_client come on top with the prefix
#: `gorgo_process_*`.
METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("gorgo_requests_total", "counter", ("route", "policy", "status"), "Requests answered, by status class."),
    MetricSpec("gorgo_attempts_total", "counter", (*_REPLICA, "result"), "Ended attempts."),
    MetricSpec("gorgo_retries_total", "counter", ("reason",), "Retries, by result of the attempt before."),
    MetricSpec("gorgo_rejects_total", "counter", ("reason",), "Requests rejected by the proxy."),
    MetricSpec(
        "gorgo_streams_continued_total",
        "counter",
        ("reason",),
        "Answers that broke off and went on elsewhere.",
    ),
    MetricSpec(
        "gorgo_streams_not_continued_total",
        "counter",
        ("reason",),
        "Answers that broke off and ended there.",
    ),
    MetricSpec(
        "gorgo_stream_seam_seconds", "histogram", (), "Last event before such a break to the first one after it."
    ),
    MetricSpec("gorgo_hedges_total", "counter", _REPLICA, "Hedges sent to the replica."),
    MetricSpec("gorgo_body_read_seconds", "histogram", (), "Request received to the end of its body."),
    MetricSpec("gorgo_queue_seconds", "histogram", (), "Queue time of queued requests."),
    MetricSpec("gorgo_admin_refused_total", "counter", (), "Wrong tokens on the admin listener."),
    MetricSpec("gorgo_client_aborts_total", "counter", (), "Requests whose client disconnected."),
    MetricSpec(
        "gorgo_client_requests_total",
        "counter",
        ("client", "model", "status"),
        "Requests answered, by client and model.",
    ),
    MetricSpec(
        "gorgo_client_tokens_total",
        "counter",
        ("client", "model", "kind"),
        "Tokens of answered requests; prompts are estimated unless reported, output is reported.",
    ),
    MetricSpec("gorgo_client_rejects_total", "counter", ("client", "reason"), "Requests answered with 429."),
    MetricSpec("gorgo_ttft_seconds", "histogram", _REPLICA, "Request received to first content, retries included."),
    MetricSpec(
        "gorgo_ttft_part_seconds",
        "histogram",
        ("region", "part"),
        "Parts of each TTFT; network, queue and prefill are estimates.",
    ),
    MetricSpec(
        "gorgo_ttft_component_seconds_total",
        "counter",
        (*_REPLICA, "part"),
        "The same per replica; the parts add up to gorgo_ttft_seconds.",
    ),
    MetricSpec("gorgo_prediction_error_seconds", "histogram", _REPLICA, "Absolute error of predicted TTFT."),
    MetricSpec(
        "gorgo_prediction_signed_error_seconds_total",
        "counter",
        (*_REPLICA, "direction"),
        "Sum of prediction errors, over or under.",
    ),
    MetricSpec("gorgo_e2e_seconds", "histogram", _REPLICA, "Request received to last byte, if completed."),
    MetricSpec("gorgo_decision_seconds", "histogram", (), "Parse, fingerprint, match, choice and reservation."),
    MetricSpec(
        "gorgo_prompt_tokens_total", "counter", _REPLICA, "Dispatched prompt tokens, estimated unless reported."
    ),
    MetricSpec(
        "gorgo_best_cached_tokens_total",
        "counter",
        _REPLICA,
        "Estimated cached prompt tokens on the best candidate.",
    ),
    MetricSpec(
        "gorgo_estimated_cached_tokens_total",
        "counter",
        _REPLICA,
        "Estimated cached prompt tokens on the chosen replica.",
    ),
    MetricSpec("gorgo_reported_cached_tokens_total", "counter", _REPLICA, "Reported cached prompt tokens."),
    MetricSpec(
        "gorgo_reported_prompt_tokens_total",
        "counter",
        _REPLICA,
        "Prompt tokens of answers with such a report.",
    ),
    MetricSpec(
        "gorgo_cached_tokens_signed_error_total",
        "counter",
        (*_REPLICA, "direction"),
        "Sum of estimation errors of these answers, over or under.",
    ),
    MetricSpec(
        "gorgo_exact_prompts_total",
        "counter",
        ("result",),
        "Prompts of models with a tokenizer: counted, skipped (estimated), different from the engine's report.",
    ),
    MetricSpec(
        "gorgo_cache_source_total",
        "counter",
        (*_REPLICA, "cache_source"),
        "Dispatches, by the source of their estimated cached tokens.",
    ),
    MetricSpec("gorgo_output_tokens_total", "counter", _REPLICA, "Reported output tokens."),
    MetricSpec("gorgo_probe_failures_total", "counter", _REPLICA, "Failed probes."),
    MetricSpec("gorgo_scrape_failures_total", "counter", _REPLICA, "Failed scrapes."),
    MetricSpec("gorgo_replica_restarts_total", "counter", _REPLICA, "Detected restarts of the engine."),
    MetricSpec("gorgo_rtt_seconds", "gauge", _REPLICA, "Smoothed RTT; absent while unknown or stale."),
    MetricSpec("gorgo_probe_age_seconds", "gauge", _REPLICA, "Age of the last good probe; absent if stale."),
    MetricSpec("gorgo_scrape_age_seconds", "gauge", _REPLICA, "Age of the last good scrape; absent if stale."),
    MetricSpec("gorgo_in_flight_requests", "gauge", _REPLICA, "Attempts in flight."),
    MetricSpec("gorgo_in_flight_tokens", "gauge", _REPLICA, "Prompt tokens in flight."),
    MetricSpec("gorgo_queued_prefill_tokens", "gauge", _REPLICA, "Prompt tokens before their first content."),
    MetricSpec("gorgo_queued_prefill_seconds", "gauge", _REPLICA, "Predicted prefill queue."),
    MetricSpec("gorgo_prefill_slowdown", "gauge", _REPLICA, "Learned prefill time over its prior."),
    MetricSpec(
        "gorgo_tpot_seconds", "gauge", _REPLICA, "Time per output token of its last streams; absent if unknown."
    ),
    MetricSpec("gorgo_itl_p95_seconds", "gauge", _REPLICA, "Mean p95 of inter-token times of its last streams."),
    MetricSpec("gorgo_decode_slowdown", "gauge", _REPLICA, "Time per output token over the median of others alike."),
    MetricSpec("gorgo_parallel_prefills", "gauge", _REPLICA, "Prefills that the engine does at once, as learned."),
    MetricSpec("gorgo_replica_eligible", "gauge", _REPLICA, "1 if the replica is eligible."),
    MetricSpec("gorgo_ready", "gauge", (), "1 while `GET /ready` is answered with 200."),
    MetricSpec(
        "gorgo_certificate_expiry_timestamp_seconds",
        "gauge",
        ("certificate",),
        "Unix time at which the certificate of a listener, or one of its chain, expires; absent without TLS.",
    ),
    MetricSpec("gorgo_region_unreachable", "gauge", ("region",), "1 while no replica of the region answers a probe."),
    MetricSpec("gorgo_fleet_source_up", "gauge", ("source",), "1 if the last request to the fleet source succeeded."),
    MetricSpec(
        "gorgo_fleet_source_age_seconds", "gauge", ("source",), "Time since it succeeded; absent before the first."
    ),
    MetricSpec("gorgo_fleet_source_replicas", "gauge", ("source",), "Replicas of the fleet that the source found."),
    MetricSpec("gorgo_fleet_source_problems", "gauge", ("source",), "Objects of the source that make no replica."),
    MetricSpec("gorgo_saturation_ratio", "gauge", ("resource",), "Share of what this process can do, by resource."),
    MetricSpec("gorgo_queue_requests", "gauge", (), "Queued requests."),
    MetricSpec(
        "gorgo_replicas_wanted",
        "gauge",
        ("region", "model"),
        "Replicas that serve the expected requests in time; absent without `scaling.ttft_ms`.",
    ),
    MetricSpec("gorgo_buffered_bytes", "gauge", (), "Buffered bytes, reserved ones included."),
    MetricSpec("gorgo_index_blocks", "gauge", _REPLICA, "Prefix index blocks."),
    MetricSpec("gorgo_cache_reported_blocks", "gauge", _REPLICA, "KV blocks that the engine reports as cached."),
    MetricSpec("gorgo_cache_report_age_seconds", "gauge", _REPLICA, "Age of its newest KV event or push."),
    MetricSpec("gorgo_cache_phantom_tokens_total", "counter", _REPLICA, "Tokens estimated cached and not found."),
    MetricSpec("gorgo_cache_missed_tokens_total", "counter", _REPLICA, "Cached tokens found and not estimated."),
    MetricSpec("gorgo_cache_reports_total", "counter", (*_REPLICA, "result"), "Reports of the cache, by result."),
    *PEER_METRICS,
    MetricSpec("gorgo_routes", "gauge", ("origin",), "Routes that the policy stores, of this router or of others."),
    MetricSpec("gorgo_route_unused_seconds", "gauge", ("origin",), "Time without use of the longest unused route."),
    MetricSpec("gorgo_route_evictions_total", "counter", ("origin",), "Routes that had no place."),
    MetricSpec("gorgo_weight", "gauge", ("policy", "weight"), "Weights in force."),
    MetricSpec("gorgo_weights_version", "gauge", (), "Version of the weights in force."),
    MetricSpec("gorgo_weights_frozen", "gauge", (), "1 while the weights are frozen."),
    MetricSpec(
        "gorgo_fallbacks_total", "counter", ("rule",), "Dispatches that another rule than the main one decided."
    ),
    MetricSpec(
        "gorgo_model_error_ratio",
        "histogram",
        ("target",),
        "Absolute error of a learned prediction over the measured time.",
    ),
    MetricSpec("gorgo_model_version", "gauge", (), "Round of the model in use; absent without one."),
    MetricSpec("gorgo_model_samples", "gauge", (), "Samples of its training."),
    MetricSpec("gorgo_model_age_seconds", "gauge", (), "Time since its training."),
    MetricSpec("gorgo_model_writes_total", "counter", ("result",), "Writes of the model file: written or failed."),
    MetricSpec("gorgo_training_seconds", "histogram", (), "Time of a round of training."),
    MetricSpec(
        "gorgo_training_rounds_total",
        "counter",
        ("result",),
        "Rounds: adopted, refused (the model in use is better), discarded (freeze, other policy), failed.",
    ),
    MetricSpec(
        "gorgo_training_outcomes_total",
        "counter",
        ("result",),
        "Outcomes of attempts: taken, or lost while a round took too long.",
    ),
    MetricSpec("gorgo_state_writes_total", "counter", ("result",), "Writes of the state file: written or failed."),
    MetricSpec(
        "gorgo_request_log_lines_total",
        "counter",
        ("result",),
        "Lines: written, dropped (too many), failed.",
    ),
    MetricSpec(
        "gorgo_outcome_log_lines_total",
        "counter",
        ("result",),
        "Outcomes: written, dropped (too many), failed.",
    ),
    MetricSpec("gorgo_trace_spans_total", "counter", ("result",), "Spans: exported, or failed at the collector."),
    MetricSpec(
        "gorgo_picker_log_entries_total",
        "counter",
        ("result",),
        "Entries of Envoy's access log: matched, late (exchange closed), unknown (another picker's), undecided (served "
        "without a picker's choice).",
    ),
    MetricSpec("gorgo_config_reloads_total", "counter", ("result",), "Reloads of a changed file: applied or refused."),
    MetricSpec("gorgo_config_reload_failed", "gauge", (), "1 while the file is refused."),
    MetricSpec("gorgo_config_last_reload_timestamp_seconds", "gauge", (), "Unix time of the last applied file."),
    MetricSpec("gorgo_build_info", "gauge", ("version",), "1; the version is the label."),
    # "gen_ai.server.*" of OpenTelemetry's semantic conventions for generative AI, with the buckets that they advise.
    MetricSpec(
        "gen_ai_server_request_duration_seconds",
        "histogram",
        (*_GEN_AI, "error_type"),
        "Request received to last byte.",
    ),
    MetricSpec("gen_ai_server_time_to_first_token_seconds", "histogram", _GEN_AI, "Request received to first content."),
    MetricSpec(
        "gen_ai_server_time_per_output_token_seconds",
        "histogram",
        _GEN_AI,
        "First content to last byte, by output token after the first; of completed streams with usage.",
    ),
)

#: Read from the Router, the feeds and the pushes at a scrape (`caches`).
CACHE_METRICS = frozenset(spec.name for spec in METRICS if spec.name.startswith("gorgo_cache_")) - {
    "gorgo_cache_source_total"  # counted at each dispatch
}

#: `code` of every error that the proxy itself answers a request for a replica with.
REJECT_CODES = (
    "buffers_full",
    "client_concurrency",
    "client_rate",
    "client_tokens",
    "deadline_unreachable",
    "field_not_allowed",
    "internal_error",
    "invalid_api_key",
    "invalid_header",
    "invalid_json",
    "invalid_request",
    "method_not_allowed",
    "model_not_found",
    "no_replica",
    "not_found",
    "poison_prompt",
    "previous_response_not_found",
    "queue_full",
    "region_not_allowed",
    "replica_not_found",
    "replicas_busy",
    "request_timeout",
    "request_too_large",
    "stopping",
    "too_many_in_flight",
    "total_timeout",
    "unsupported_media_type",
    "upload_evicted",
    "upstream_failed",
    "upstream_timeout",
)

#: Those of a 429.
BUSY_CODES = (
    "client_concurrency",
    "client_rate",
    "client_tokens",
    "deadline_unreachable",
    "queue_full",
    "replicas_busy",
    "too_many_in_flight",
)

#: What became of messages of KV events, then of pushes.
CACHE_REPORTS = (
    *("messages", "rejected", "gaps", "restarts", "replays", "failed_replays"),
    *("snapshots", "evictions", "stale", "lost", "limited", "silences"),
)

#: Why the answers broke off that went on at another replica.
BREAKS = ("disconnected", "protocol_error", "truncated", "error_event", "timeout", "stalled", "moved")
#: Why others ended there: what their request asks for or how they are sent, no memory to retain them, or no replica
#: that may have the rest (none is left, continuations or the client's tokens are used up, or the prompt is poison).
NOT_CONTINUED = ("request", "memory", "no_replica")

LABELS: tuple[LabelSpec, ...] = (
    LabelSpec("replica", (), "names in regions.yaml", bound="replicas"),
    LabelSpec("region", (), "regions of those replicas", bound="regions"),
    LabelSpec("route", (), "routes that carry a prompt", bound="10"),
    LabelSpec("policy", (), "policies that routed since the start", bound="policies"),
    LabelSpec("weight", (), "of the policy in force", bound="its weights"),
    LabelSpec("status", (), "class of the HTTP status; `499` if the client left", ("2xx", "4xx", "5xx", "499")),
    LabelSpec("result", ("gorgo_attempts_total",), "of an attempt", tuple(result.value for result in AttemptResult)),
    LabelSpec(
        "reason",
        ("gorgo_retries_total",),
        "result of the attempt before",
        tuple(result.value for result in AttemptResult if result.retryable),
    ),
    LabelSpec("reason", ("gorgo_streams_continued_total",), "why the answer broke off", BREAKS),
    LabelSpec("reason", ("gorgo_streams_not_continued_total",), "why it could not go on", NOT_CONTINUED),
    LabelSpec("reason", ("gorgo_rejects_total",), "`code` of the error", REJECT_CODES),
    LabelSpec("client", (), "names of keys; `other` beyond 64, `none` without keys", bound="66"),
    LabelSpec("model", (), "models that replicas list; `other` beyond 64 and for the rest, `none`", bound="66"),
    LabelSpec("kind", (), "of tokens", ("prompt", "output")),
    LabelSpec("reason", ("gorgo_client_rejects_total",), "`code` of the error", BUSY_CODES),
    LabelSpec("direction", (), "above or below the measurement or report", ("over", "under")),
    LabelSpec("part", (), "of a TTFT, in order", PARTS),
    LabelSpec("result", ("gorgo_exact_prompts_total",), "of counting", ("counted", "skipped", "different")),
    LabelSpec("result", ("gorgo_state_writes_total",), "of a write", ("written", "failed")),
    LabelSpec("result", ("gorgo_request_log_lines_total",), "of a line", ("written", "dropped", "failed")),
    LabelSpec("result", ("gorgo_outcome_log_lines_total",), "of a line", ("written", "dropped", "failed")),
    LabelSpec("resource", (), "of the process", ("requests", "buffers", "processor")),
    LabelSpec("cache_source", (), "of estimated cached tokens", ("history", "events", "push")),
    LabelSpec("certificate", (), "key of the listener's files", ("proxy.tls", "picker.tls")),
    LabelSpec("source", (), "names in `fleet_sources`", bound="16"),
    LabelSpec("rule", (), "word of the rule", bound="rules of the policies"),
    LabelSpec("target", (), "predicted time", ("ttft", "tpot", "e2e")),
    LabelSpec("result", ("gorgo_model_writes_total",), "of a write", ("written", "failed")),
    LabelSpec("result", ("gorgo_training_rounds_total",), "of a round", ("adopted", "refused", "discarded", "failed")),
    LabelSpec("result", ("gorgo_training_outcomes_total",), "of an outcome", ("taken", "lost")),
    LabelSpec("result", ("gorgo_trace_spans_total",), "of a span", ("exported", "failed")),
    LabelSpec(
        "result",
        ("gorgo_picker_log_entries_total",),
        "of an entry",
        ("matched", "late", "unknown", "undecided"),
    ),
    LabelSpec("result", ("gorgo_config_reloads_total",), "of a reload", ("applied", "refused")),
    LabelSpec("result", ("gorgo_cache_reports_total",), "of a KV event message, or of a push", CACHE_REPORTS),
    *PEER_LABELS,
    LabelSpec("version", (), "of the package", bound="1"),
    LabelSpec("gen_ai_operation_name", (), "by the route", ("chat", "text_completion", "embeddings")),
    LabelSpec("gen_ai_provider_name", (), "of this router", (PROVIDER,)),
    LabelSpec("gen_ai_request_model", (), "as `model`", bound="66"),
    LabelSpec("error_type", (), "status of an error that the client got; empty without one", bound="statuses"),
)

#: Seconds; from a cached short prompt near by to a full queue far away.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
_DECISION_BUCKETS = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
#: Seconds; a step of the engine to a queue that was not seen.
_ERROR_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
#: Seconds; few, because there are six parts in each region.
_PART_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
#: Seconds; a body that came with its head to the time that it may take.
_BODY_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1, 5, 15, 60)
#: Shares of the measured time.
_RATIO_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
_BUCKETS: Mapping[str, Sequence[float]] = {
    "gen_ai_server_request_duration_seconds": tuple(0.01 * 2**n for n in range(14)),
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
        *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
        *(0.3, 0.4, 0.5, 0.75, 1, 2.5),
    ),
    "gorgo_decision_seconds": _DECISION_BUCKETS,
    "gorgo_prediction_error_seconds": _ERROR_BUCKETS,
    "gorgo_ttft_part_seconds": _PART_BUCKETS,
    "gorgo_body_read_seconds": _BODY_BUCKETS,
    "gorgo_model_error_ratio": _RATIO_BUCKETS,
}


def buckets_of(name: str) -> Sequence[float]:
    """Upper bounds of a histogram, without the infinite one."""
    return _BUCKETS.get(name, _LATENCY_BUCKETS)
