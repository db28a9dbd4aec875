"""Old keys of regions.yaml: the new key of each, or the reason for its removal.

Owns the table. The error for an old key names the new one, so that an old file can be corrected from the error alone.
No old key is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.config.parsing.document import Document, Path, Problem
from gorgo.config.parsing.explain import keys_at

_EVERY_REGION = "set for all regions in limits"

#: Old key -> its new key, both dotted and with places in lists left out (`regions.limits.connect_timeout_s`), or a few
#: words that say why it is gone.
RENAMED: dict[str, str] = {
    "overload.hold": "overload.queue_enabled",
    "overload.max_held": "overload.queue_max_requests",
    "overload.open_work_ms": "overload.max_backlog_ms",
    "overload.open_in_flight": "overload.max_concurrency_per_replica",
    "overload.hopeless_wait_ms": "fixed at 300 ms",
    "overload.infeasible_max_wait_ms": "fixed at 300 ms",
    "overload.hedge_share": "overload.hedge_budget_ratio",
    "overload.hedge_late_ms": "fixed at 500 ms",
    "overload.hedge_delay_ms": "fixed at 500 ms",
    "overload.retry_share": "overload.retry_budget_ratio",
    "proxy.ready_replicas": "proxy.min_ready_replicas",
    "proxy.stale_after_s": "fixed at three of the longer interval",
    "proxy.rtt_ewma_alpha": "fixed at 0.3",
    "replicas.capacity.prefill_base_ms": "fixed at 12 ms",
    "replicas.capacity.prefill_kappa_s": "fixed at 1.6e-9 s",
    "clients.keys_env": "keys are read from clients.keys_file alone",
    "picker.transport": "HTTP/2 of the project alone carries gRPC",
    "simulation.jitter": "fixed at 0.02",
    "limits.body_gap_timeout_s": "fixed at 15 s",
    "limits.body_idle_timeout_s": "fixed at 15 s",
    "limits.max_header_lines": "fixed at 128",
    "limits.first_content_timeout_s": "limits.first_token_timeout_s",
    "limits.whole_answer_timeout_s": "limits.response_timeout_s",
    "limits.between_chunks_timeout_s": "limits.stream_idle_timeout_s",
    "limits.total_timeout_s": "limits.request_timeout_s",
    "regions.limits.first_content_timeout_s": "regions.limits.first_token_timeout_s",
    "regions.limits.connect_timeout_s": _EVERY_REGION,
    "regions.limits.response_timeout_s": _EVERY_REGION,
    "regions.limits.whole_answer_timeout_s": _EVERY_REGION,
    "regions.limits.stream_idle_timeout_s": _EVERY_REGION,
    "regions.limits.between_chunks_timeout_s": _EVERY_REGION,
    "regions.limits.request_timeout_s": _EVERY_REGION,
    "regions.limits.total_timeout_s": _EVERY_REGION,
}


def renamed_keys(document: Document) -> Iterator[Problem]:
    """Each key of the table that the file has, also inside a section that was renamed itself."""
    for path, line in document.lines.items():
        became = RENAMED.get(_dotted(path))
        if became is None or path[-1] in keys_at(path[:-1]):
            continue
        if " " in became:
            yield Problem(path, line, f"unknown key (removed: {became})", "the file without it")
        else:
            yield Problem(path, line, "unknown key (renamed)", became)


def _dotted(path: Path) -> str:
    return ".".join(part for part in path if isinstance(part, str))
