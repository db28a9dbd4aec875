"""Constants of engines that no table covers: estimates from data sheets of the GPU and the size of the model.

Owns data sheets, model sizes and the derivation. `profiles` makes profiles of them.

Theory of operation. The operator tables of one model, Llama-3.1-8B in BF16, give the share of its data sheet that a GPU
reaches, on H100 and on L40S. Other GPUs are taken to reach the share of the kin that has a table:

    prefill rate       linear_share * FLOPS / (2 * parameters of the layers)
    prefill kappa      4 * layers * query width / (attention_share * FLOPS)
    decode base        bytes of the weights / (0.8 * bandwidth)
    decode per token   bytes of KV / (0.8 * bandwidth)
    KV pool            (0.9 * memory - weights - 1 GiB of activations) / bytes of KV

A mixture of experts computes with k of its E routed experts and reads all of them once: a decode step's base has the
other weights alone, `decode_moe_s` the routed ones. Prefills of 8-bit weights are taken to be as fast as of
16-bit ones.

Several GPUs with tensor parallelism add up FLOPS, bandwidth and memory, less `PARALLEL_SHARE` of the first two, which
pays for the all-reduce. The constant parts of steps (launch, sampling) are those of the kin.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a data sheet says of an `EngineProfile`, in its units, and the derivation in words.

    The profile has the settings of the engine beside these, which no data sheet has.
    """

    name: str
    prefill_base_s: float
    prefill_tokens_per_s: float
    prefill_kappa_s: float
    chunk_tokens: int
    decode_base_s: float
    decode_moe_s: float
    experts_per_token: int
    experts: int
    decode_per_request_s: float
    decode_kv_s: float
    kv_tokens: int
    source: str


def estimate(count: int, gpu_name: str, model_name: str) -> Estimate:
    """Derive the constants of `count` GPUs of a kind with a model on them.

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
    return Estimate(
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
