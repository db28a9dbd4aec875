"""Cost of one engine step on a given GPU and model: a small table of constants, each with its source.

Owns the formulas, the table, and the estimates from data sheets for engines that nobody has measured; and the check of
profile files of `gorgo calibrate`, a value of `simulation.profile` in regions.yaml. Leaves the contents of a step to
the engine models. All constants are in seconds and tokens.

    prefill step      base + n / rate + kappa * sum(new * (context + new / 2))
    decode iteration  base + moe * (1 - (1 - k/E)^B) + per_request * B + kv * context_tokens (+ eager above a graph)
    both in one step  the longer of a prefill step over n + B tokens and a read of all weights (decode base and moe),
                      + per_request * B + kv * context_tokens

In a mixture of experts B tokens touch a share 1 - (1 - k/E)^B of the experts (k of E are chosen per token), and a
decode step is bound by the weights that it reads, so its cost rises steeply for small batches and then flattens: a form
linear in B is off by 39-59 %.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from gorgo.core.numeric import MAX_AMOUNT, is_number
from gorgo.errors import BadRequest, ConfigError, UnknownProfile, closest

# Constants of the engine that fits the GORGO paper's table 2, as `python -m experiments fit` found them.
#
# The other constants of that profile are the estimates for the same GPUs and model.


#: What the authors set: their largest CUDA graph. Answers of a replay are not those of its trace, so none is hit.
FLAGS: Mapping[str, Any] = {"cuda_graph_max_batch": 20, "caches_output": False}
#: What the search found.
FITTED: Mapping[str, Any] = {
    "prefill_tokens_per_s": 21_000.0,
    "prefill_kappa_s": 2.8e-9,
    "decode_base_s": 0.0084,
    "decode_eager_s": 0.028,
    "hit_share": 0.35,
    "decode_moe_s": 0.0165,
    "prefill_base_s": 0.008044,
}
SOURCE = (
    "Prefill rate, base and attention, decode base, experts, the step without a CUDA graph and the share of a prefix "
    "that is found: fitted to whole windows of table 2 of the GORGO paper (April 5 and 7; April 6 is held out) by "
    "`python -m experiments fit`. They make up for each other in part: a faster prefill with fewer hits fits nearly as "
    "well. Largest graph: the authors' flag. KV pool: measured on the paper's fleet. The rest is estimated as for the "
    "profile of that name."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Costs and limits of one engine: a GPU (or several, tensor parallel) with a model on it.

    Parameters
    ----------
    prefill_base_s, prefill_tokens_per_s, prefill_kappa_s:
        Constant, linear and quadratic (attention) part of a prefill step.
    scheduler:
        Whose scheduler forms the steps.
    chunk_tokens:
        Most prompt tokens computed in one prefill step (SGLang's `chunked_prefill_size`), or tokens of any kind in one
        step (vLLM's `max_num_batched_tokens`).
    block_tokens:
        Size of a KV block of vLLM; SGLang's pool is counted in tokens.
    prefix_cache:
        Whether prompts are cached for later requests.
    slot_cache:
        With vLLM's scheduler: prompts are cached as llama.cpp does (`SlotPool`), in slots and host memory, together
        `kv_tokens`.
    decode_base_s, decode_moe_s, decode_per_request_s, decode_kv_s:
        Constant part, all routed experts read once, per running request, and per token of context read.
    experts_per_token, experts:
        k and E of the formula above. A dense model has `decode_moe_s=0`.
    cuda_graph_max_batch, decode_eager_s:
        A decode iteration of more requests has no CUDA graph and takes so much longer (SGLang's
        `cuda_graph_max_bs`). None: a graph for every batch.
    kv_tokens:
        Size of the KV pool, shared by running requests and the prefix cache.
    caches_output:
        Whether generated tokens can be hit after their request has ended.
    max_running_requests:
        Requests that are prefilled or decoded at the same time; the others wait.
    context_tokens:
        Longest prompt and output together; more is refused.
    hit_share:
        Of each cached prefix the engine finds only this share, from its start.
    checkpoint_tokens:
        A prefix is found only in multiples of so many tokens.
    ranks:
        Engines of this kind behind one URL (data-parallel ranks), each with its own cache; requests go to them in turn.
        Only `gorgo simulate` has them.
    source:
        Where the constants come from.

    Example
    -------
    >>> h100 = find_profile("1xH100-Llama-3.1-8B")
    >>> round(h100.prefill_s(8192, 8192 * 8192 / 2) * 1e3, 1)  # the operator tables say 205.7 ms
    203.9
    """

    name: str
    scheduler: Literal["sglang", "vllm"] = "sglang"
    prefill_base_s: float
    prefill_tokens_per_s: float
    prefill_kappa_s: float
    chunk_tokens: int
    decode_base_s: float
    decode_moe_s: float = 0.0
    experts_per_token: int = 1
    experts: int = 1
    decode_per_request_s: float
    decode_kv_s: float
    cuda_graph_max_batch: int | None = None
    decode_eager_s: float = 0.0
    kv_tokens: int
    caches_output: bool = True
    max_running_requests: int = 64
    context_tokens: int = 32_768
    hit_share: float = 1.0
    checkpoint_tokens: int = 1
    block_tokens: int = 16
    prefix_cache: bool = True
    slot_cache: bool = False
    ranks: int = 1
    source: str = ""

    @property
    def accelerator(self) -> str:
        """Return number and name of the GPUs, with which the profile's name begins: `2xL40S`."""
        return self.name.partition("-")[0]

    @property
    def is_estimate(self) -> bool:
        """Whether the constants come from data sheets, neither measured nor fitted."""
        return self.source.startswith("Estimate")

    def check_size(self, prompt_tokens: int, output_tokens: int) -> None:
        """Raise `BadRequest` for a request that could never run on such an engine."""
        total = prompt_tokens + output_tokens
        if prompt_tokens >= self.context_tokens:
            raise BadRequest(
                f"The input ({prompt_tokens} tokens) is longer than the model's context length "
                f"({self.context_tokens} tokens)."
            )
        if total > self.context_tokens:
            raise BadRequest(
                f"{prompt_tokens} input tokens and {output_tokens} output tokens are {total} together, more than the "
                f"model's context length of {self.context_tokens} tokens."
            )
        if total > self.kv_tokens:
            raise BadRequest(f"{total} tokens do not fit the KV pool of {self.kv_tokens} tokens.")

    def prefill_s(self, new_tokens: int, attended: float) -> float:
        """A prefill step over `new_tokens`; `attended` is the sum of new * (context + new / 2) over its requests."""
        return self.prefill_base_s + new_tokens / self.prefill_tokens_per_s + self.prefill_kappa_s * attended

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` requests that hold `context_tokens` together."""
        touched = 1.0 - (1.0 - self.experts_per_token / self.experts) ** batch
        eager = self.cuda_graph_max_batch is not None and batch > self.cuda_graph_max_batch
        return (
            self.decode_base_s
            + (self.decode_eager_s if eager else 0.0)
            + self.decode_moe_s * touched
            + self.decode_per_request_s * batch
            + self.decode_kv_s * context_tokens
        )

    def mixed_s(self, new_tokens: int, attended: float, batch: int, context_tokens: int) -> float:
        """A step with `new_tokens` of prompts and one token for each of `batch` requests; the others as above."""
        return (
            max(self.prefill_s(new_tokens + batch, attended), self.decode_base_s + self.decode_moe_s)
            + self.decode_per_request_s * batch
            + self.decode_kv_s * context_tokens
        )


# Constants of engines that no table covers: estimates from data sheets of the GPU and the size of the model.
#
# Theory of operation. The operator tables of one model, Llama-3.1-8B in BF16, give the share of its data sheet that a
# GPU reaches, on H100 and on L40S. Other GPUs are taken to reach the share of the kin that has a table:
#
#     prefill rate       linear_share * FLOPS / (2 * parameters of the layers)
#     prefill kappa      4 * layers * query width / (attention_share * FLOPS)
#     decode base        bytes of the weights / (0.8 * bandwidth)
#     decode per token   bytes of KV / (0.8 * bandwidth)
#     KV pool            (0.9 * memory - weights - 1 GiB of activations) / bytes of KV
#
# A mixture of experts computes with k of its E routed experts and reads all of them once: a decode step's base has the
# other weights alone, `decode_moe_s` the routed ones. Prefills of 8-bit weights are taken to be as fast as of 16-bit
# ones.
#
# Several GPUs with tensor parallelism add up FLOPS, bandwidth and memory, less `PARALLEL_SHARE` of the first two,
# which pays for the all-reduce. The constant parts of steps (launch, sampling) are those of the kin.


_GIB = 2**30
#: Of the data sheet's bandwidth: the tables reach 0.73 to 0.95 on H100 and 0.83 on L40S.
BANDWIDTH_SHARE = 0.8
#: Of FLOPS and bandwidth that tensor parallelism over NVLink leaves. Assumed.
PARALLEL_SHARE = 0.85
_CACHE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Kin:
    """Shares and constant parts that the operator tables give for a generation of GPUs.

    `linear_share` and `attention_share` are of the dense FLOPS of the data sheet.
    """

    linear_share: float
    attention_share: float
    prefill_base_s: float
    decode_per_request_s: float


#: From 1xH100-Llama-3.1-8B: 48,600 tokens/s of 14.0 GFLOP are 0.69 of 989 TFLOPS, kappa 0.994 ns of 524 kFLOP 0.53.
HOPPER = Kin(0.69, 0.53, prefill_base_s=0.0019, decode_per_request_s=8e-6)
#: From 1xL40S-Llama-3.1-8B: 13,470 tokens/s of 14.0 GFLOP are 0.52 of 362 TFLOPS, kappa 3.76 ns of 524 kFLOP 0.385.
ADA = Kin(0.52, 0.385, prefill_base_s=0.005, decode_per_request_s=4.4e-5)
#: No table; linear layers as on Ada. FlashAttention 2 needs Ampere: half the share of attention is assumed.
VOLTA = Kin(0.52, 0.19, prefill_base_s=0.005, decode_per_request_s=4.4e-5)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet: dense 16-bit tensor FLOPS, bytes a second, and memory."""

    tflops: float
    bandwidth_gb_s: float
    memory_gib: float
    kin: Kin
    chunk_tokens: int


#: NVIDIA's data sheets (dense figures). SGLang's chunk is 2,048 tokens below 35 GB, 4,096 below 60 and 8,192 above.
GPUS = {
    "V100": Gpu(125.0, 900.0, 32.0, VOLTA, 2048),
    "A30": Gpu(165.0, 933.0, 24.0, ADA, 2048),
    "L20": Gpu(119.5, 864.0, 45.0, ADA, 4096),
    "L40S": Gpu(362.0, 864.0, 45.0, ADA, 4096),
    "H100": Gpu(989.0, 3350.0, 80.0, HOPPER, 8192),
    "H200": Gpu(989.0, 4800.0, 140.4, HOPPER, 8192),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A transformer: all parameters and those of its layers, in billions, its attention, and its routed experts.

    `routed` counts the parameters of all routed experts, of which a token uses `experts_per_token` of `experts`.
    """

    parameters: float
    layer_parameters: float
    layers: int
    query_width: int
    kv_width: int
    routed: float = 0.0
    experts_per_token: int = 1
    experts: int = 1
    parameter_bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.parameters * 1e9 * self.parameter_bytes

    @property
    def routed_bytes(self) -> float:
        return self.routed * 1e9 * self.parameter_bytes

    @property
    def active_parameters(self) -> float:
        """Return the parameters of the layers that a token computes with, in billions."""
        return self.layer_parameters - self.routed * (1 - self.experts_per_token / self.experts)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of KV of one token: a key and a value per layer, in 16 bits."""
        return 2 * self.layers * self.kv_width * _CACHE_BYTES


#: From the models' configurations: heads of 128 (64 in the 1B model), 8 of them with KV (all in DeepSeek's).
MODELS = {
    "Llama-3.2-1B": ModelSize(1.24, 0.97, 16, 2048, 512),
    "Llama-3.2-3B": ModelSize(3.21, 2.82, 28, 3072, 1024),
    "Llama-3.1-8B": ModelSize(8.03, 6.98, 32, 4096, 1024),
    "Llama-3.1-70B": ModelSize(70.6, 68.5, 80, 8192, 1024),
    "DeepSeek-7B": ModelSize(6.91, 6.07, 30, 4096, 4096),
    "Qwen3-32B": ModelSize(32.8, 31.2, 64, 8192, 1024),
    "Qwen3-Coder-480B-A35B-FP8": ModelSize(480.2, 478.3, 62, 12288, 1024, 468.1, 8, 160, parameter_bytes=1),
}


def estimate(count: int, gpu_name: str, model_name: str) -> EngineProfile:
    """Derive the constants of `count` GPUs of a kind with a model on them, from data sheets.

    What no data sheet has, the settings of the engine, are the defaults.

    Example
    -------
    >>> h200 = estimate(1, "H200", "Llama-3.1-8B")
    >>> h200.name, h200.prefill_tokens_per_s, h200.kv_tokens, round(h200.decode_base_s * 1e3, 2)
    ('1xH200-Llama-3.1-8B', 48900.0, 904000, 4.18)
    """
    gpu, model = GPUS[gpu_name], MODELS[model_name]
    scale = count * (PARALLEL_SHARE if count > 1 else 1.0)
    flops, read_s = scale * gpu.tflops * 1e12, scale * gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE
    per_token = 2 * model.active_parameters * 1e9
    per_pair = 4 * model.layers * model.query_width
    pool_bytes = (0.9 * gpu.memory_gib * count - count) * _GIB - model.weight_bytes
    kin = gpu.kin
    return EngineProfile(
        name=f"{count}x{gpu_name}-{model_name}",
        prefill_base_s=kin.prefill_base_s,
        prefill_tokens_per_s=float(round(kin.linear_share * flops / per_token, -2)),
        prefill_kappa_s=per_pair / (kin.attention_share * flops),
        chunk_tokens=gpu.chunk_tokens,
        decode_base_s=(model.weight_bytes - model.routed_bytes) / read_s,
        decode_moe_s=model.routed_bytes / read_s,
        experts_per_token=model.experts_per_token,
        experts=model.experts,
        decode_per_request_s=kin.decode_per_request_s,
        decode_kv_s=model.kv_bytes / read_s,
        kv_tokens=int(pool_bytes / model.kv_bytes) // 1000 * 1000,
        source=(
            f"Estimate, not measured. Data sheet x{count}: {gpu.tflops:g} TFLOPS, {gpu.bandwidth_gb_s:g} GB/s, "
            f"{gpu.memory_gib:g} GiB. Prefill: {kin.linear_share:g} of the FLOPS over {per_token / 1e9:.1f} GFLOP a "
            f"token, attention {kin.attention_share:g} over {per_pair / 1e3:.0f} kFLOP a pair. Decode: "
            f"{model.weight_bytes / 1e9:.1f} GB of weights and {model.kv_bytes:,} bytes of KV a token at "
            f"{BANDWIDTH_SHARE:g} of the bandwidth."
            + (f" Tensor parallelism leaves {PARALLEL_SHARE:g} of both (assumed)." if count > 1 else "")
        ),
    )


#: The engines of the table: GPUs as fleets mix them, a dense 70B, two small models, and those of published fleets.
ESTIMATES = tuple(
    estimate(*one)
    for one in (
        (1, "V100", "Llama-3.1-8B"),
        (1, "A30", "Llama-3.1-8B"),
        (1, "L20", "Llama-3.1-8B"),
        (1, "H200", "Llama-3.1-8B"),
        (4, "H100", "Llama-3.1-70B"),
        (2, "H200", "Llama-3.1-70B"),
        (1, "A30", "Llama-3.2-1B"),
        (1, "L40S", "Llama-3.2-3B"),
        (1, "L20", "DeepSeek-7B"),
        (2, "H100", "Qwen3-32B"),
        (8, "H200", "Qwen3-Coder-480B-A35B-FP8"),
    )
)


#: Qwen3.5-35B-A3B: 40 layers (10 with attention, 2 KV heads of 256; 30 Gated DeltaNet), 256 experts of 3 x 2048 x 512
#: per layer, 8 routed. Routed experts in FP8 are 32.2 GB, KV is 20,480 bytes a token, the recurrent state about 63 MB a
#: request. Bandwidths are 0.8 of the data sheet: 2 x L40S 1.38 TB/s, H100 2.68 TB/s.
_QWEN_2XL40S = EngineProfile(
    name="2xL40S-Qwen3.5-35B-A3B-FP8-estimate",
    prefill_base_s=0.012,
    prefill_tokens_per_s=11_500.0,
    prefill_kappa_s=1.6e-9,
    chunk_tokens=4096,
    decode_base_s=0.0075,
    decode_moe_s=0.0233,
    experts_per_token=8,
    experts=256,
    decode_per_request_s=5e-5,
    decode_kv_s=1.5e-8,
    kv_tokens=983_549,
    max_running_requests=64,
    source=(
        "An estimate, but for the KV pool, which was measured on the GORGO paper's fleet. Prefill: 11,500 tokens/s are "
        "assumed; SGLang's chunk for 48 GB a card. Decode: experts 32.2 GB / 1.38 TB/s = 23.3 ms, KV 20,480 B / 1.38 "
        "TB/s = 15 ns a token, state 63 MB / 1.38 TB/s = 0.05 ms a request; the base (dense weights, all-reduce over "
        "PCIe, launch, sampling) is set so that one to two running requests give the 9.0-9.3 ms per token that the "
        "paper measured at moderate load. Five give 10.9 ms before prefill stalls."
    ),
)

_QWEN_2XL40S_FITTED = replace(_QWEN_2XL40S, name="2xL40S-Qwen3.5-35B-A3B-FP8-fitted", source=SOURCE, **FLAGS, **FITTED)

_QWEN_H100 = EngineProfile(
    name="1xH100-Qwen3.5-35B-A3B-FP8",
    prefill_base_s=0.012,
    prefill_tokens_per_s=14_300.0,
    prefill_kappa_s=1.2e-9,
    chunk_tokens=8192,
    decode_base_s=0.004,
    decode_moe_s=0.012,
    experts_per_token=8,
    experts=256,
    decode_per_request_s=2.5e-5,
    decode_kv_s=7.6e-9,
    kv_tokens=788_766,
    max_running_requests=64,
    source=(
        "Rate (0.07 ms per uncached token) and KV pool: measured on the GORGO paper's fleet. Prefill base as on 2xL40S "
        "(assumed), kappa scaled from it by BF16 FLOPS (724 / 989). Decode: experts 32.2 GB / 2.68 TB/s = 12 ms, KV "
        "7.6 ns a token, state 0.025 ms a request; base 4 ms is assumed (no all-reduce). Not measured."
    ),
)

_FIT = "Least squares over AIConfigurator 0.12.0 operator tables (SGLang, TP1, BF16), max relative error {error}. {kv}"

_LLAMA_H100 = EngineProfile(
    name="1xH100-Llama-3.1-8B",
    prefill_base_s=0.00193,
    prefill_tokens_per_s=1e6 / 20.58,
    prefill_kappa_s=2 * 0.497e-9,
    chunk_tokens=8192,
    decode_base_s=0.00653,
    decode_per_request_s=8.0e-6,
    decode_kv_s=4.14e-8,
    kv_tokens=450_000,
    max_running_requests=256,
    source=_FIT.format(error="2.1 %", kv="KV: 55 GiB at 128 KiB a token."),
)

_LLAMA_L40S = EngineProfile(
    name="1xL40S-Llama-3.1-8B",
    prefill_base_s=0.00495,
    prefill_tokens_per_s=1e6 / 74.24,
    prefill_kappa_s=2 * 1.882e-9,
    chunk_tokens=4096,
    decode_base_s=0.02231,
    decode_per_request_s=4.39e-5,
    decode_kv_s=1.811e-7,
    kv_tokens=201_000,
    max_running_requests=64,
    source=_FIT.format(error="2.5 %", kv="KV: 24.6 GiB at 128 KiB a token."),
)

_QWEN3_H100 = EngineProfile(
    name="1xH100-Qwen3-30B-A3B",
    prefill_base_s=0.02413,
    prefill_tokens_per_s=1e6 / 9.13,
    prefill_kappa_s=2 * 0.682e-9,
    chunk_tokens=8192,
    decode_base_s=0.00328,
    decode_moe_s=0.01748,
    experts_per_token=8,
    experts=128,
    decode_per_request_s=0.0,
    decode_kv_s=3.68e-8,
    kv_tokens=147_000,
    max_running_requests=256,
    source=_FIT.format(error="7.0 %", kv="KV: 13.5 GiB at 96 KiB a token."),
)

_QWEN3_L40S = EngineProfile(
    name="1xL40S-Qwen3-30B-A3B",
    prefill_base_s=0.1247,
    prefill_tokens_per_s=1e6 / 26.69,
    prefill_kappa_s=2 * 2.568e-9,
    chunk_tokens=4096,
    decode_base_s=0.0005,
    decode_moe_s=0.083,
    experts_per_token=8,
    experts=128,
    decode_per_request_s=0.0,
    decode_kv_s=1.447e-7,
    kv_tokens=100_000,
    max_running_requests=64,
    source=_FIT.format(
        error="4.9 %",
        kv="Hypothetical: the BF16 weights do not fit one card; the KV pool is what FP8 weights would leave (9 GiB).",
    ),
)


def as_vllm(profile: EngineProfile) -> EngineProfile:
    """The same GPU and model under vLLM with its defaults for a server of that size.

    Its CUDA graphs go up to 512 requests, so that a smaller bound of the profile does not hold.
    """
    return replace(
        profile,
        name=f"{profile.name.removesuffix('-estimate')}-vLLM",
        scheduler="vllm",
        chunk_tokens=8192 if profile.chunk_tokens >= 8192 else 2048,
        max_running_requests=1024 if profile.chunk_tokens >= 8192 else 256,
        cuda_graph_max_batch=None,
        decode_eager_s=0.0,
        source=f"{profile.source} vLLM's scheduler; the costs of its steps are assumed to be SGLang's.",
    )


#: Every ready-made profile by name. SGLang's defaults give chunk sizes by GPU memory.
PROFILES: Mapping[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        _QWEN_2XL40S_FITTED,
        _QWEN_2XL40S,
        _QWEN_H100,
        _LLAMA_H100,
        _LLAMA_L40S,
        _QWEN3_H100,
        _QWEN3_L40S,
        *ESTIMATES,
    )
} | {profile.name: profile for profile in map(as_vllm, (_QWEN_2XL40S, _QWEN_H100, _LLAMA_H100, _LLAMA_L40S))}


def find_profile(name: str) -> EngineProfile:
    """The profile of that name; raises `UnknownProfile`, which lists the names there are."""
    try:
        return PROFILES[name]
    except KeyError:
        raise UnknownProfile(f"no engine profile {name!r}; there are {', '.join(PROFILES)}") from None


SUFFIX = ".json"
#: A profile takes 1 kB.
MAX_BYTES = 65_536
#: Other numbers are at least 0, whole ones at least 1.
_POSITIVE = ("prefill_tokens_per_s",)
_SHARES = ("hit_share",)


def is_profile_file(name: str) -> bool:
    """Return whether a value of `simulation.profile` names a file and not a profile of `gorgo profiles`."""
    return name.endswith(SUFFIX)


def named_profile(name: str) -> EngineProfile:
    """Return the engine profile of that name or file. Raises `UnknownProfile` and `ConfigError`."""
    return read_profile(Path(name)) if is_profile_file(name) else find_profile(name)


def read_profile(path: Path) -> EngineProfile:
    """Return the profile of a file; raises `ConfigError` with the file and the key."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a profile file of gorgo calibrate") from error
    values = document.get("profile") if isinstance(document, Mapping) else None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected an object with the key profile, as gorgo calibrate --out writes it")
    fields_by_name = {field.name: field for field in fields(EngineProfile)}
    for name in values:
        if name not in fields_by_name:
            _fail(path, name, f"unknown key{closest(name, fields_by_name)}", f"one of {', '.join(fields_by_name)}")
    kinds = get_type_hints(EngineProfile)
    for name, field in fields_by_name.items():
        if name in values:
            _check(path, name, values[name], kinds[name])
        elif field.default is MISSING:
            _fail(path, name, "missing", "a value")
    profile = EngineProfile(**values)
    if profile.slot_cache and profile.scheduler != "vllm":
        _fail(path, "slot_cache", "true", 'false, or "scheduler": "vllm"')
    if profile.scheduler == "vllm":
        for name, least in (("chunk_tokens", "max_running_requests"), ("kv_tokens", "block_tokens")):
            value, bound = getattr(profile, name), getattr(profile, least)
            if value < bound:
                _fail(path, name, str(value), f"at least {least} ({bound}) with vLLM")
    return profile


def _check(path: Path, name: str, value: Any, kind: Any) -> None:
    if value is None and NoneType in get_args(kind):
        return
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) is UnionType else [kind]
    if not any(_fits(name, value, one) for one in kinds):
        _fail(path, name, json.dumps(value)[:60], " or ".join(_expected(name, one) for one in kinds))


def _fits(name: str, value: Any, kind: Any) -> bool:
    if kind is float:
        least = 0.0 if name not in _POSITIVE else 1e-9
        return is_number(value) and least <= value <= (1.0 if name in _SHARES else MAX_AMOUNT)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_AMOUNT
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return isinstance(value, kind)


def _expected(name: str, kind: Any) -> str:
    if kind is float:
        return "a number from 0 to 1" if name in _SHARES else f"a number {'above' if name in _POSITIVE else 'from'} 0"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {int: "a whole number from 1", bool: "true or false", str: "text"}[kind]


def _fail(path: Path, name: str, found: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}: profile.{name}: {found}; expected {expected}")
