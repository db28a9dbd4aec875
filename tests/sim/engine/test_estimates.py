from __future__ import annotations

import pytest

from gorgo.sim.engine.estimates import ESTIMATES, estimate
from gorgo.sim.engine.profiles import PROFILES, find_profile


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
