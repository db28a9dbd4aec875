"""llama.cpp's server: `/health` for round trips, `/metrics` and `/slots` for its load and its size.

Its slots share their KV cells or have a part each, which no route reports; host memory also caches whole prompts. It
therefore never reports `kv_capacity_tokens`: the operator configures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gorgo.core.continuation import Continuation
from gorgo.core.messages.request import EngineSample
from gorgo.core.numeric import total
from gorgo.engines.exposition import read_gauges


class LlamaCpp:
    """llama.cpp's server; `/metrics` needs `--metrics`, `/slots` is on by default, cached tokens are always reported.

    Example
    -------
    >>> LlamaCpp().read_metrics("llamacpp:requests_processing 2").running_requests
    2.0
    """

    name: ClassVar[str] = "llamacpp"
    probe_path: ClassVar[str] = "/health"
    metrics_path: ClassVar[str | None] = "/metrics"
    loads_path: ClassVar[str | None] = "/slots"
    report_flags: ClassVar[Mapping[str, str]] = MappingProxyType({"metrics": "--metrics"})
    continuation: ClassVar[Continuation] = Continuation.LAST_MESSAGE

    def read_metrics(self, text: str) -> EngineSample:
        gauges = read_gauges(text, _GAUGES)
        return EngineSample(**{field: gauges.get(name) for name, field in _GAUGES.items()})

    def read_capacity(self, loads: object) -> EngineSample:
        """Of `/slots`: a list with one row per place in the batch."""
        slots = [slot for slot in loads if isinstance(slot, dict)] if isinstance(loads, list) else []
        if not slots:
            return EngineSample()
        busy = [slot for slot in slots if slot.get("is_processing") is True]
        return EngineSample(
            running_requests=float(len(busy)), used_tokens=_tokens(busy), max_running_requests=float(len(slots))
        )


#: Name in `/metrics` to field. `kv_cache_tokens` was taken out in 2025.
_GAUGES = {
    "llamacpp:requests_processing": "running_requests",
    "llamacpp:requests_deferred": "queued_requests",
    "llamacpp:kv_cache_tokens": "used_tokens",
    "llamacpp:prompt_tokens_total": "prompt_tokens_total",
}


def _tokens(busy: list[dict[str, Any]]) -> float | None:
    """Return the tokens of busy slots (`n_prompt_tokens` counts output too); None unless every slot reports them."""
    return total([slot.get("n_prompt_tokens") for slot in busy])
