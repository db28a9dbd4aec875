"""vLLM: `/health` for round trips, and everything else from `/metrics`, which it always serves.

It has no route with its load as JSON (`/load` counts requests only, and needs a flag). The size of its KV pool is in
the labels of `vllm:cache_config_info`; its usage is a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

from gorgo.core.continuation import Continuation
from gorgo.core.messages.request import EngineSample
from gorgo.core.numeric import is_nonnegative
from gorgo.engines.exposition import Series, read_series


class VLLM:
    """vLLM from 0.6 on; cached tokens need `--enable-prompt-tokens-details`.

    It does not report its batch limit (`--max-num-seqs`): the operator configures `max_running_requests`.

    Example
    -------
    >>> VLLM().read_metrics('vllm:num_requests_waiting{engine="0"} 3.0').queued_requests
    3.0
    """

    name: ClassVar[str] = "vllm"
    probe_path: ClassVar[str] = "/health"
    metrics_path: ClassVar[str | None] = "/metrics"
    loads_path: ClassVar[str | None] = None
    report_flags: ClassVar[Mapping[str, str]] = MappingProxyType({"cached_tokens": "--enable-prompt-tokens-details"})
    continuation: ClassVar[Continuation] = Continuation.FLAGS

    def read_metrics(self, text: str) -> EngineSample:
        series = read_series(text, _NAMES)
        capacity = _capacity(series.get("vllm:cache_config_info", ()))
        return EngineSample(
            running_requests=_total(_by_engine(series.get("vllm:num_requests_running", ()))),
            queued_requests=_total(_by_engine(series.get("vllm:num_requests_waiting", ()))),
            used_tokens=_used(_first(series, _USAGE), capacity),
            kv_capacity_tokens=_total(capacity),
            prompt_tokens_total=_total(_by_engine(series.get("vllm:prompt_tokens_total", ()))),
        )

    def read_capacity(self, loads: object) -> EngineSample:  # noqa: ARG002 - the protocol's signature
        return EngineSample()


#: Share of the KV pool in use, 0 to 1: the name since 0.10, then the one before.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:cache_config_info",
    "vllm:prompt_tokens_total",
    *_USAGE,
)


def _first(series: Mapping[str, list[Series]], names: Iterable[str]) -> list[Series]:
    return next((series[name] for name in names if name in series), [])


def _by_engine(series: Iterable[Series]) -> dict[str, float]:
    """Value of each data-parallel engine; versions without the label have one."""
    return {one.labels.get("engine", ""): one.value for one in series}


def _capacity(series: Iterable[Series]) -> dict[str, float]:
    """KV tokens of each engine, where the labels tell: as such, or in older versions as blocks and their size."""
    sizes = {one.labels.get("engine", ""): _pool_tokens(one.labels) for one in series}
    return {engine: size for engine, size in sizes.items() if size is not None}


def _pool_tokens(labels: Mapping[str, str]) -> float | None:
    whole, blocks, block = (labels.get(key, "") for key in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size"))
    if whole.isdecimal():
        tokens = float(whole)
    elif blocks.isdecimal() and block.isdecimal():
        tokens = float(blocks) * float(block)
    else:
        return None
    return tokens if is_nonnegative(tokens) else None


def _used(usage: Iterable[Series], capacity: Mapping[str, float]) -> float | None:
    """Unknown unless the pool of every engine is known."""
    shares = _by_engine(usage)
    if not shares or any(engine not in capacity for engine in shares):
        return None
    return sum(share * capacity[engine] for engine, share in shares.items())


def _total(values: Mapping[str, float]) -> float | None:
    return sum(values.values()) if values else None
