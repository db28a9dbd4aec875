""""""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.errors import BadRequest, UnknownProfile
from gorgo.lab.sim.engine.profiles import ESTIMATES, PROFILES, as_vllm, estimate, find_profile


def test_unknown_profile_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(UnknownProfile, match="no engine profile 'abacus'") as caught:
        find_profile("abacus")
    assert all(name in str(caught.value) for name in PROFILES)


def test_every_profile_says_where_its_constants_come_from() -> None:
    assert all(profile.source for profile in PROFILES.values())
    assert all(name == profile.name for name, profile in PROFILES.items())


# Operator tables (AIConfigurator 0.12.0, SGLang), milliseconds: prefill by prompt length, and 8,192 with 6,144 cached.
PREFILL_TABLE = {
    "1xH100-Llama-3.1-8B": {512: 12.6, 2048: 46.1, 4096: 94.1, 8192: 205.7},
    "1xL40S-Llama-3.1-8B": {512: 43.6, 2048: 161.9, 4096: 342.2, 8192: 756.7},
    "1xH100-Qwen3-30B-A3B": {512: 29.3, 2048: 44.7, 4096: 73.0, 8192: 148.6},
    "1xL40S-Qwen3-30B-A3B": {512: 141.0, 2048: 184.7, 4096: 280.4, 8192: 523.0},
}

# The same for a decode iteration, by batch and context of each request.
DECODE_TABLE = {
    "1xH100-Llama-3.1-8B": {(1, 1024): 6.61, (32, 1024): 8.16, (64, 4096): 18.02},
    "1xL40S-Llama-3.1-8B": {(1, 1024): 22.7, (32, 1024): 30.4, (64, 4096): 72.7},
    "1xH100-Qwen3-30B-A3B": {(1, 1024): 4.47, (32, 1024): 20.3, (64, 4096): 29.3},
    "1xL40S-Qwen3-30B-A3B": {(1, 1024): 5.87, (32, 1024): 77.4, (64, 4096): 117.0},
}


#: Chunk, KV pool and running batch of each engine, in the order of the table.
LIMITS = {
    "2xL40S-Qwen3.5-35B-A3B-FP8-fitted": (4096, 983_549, 64),
    "2xL40S-Qwen3.5-35B-A3B-FP8-estimate": (4096, 983_549, 64),
    "1xH100-Qwen3.5-35B-A3B-FP8": (8192, 788_766, 64),
    "1xH100-Llama-3.1-8B": (8192, 450_000, 256),
    "1xL40S-Llama-3.1-8B": (4096, 201_000, 64),
    "1xH100-Qwen3-30B-A3B": (8192, 147_000, 256),
    "1xL40S-Qwen3-30B-A3B": (4096, 100_000, 64),
    "1xV100-Llama-3.1-8B": (2048, 105_000, 64),
    "1xA30-Llama-3.1-8B": (2048, 46_000, 64),
    "1xL20-Llama-3.1-8B": (4096, 201_000, 64),
    "1xH200-Llama-3.1-8B": (8192, 904_000, 64),
    "4xH100-Llama-3.1-70B": (8192, 499_000, 64),
    "2xH200-Llama-3.1-70B": (8192, 390_000, 64),
    "1xA30-Llama-3.2-1B": (2048, 599_000, 64),
    "1xL40S-Llama-3.2-3B": (4096, 313_000, 64),
    "1xL20-DeepSeek-7B": (4096, 58_000, 64),
    "2xH100-Qwen3-32B": (8192, 331_000, 64),
    "8xH200-Qwen3-Coder-480B-A35B-FP8": (8192, 2_349_000, 64),
    "2xL40S-Qwen3.5-35B-A3B-FP8-vLLM": (2048, 983_549, 256),
    "1xH100-Qwen3.5-35B-A3B-FP8-vLLM": (8192, 788_766, 1024),
    "1xH100-Llama-3.1-8B-vLLM": (8192, 450_000, 1024),
    "1xL40S-Llama-3.1-8B-vLLM": (2048, 201_000, 256),
}


def test_limits_are_those_of_the_design() -> None:
    found = {name: (each.chunk_tokens, each.kv_tokens, each.max_running_requests) for name, each in PROFILES.items()}
    assert found == LIMITS
    assert {
        name.removesuffix("-vLLM"): (each.experts_per_token, each.experts)
        for name, each in PROFILES.items()
        if each.decode_moe_s
    } == {
        **{f"2xL40S-Qwen3.5-35B-A3B-FP8{end}": (8, 256) for end in ("", "-estimate", "-fitted")},
        "1xH100-Qwen3.5-35B-A3B-FP8": (8, 256),
        **dict.fromkeys(("1xH100-Qwen3-30B-A3B", "1xL40S-Qwen3-30B-A3B"), (8, 128)),
        "8xH200-Qwen3-Coder-480B-A35B-FP8": (8, 160),
    }
    assert {profile.context_tokens for profile in PROFILES.values()} == {32_768}


def test_the_two_formulas_are_as_written() -> None:
    """k = 8 of E = 256: four tokens touch 1 - (31 / 32) ** 4 of the experts."""
    profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    assert profile.prefill_s(1000, 2e6) == pytest.approx(0.012 + 1000 / 11_500 + 1.6e-9 * 2e6)
    touched = 1 - (31 / 32) ** 4
    assert profile.decode_s(4, 9000) == pytest.approx(0.0075 + 0.0233 * touched + 4 * 5e-5 + 1.5e-8 * 9000)
    h100 = find_profile("1xH100-Qwen3.5-35B-A3B-FP8")
    assert h100.prefill_s(1000, 2e6) == pytest.approx(0.012 + 1000 / 14_300 + 1.2e-9 * 2e6)
    assert h100.decode_s(4, 9000) == pytest.approx(0.004 + 0.012 * touched + 4 * 2.5e-5 + 7.6e-9 * 9000)


@pytest.mark.parametrize(
    ("prompt", "output", "refused"),
    [(32_767, 1, None), (32_768, 1, "longer than"), (32_000, 769, "together"), (32_000, 768, None), (1, 32_767, None)],
)
def test_a_request_that_fits_the_context_is_taken(prompt: int, output: int, refused: str | None) -> None:
    profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    if refused is None:
        profile.check_size(prompt, output)
        replace(profile, kv_tokens=prompt + output).check_size(prompt, output)
        with pytest.raises(BadRequest, match="do not fit the KV pool"):
            replace(profile, kv_tokens=prompt + output - 1).check_size(prompt, output)
    else:
        with pytest.raises(BadRequest, match=refused):
            profile.check_size(prompt, output)


@pytest.mark.parametrize("name", PREFILL_TABLE)
def test_fitted_profiles_agree_with_the_tables_they_were_fitted_to(name: str) -> None:
    profile = find_profile(name)
    for tokens, expected_ms in PREFILL_TABLE[name].items():
        assert profile.prefill_s(tokens, tokens * tokens / 2) * 1e3 == pytest.approx(expected_ms, rel=0.04)
    for (batch, context), expected_ms in DECODE_TABLE[name].items():
        assert profile.decode_s(batch, batch * context) * 1e3 == pytest.approx(expected_ms, rel=0.09)


def test_the_papers_replica_decodes_at_the_papers_pace() -> None:
    profile = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")
    itl_ms = [profile.decode_s(batch, batch * 7_000) * 1e3 for batch in (1, 2, 5, 16, 64)]
    assert itl_ms == sorted(itl_ms)
    assert 8 < itl_ms[0] < itl_ms[1] < 10  # 9.0-9.3 ms at moderate load
    assert 10 < itl_ms[2] < 17.6  # the busier window, in which prefills stall decodes as well


def test_uncached_tokens_cost_what_the_paper_measured() -> None:
    h100 = find_profile("1xH100-Qwen3.5-35B-A3B-FP8")
    per_token_ms = (h100.prefill_s(5_000, 5_000**2 / 2) - h100.prefill_base_s) / 5_000 * 1e3
    assert 0.0694 < per_token_ms < 0.0834


def test_a_step_with_prompts_and_decodes_reads_the_weights_once() -> None:
    """A chunk of 4,000 tokens covers the read of the weights; one of 10 does not."""
    h100 = find_profile("1xH100-Llama-3.1-8B-vLLM")
    decodes_s = 20 * h100.decode_per_request_s + 20_000 * h100.decode_kv_s
    assert h100.mixed_s(4000, 8e6, 20, 20_000) == pytest.approx(h100.prefill_s(4020, 8e6) + decodes_s)
    assert h100.mixed_s(10, 50.0, 20, 20_000) == pytest.approx(h100.decode_base_s + decodes_s)
    assert h100.mixed_s(10, 50.0, 20, 20_000) == pytest.approx(h100.decode_s(20, 20_000))


def test_vllm_runs_with_its_own_defaults() -> None:
    small, large = find_profile("1xL40S-Llama-3.1-8B-vLLM"), find_profile("1xH100-Llama-3.1-8B-vLLM")
    assert {small.scheduler, large.scheduler} == {"vllm"}
    assert (small.block_tokens, small.prefix_cache) == (16, True)
    assert {each.scheduler for name, each in PROFILES.items() if not name.endswith("-vLLM")} == {"sglang"}
    bounded = as_vllm(replace(find_profile("1xL40S-Llama-3.1-8B"), cuda_graph_max_batch=20, decode_eager_s=0.04))
    assert bounded.decode_s(64, 9000) == small.decode_s(64, 9000)


@pytest.mark.parametrize("gpu", ["H100", "L40S"])
def test_the_derivation_meets_the_operator_tables_where_there_are_some(gpu: str) -> None:
    """The shares come from these tables; bandwidth and pool are checked by them."""
    derived, table = estimate(1, gpu, "Llama-3.1-8B"), find_profile(f"1x{gpu}-Llama-3.1-8B")
    assert derived.prefill_tokens_per_s == pytest.approx(table.prefill_tokens_per_s, rel=0.01)
    assert derived.prefill_kappa_s == pytest.approx(table.prefill_kappa_s, rel=0.01)
    assert derived.prefill_base_s == pytest.approx(table.prefill_base_s, rel=0.02)
    assert derived.decode_base_s == pytest.approx(table.decode_base_s, rel=0.10)
    assert derived.decode_kv_s == pytest.approx(table.decode_kv_s, rel=0.20)
    assert derived.kv_tokens == pytest.approx(table.kv_tokens, rel=0.03)
    assert derived.chunk_tokens == table.chunk_tokens


def test_an_estimated_profile_is_named_one_with_its_derivation() -> None:
    for each in ESTIMATES:
        profile = PROFILES[each.name]
        assert profile.source.startswith("Estimate, not measured. Data sheet")
        assert profile.is_estimate
        assert (profile.decode_moe_s > 0) == (profile.experts > 1)
    assert not find_profile("1xH100-Llama-3.1-8B").is_estimate


def test_constants_follow_from_the_data_sheet_as_the_page_writes_it() -> None:
    """A30: 165 TFLOPS, 933 GB/s, 24 GiB; 6.98e9 parameters in layers, 16.06 GB of weights, 128 KiB of KV a token."""
    a30 = find_profile("1xA30-Llama-3.1-8B")
    assert a30.prefill_tokens_per_s == pytest.approx(0.52 * 165e12 / (2 * 6.98e9), abs=50)
    assert a30.prefill_kappa_s == pytest.approx(4 * 32 * 4096 / (0.385 * 165e12))
    assert a30.decode_base_s == pytest.approx(16.06e9 / (0.8 * 933e9))
    assert a30.decode_kv_s == pytest.approx(131_072 / (0.8 * 933e9))
    assert a30.kv_tokens == int(((0.9 * 24 - 1) * 2**30 - 16.06e9) / 131_072) // 1000 * 1000


def test_tensor_parallelism_pays_for_its_all_reduce() -> None:
    one, two = estimate(1, "H200", "Llama-3.1-70B"), estimate(2, "H200", "Llama-3.1-70B")
    assert two.prefill_tokens_per_s == pytest.approx(1.7 * one.prefill_tokens_per_s, rel=0.02)
    assert two.decode_base_s == pytest.approx(one.decode_base_s / 1.7)
    assert "(assumed)" in two.source
    assert "(assumed)" not in one.source


def test_fleets_find_a_dense_70b_and_a_small_model() -> None:
    assert 15_000 < find_profile("4xH100-Llama-3.1-70B").prefill_tokens_per_s < 20_000
    assert 35_000 < find_profile("1xA30-Llama-3.2-1B").prefill_tokens_per_s < 45_000


def test_a_mixture_computes_with_its_active_experts_and_reads_all_of_them() -> None:
    """480 GB in 8 bits: 12 GB outside the routed experts; 10.2 + 23.4 billion parameters a token."""
    profile = find_profile("8xH200-Qwen3-Coder-480B-A35B-FP8")
    flops, read_s = 8 * 0.85 * 989e12, 8 * 0.85 * 4800e9 * 0.8
    assert profile.prefill_tokens_per_s == pytest.approx(0.69 * flops / (2 * 33.6e9), rel=0.01)
    assert profile.decode_base_s == pytest.approx(12.1e9 / read_s)
    assert profile.decode_moe_s == pytest.approx(468.1e9 / read_s)
    assert (profile.experts_per_token, profile.experts) == (8, 160)
