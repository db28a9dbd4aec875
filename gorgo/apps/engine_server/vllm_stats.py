"""Reports of a simulated vLLM: its names in `/metrics`.

Owns the names, labels and units of vLLM; the statistics are the engine model's.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.apps.engine_server.stats import EngineStats, family

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
