"""Engine profiles for tests: round numbers, so that times can be computed by hand."""

from __future__ import annotations

from gorgo.lab.sim.engine.profiles import EngineProfile


def round_profile(
    *,
    kv_tokens: int = 10_000,
    chunk_tokens: int = 100,
    max_running_requests: int = 8,
    context_tokens: int = 4_000,
    prefill_kappa_s: float = 0.0,
    decode_kv_s: float = 0.0,
    hit_share: float = 1.0,
    checkpoint_tokens: int = 1,
    cuda_graph_max_batch: int | None = None,
    decode_eager_s: float = 0.0,
    caches_output: bool = True,
) -> EngineProfile:
    """A prefill step takes 10 ms and 1 ms a token; a decode iteration 20 ms and 1 ms a request.

    Attention is free unless stated.
    """
    return EngineProfile(
        name="round",
        prefill_base_s=0.010,
        prefill_tokens_per_s=1000.0,
        prefill_kappa_s=prefill_kappa_s,
        chunk_tokens=chunk_tokens,
        decode_base_s=0.020,
        decode_per_request_s=0.001,
        decode_kv_s=decode_kv_s,
        kv_tokens=kv_tokens,
        max_running_requests=max_running_requests,
        context_tokens=context_tokens,
        hit_share=hit_share,
        checkpoint_tokens=checkpoint_tokens,
        cuda_graph_max_batch=cuda_graph_max_batch,
        decode_eager_s=decode_eager_s,
        caches_output=caches_output,
    )
