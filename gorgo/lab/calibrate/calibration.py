"""The result of a calibration: a profile file for `simulation.profile`, and the priors of `capacity`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gorgo.lab.calibrate.fit import DecodeFit, FitError, PrefillFit
from gorgo.lab.calibrate.measure import PoolSize, SharedPrefix
from gorgo.lab.sim.engine.profiles import EngineProfile

#: Where neither the engine nor a measurement says how many tokens fit: no bound within a simulation.
UNKNOWN_KV_TOKENS = 10_000_000
UNKNOWN_RUNNING_REQUESTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of one engine with their errors.

    Parameters
    ----------
    prefill, decode:
        Fits.
    pool, shared:
        None without reports of cached tokens.
    max_running_requests, context_tokens:
        As the engine reports them; None without a report.
    source:
        What was measured, when, with how many requests.
    refused:
        Reasons of failed requests, the first few.
    scheduler:
        Whose scheduler forms the steps of a simulated engine.
    slot_cache:
        As in `EngineProfile`.
    """

    prefill: PrefillFit
    decode: DecodeFit
    pool: PoolSize | None
    shared: SharedPrefix | None
    max_running_requests: int | None
    context_tokens: int | None
    source: str
    refused: tuple[str, ...] = field(default=())
    scheduler: Literal["sglang", "vllm"] = "sglang"
    slot_cache: bool = False

    def profile(self, name: str) -> EngineProfile:
        """Return the profile of a simulated engine."""
        decode, shared = self.decode, self.shared
        is_vllm, running = self.scheduler == "vllm", self.max_running_requests or UNKNOWN_RUNNING_REQUESTS
        is_cached = shared is None or shared.is_cached
        found_share = shared.found_share if shared and is_cached else 1.0
        step_tokens = shared.step_tokens if shared and is_cached else 1
        return EngineProfile(
            name=name,
            scheduler=self.scheduler,
            prefill_base_s=_rounded(self.prefill.base_s),
            prefill_tokens_per_s=_rounded(self.prefill.tokens_per_s),
            prefill_kappa_s=_rounded(self.prefill.kappa_s),
            # vLLM refuses a budget of fewer tokens than requests.
            chunk_tokens=max(self.prefill.chunk_tokens, running) if is_vllm else self.prefill.chunk_tokens,
            decode_base_s=_rounded(decode.base_s),
            decode_moe_s=_rounded(decode.moe_s),
            experts_per_token=decode.experts_per_token,
            experts=decode.experts,
            decode_per_request_s=_rounded(decode.per_request_s),
            decode_kv_s=_rounded(decode.kv_s),
            cuda_graph_max_batch=decode.graph_max_batch,
            decode_eager_s=_rounded(decode.eager_s),
            kv_tokens=self.pool.tokens if self.pool else UNKNOWN_KV_TOKENS,
            max_running_requests=running,
            context_tokens=self.context_tokens or 32_768,
            hit_share=found_share,
            # vLLM finds whole blocks.
            checkpoint_tokens=1 if is_vllm else step_tokens,
            block_tokens=step_tokens if self.slot_cache or (is_vllm and step_tokens > 1) else 16,
            prefix_cache=is_cached,
            slot_cache=self.slot_cache,
            source=self.source,
        )

    def capacity(self) -> dict[str, float]:
        """Return the keys of `capacity` of a replica in regions.yaml; those that are not known are left out."""
        found: dict[str, float] = {}
        if self.pool is not None and not self.pool.is_lower_bound:
            found["kv_tokens"] = self.pool.tokens
        if self.max_running_requests is not None:
            found["max_running_requests"] = self.max_running_requests
        found["prefill_tokens_per_s"] = _rounded(self.prefill.tokens_per_s)
        return found

    def errors(self) -> dict[str, Any]:
        """Return the errors of the fits, and what was not measured."""
        return {
            "request_overhead_s": _rounded(self.prefill.overhead_s),
            "prefill": _error(self.prefill.error),
            "decode": _error(self.decode.error),
            "kv_tokens": _pool(self.pool, self.shared),
            "shared_prefix": _shared(self.shared),
        }

    def document(self, name: str) -> Mapping[str, Any]:
        """Return the profile file as plain data."""
        return {"profile": asdict(self.profile(name)), "capacity": self.capacity(), "errors": self.errors()}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _error(error: FitError) -> dict[str, float]:
    return {"median": round(error.median, 4), "worst": round(error.worst, 4), "points": error.points}


def _shared(shared: SharedPrefix | None) -> str:
    if shared is None:
        return "not measured: cached tokens are not reported"
    return "measured" if shared.is_cached else "nothing is found of any: no prefix cache"


def _pool(pool: PoolSize | None, shared: SharedPrefix | None) -> str:
    if pool is None and shared is not None and not shared.is_cached:
        return "not measured: there is no prefix cache"
    if pool is None:
        return "not measured: cached tokens are not reported"
    return "at least this: nothing was evicted in the time" if pool.is_lower_bound else "measured or reported"
