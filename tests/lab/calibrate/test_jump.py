"""A decode step that takes longer above a batch: found where it is, and nowhere else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gorgo.lab.calibrate.fit import DecodePoint, fit_decode
from gorgo.lab.calibrate.measure import BATCHES
from gorgo.lab.sim.engine.profiles import PROFILES, EngineProfile, find_profile
from tests.lab.calibrate.test_measured import found

LLAMA = find_profile("1xH100-Llama-3.1-8B")
MIXTURE = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")


def points(profile: EngineProfile, *, noise: float, seed: int) -> list[DecodePoint]:
    """Return measured steps with relative errors of the standard deviation `noise`."""
    draw = random.Random(seed)
    return [
        DecodePoint(batch, batch * context, profile.decode_s(batch, batch * context) * draw.gauss(1.0, noise))
        for context in (300, 6200)
        for batch in BATCHES
    ]


@pytest.mark.parametrize("profile", [LLAMA, MIXTURE], ids=["dense", "mixture"])
async def test_largest_batch_with_a_graph_is_found_between_two_measured_ones(profile: EngineProfile) -> None:
    eager = replace(profile, cuda_graph_max_batch=20, decode_eager_s=0.025)
    again = (await found(eager, kv_capacity_tokens=eager.kv_tokens)).profile("again")
    assert again.cuda_graph_max_batch == 20
    assert again.decode_eager_s == pytest.approx(0.025, rel=0.05)
    for batch, context in ((1, 100), (20, 100_000), (24, 100_000), (64, 300_000)):
        assert again.decode_s(batch, context) == pytest.approx(eager.decode_s(batch, context), rel=0.03)


#: The profile that is fitted to the paper has a largest graph.
WITHOUT_JUMP = [name for name, one in PROFILES.items() if "vLLM" not in name and one.cuda_graph_max_batch is None]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("name", WITHOUT_JUMP[::4])
def test_no_jump_is_found_where_there_is_none(name: str, noise: float) -> None:
    for seed in range(3):
        fit = fit_decode(points(find_profile(name), noise=noise, seed=seed))
        assert fit.graph_max_batch is None
        assert fit.eager_s == 0


@pytest.mark.parametrize(("active", "experts"), [(4, 60), (1, 16), (6, 160)])
def test_curve_of_another_number_of_experts_is_no_jump(active: int, experts: int) -> None:
    profile = replace(MIXTURE, experts_per_token=active, experts=experts)
    assert fit_decode(points(profile, noise=0.01, seed=1)).graph_max_batch is None


def test_jump_is_found_among_errors_of_three_percent() -> None:
    eager = replace(LLAMA, cuda_graph_max_batch=32, decode_eager_s=0.02)
    fit = fit_decode(points(eager, noise=0.03, seed=1))
    assert fit.graph_max_batch == 32
    assert fit.eager_s == pytest.approx(0.02, rel=0.15)
