"""Reports of a simulated engine: `/metrics`, `/v1/loads`, `/server_info` and others.

Owns the names, labels, units and shapes that SGLang and vLLM use; the statistics are the engine model's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Any

from gorgo.lab.sim.engine.engines import Engine
from gorgo.lab.sim.engine.request import EngineRequest

#: Version in the answers; the interface is that of this version.
SGLANG_VERSION = "0.5.23"

#: SGLang's buckets for the time to the first token, seconds.
_TTFT_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)

#: Throughput is taken over about so long, as in the real engine's log interval.
_RATE_WINDOW_S = 5.0


class EngineHistogram:
    """A prometheus histogram."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


class EngineStats:
    """The engine's own account of itself, for one model; `now` is when it began."""

    def __init__(self, engine: Engine[Any], *, model_name: str, now: float) -> None:
        self._engine = engine
        self._model_name = model_name
        self._ttft = EngineHistogram(_TTFT_BUCKETS)
        self._rate: deque[tuple[float, int]] = deque([(now, 0)])

    def first_token(self, request: EngineRequest, now: float) -> None:
        """A request got its first token."""
        self._ttft.observe(now - request.submitted_s)

    def throughput(self, now: float) -> float:
        """Tokens generated a second since a scrape about five seconds ago, or the latest older one."""
        total = self._engine.totals.generated_tokens
        while len(self._rate) > 1 and self._rate[1][0] <= now - _RATE_WINDOW_S:
            self._rate.popleft()
        since_s, before = self._rate[0]
        if now > self._rate[-1][0]:
            self._rate.append((now, total))
        return (total - before) / max(now - since_s, 1.0)

    def load(self, now: float) -> dict[str, Any]:
        """The core fields of one entry of `/v1/loads`."""
        engine = self._engine
        totals, profile = engine.totals, engine.profile
        return {
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.queued,
            "num_waiting_uncached_tokens": engine.waiting_tokens,
            "num_used_tokens": engine.used_tokens,
            "num_total_tokens": engine.used_tokens + engine.waiting_tokens,
            "num_active_tokens": engine.used_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": profile.kv_tokens,
            "max_running_requests": profile.max_running_requests,
            "token_usage": engine.used_tokens / profile.kv_tokens,
            "gen_throughput": self.throughput(now),
            "cache_hit_rate": _share(totals.cached_tokens, totals.prompt_tokens),
            "utilization": engine.running / profile.max_running_requests,
            "total_prefill_uncached_tokens": totals.prefill_tokens,
            "total_prefill_busy_us": round(totals.prefill_busy_s * 1e6),
        }

    def exposition(self, now: float) -> str:
        """Prometheus text."""
        lines: list[str] = []
        for name, kind, help_text, value in self._scalars(now):
            lines += family(name, kind, help_text)
            lines.append(f"{name}{self._labels()} {float(value)}")
        lines += self._cached()
        lines += self._histogram("sglang:time_to_first_token_seconds", "Time to the first token.", self._ttft)
        return "\n".join(lines) + "\n"

    def _scalars(self, now: float) -> Iterator[tuple[str, str, str, float]]:
        engine = self._engine
        cache, totals = engine.cache, engine.totals
        load = self.load(now)
        yield "sglang:num_running_reqs", "gauge", "Requests that run.", engine.running
        yield "sglang:num_queue_reqs", "gauge", "Requests that wait.", engine.queued
        yield "sglang:num_used_tokens", "gauge", "Pool tokens held by requests that run.", engine.used_tokens
        yield "sglang:token_usage", "gauge", "Share of the pool held by requests that run.", load["token_usage"]
        yield "sglang:full_token_usage", "gauge", "The same, of full attention layers.", load["token_usage"]
        yield "sglang:cache_hit_rate", "gauge", "Share of prompt tokens found cached.", load["cache_hit_rate"]
        yield "sglang:max_total_num_tokens", "gauge", "Size of the pool.", cache.capacity_tokens
        yield "sglang:max_running_requests", "gauge", "Most requests that run at a time.", load["max_running_requests"]
        yield "sglang:kv_available_tokens", "gauge", "Free pool tokens.", cache.free_tokens
        yield "sglang:kv_evictable_tokens", "gauge", "Cached tokens that nobody holds.", cache.evictable_tokens
        yield "sglang:kv_used_tokens", "gauge", "Pool tokens held by requests that run.", engine.used_tokens
        yield "sglang:gen_throughput", "gauge", "Generated tokens a second.", load["gen_throughput"]
        yield "sglang:utilization", "gauge", "Running requests over their most.", load["utilization"]
        yield "sglang:prompt_tokens_total", "counter", "Prompt tokens admitted.", totals.prompt_tokens
        yield "sglang:generation_tokens_total", "counter", "Tokens generated.", totals.generated_tokens
        yield "sglang:evicted_tokens_total", "counter", "Cached tokens evicted.", cache.evicted_tokens_total
        yield "sglang:num_requests_total", "counter", "Requests received.", totals.requests
        yield "sglang:num_aborted_requests_total", "counter", "Requests aborted.", totals.aborted

    def _cached(self) -> list[str]:
        name = "sglang:cached_tokens_total"
        value = float(self._engine.totals.cached_tokens)
        return [
            *family(name, "counter", "Prompt tokens found cached."),
            f"{name}{self._labels(cache_source='device')} {value}",
        ]

    def _histogram(self, name: str, help_text: str, histogram: EngineHistogram) -> list[str]:
        lines = family(name, "histogram", help_text)
        count = 0
        for bound, some in zip((*map(float, histogram.buckets), "+Inf"), histogram.counts, strict=True):
            count += some
            lines.append(f"{name}_bucket{self._labels(le=str(bound))} {float(count)}")
        lines.append(f"{name}_sum{self._labels()} {histogram.total}")
        lines.append(f"{name}_count{self._labels()} {float(count)}")
        return lines

    def _base_labels(self) -> dict[str, str]:
        return {"engine_type": "unified", "model_name": self._model_name}

    def _labels(self, **more: str) -> str:
        labels = {**self._base_labels(), **more}
        return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def family(name: str, kind: str, help_text: str) -> list[str]:
    """Return the lines that precede the samples of a metric."""
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


#: Version in the answers; names of metrics and routes are those of this version.
VLLM_VERSION = "0.32.0"


class VllmStats(EngineStats):
    """The account of an engine with vLLM's scheduler."""

    def exposition(self, now: float) -> str:  # noqa: ARG002 - vLLM reports no rate
        """Prometheus text."""
        lines: list[str] = []
        for name, kind, help_text, value in self._values():
            lines += family(name.removesuffix("_total") if kind == "counter" else name, kind, help_text)
            lines.append(f"{name}{self._labels()} {float(value)}")
        lines += self._configuration()
        lines += self._iterations()
        lines += self._histogram("vllm:time_to_first_token_seconds", "Time to the first token.", self._ttft)
        return "\n".join(lines) + "\n"

    def _values(self) -> Iterator[tuple[str, str, str, float]]:
        engine, totals = self._engine, self._engine.totals
        usage = engine.used_tokens / engine.cache.capacity_tokens
        finished = totals.requests - totals.aborted - engine.running - engine.queued
        yield "vllm:num_requests_running", "gauge", "Requests in the batch.", engine.running
        yield "vllm:num_requests_waiting", "gauge", "Requests that wait.", engine.queued
        yield "vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that requests hold, 0 to 1.", usage
        yield "vllm:prefix_cache_queries_total", "counter", "Prompt tokens admitted.", totals.prompt_tokens
        yield "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found cached.", totals.cached_tokens
        yield "vllm:num_preemptions_total", "counter", "Preemptions.", totals.preemptions
        yield "vllm:prompt_tokens_total", "counter", "Prompt tokens admitted.", totals.prompt_tokens
        yield "vllm:generation_tokens_total", "counter", "Tokens generated.", totals.generated_tokens
        yield "vllm:request_success_total", "counter", "Requests that ended by themselves.", finished

    def _configuration(self) -> list[str]:
        name, profile = "vllm:cache_config_info", self._engine.profile
        blocks = self._engine.cache.capacity_tokens // profile.block_tokens
        labels = self._labels(
            block_size=str(profile.block_tokens),
            enable_prefix_caching=str(profile.prefix_cache),
            num_gpu_blocks=str(blocks),
        )
        return [*family(name, "gauge", "Configuration of the KV cache."), f"{name}{labels} 1.0"]

    def _iterations(self) -> list[str]:
        """Count and sum of the tokens per step; the model has no sizes of steps that are over."""
        name, totals = "vllm:iteration_tokens_total", self._engine.totals
        tokens = float(totals.prefill_tokens + totals.generated_tokens)
        return [
            *family(name, "histogram", "Tokens per step."),
            f"{name}_bucket{self._labels(le='+Inf')} {float(totals.steps)}",
            f"{name}_sum{self._labels()} {tokens}",
            f"{name}_count{self._labels()} {float(totals.steps)}",
        ]

    def _base_labels(self) -> dict[str, str]:
        return {"engine": "0", "model_name": self._model_name}
