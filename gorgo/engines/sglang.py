"""SGLang: `/ping` for round trips, `/metrics` and `/v1/loads` for its load and its size.

Never `/health`, which by default starts a generation and sleeps a second before it answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gorgo.core.continuation import Continuation
from gorgo.core.messages.request import EngineSample
from gorgo.core.numeric import total
from gorgo.engines.exposition import read_gauges


class SGLang:
    """SGLang 0.5; `/metrics` needs `--enable-metrics`, `/v1/loads` needs nothing.

    Of the loads only the core is read: the other sections take the engine longer. A version without sections returns
    all.

    Example
    -------
    >>> SGLang().read_metrics("sglang:num_running_reqs 3.0").running_requests
    3.0
    """

    name: ClassVar[str] = "sglang"
    probe_path: ClassVar[str] = "/ping"
    metrics_path: ClassVar[str | None] = "/metrics"
    loads_path: ClassVar[str | None] = "/v1/loads?include=core"
    report_flags: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"cached_tokens": "--enable-cache-report", "metrics": "--enable-metrics"}
    )
    continuation: ClassVar[Continuation] = Continuation.FLAGS

    def read_metrics(self, text: str) -> EngineSample:
        gauges = read_gauges(text, _GAUGES)
        return EngineSample(**{field: gauges.get(name) for name, field in _GAUGES.items()})

    def read_capacity(self, loads: object) -> EngineSample:
        ranks = list(_ranks(loads))
        busy_us = _total(ranks, "total_prefill_busy_us")
        return EngineSample(
            **{field: _total(ranks, name) for name, field in _LOADS.items()},
            prefill_busy_s_total=None if busy_us is None else busy_us / 1e6,
        )


#: Name in `/metrics` to field.
_GAUGES = {
    "sglang:num_running_reqs": "running_requests",
    "sglang:num_queue_reqs": "queued_requests",
    "sglang:num_used_tokens": "used_tokens",
    "sglang:max_total_num_tokens": "kv_capacity_tokens",
    "sglang:prompt_tokens_total": "prompt_tokens_total",
}

#: Key of one data-parallel rank in `/v1/loads` to field.
_LOADS = {
    "num_running_reqs": "running_requests",
    "num_waiting_reqs": "queued_requests",
    "num_used_tokens": "used_tokens",
    "max_total_num_tokens": "kv_capacity_tokens",
    "max_running_requests": "max_running_requests",
    "total_prefill_uncached_tokens": "prefill_tokens_total",
}


def _ranks(loads: object) -> Iterable[Mapping[str, Any]]:
    rows = loads.get("loads") if isinstance(loads, dict) else None
    return (row for row in rows if isinstance(row, dict)) if isinstance(rows, list) else ()


def _total(ranks: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the sum over ranks; None unless every rank reports."""
    values = [row.get(name) for row in ranks]
    return total(values) if values else None
