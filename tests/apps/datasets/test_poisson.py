from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.apps.datasets import PoissonShape, describe_trace, generate_requests, read_shape, shapes


@pytest.fixture(scope="module")
def shape() -> PoissonShape:
    found = read_shape(shapes()["wildchat-like"])
    assert isinstance(found, PoissonShape)
    return found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wildchat_s_figures_are_met_within_a_tenth(shape: PoissonShape, seed: int) -> None:
    figures = describe_trace(generate_requests(replace(shape, seed=seed)))
    assert figures.requests_per_s == pytest.approx(11.4, rel=0.03)
    assert figures.input_mean == pytest.approx(840, rel=0.1)
    assert figures.block_reuse == pytest.approx(0.0495, rel=0.1)


def test_arrivals_are_poisson(shape: PoissonShape) -> None:
    """Exponential gaps vary by as much as their mean, and so do the counts of a second."""
    times = [request.timestamp_s for request in generate_requests(shape)]
    gaps, counts = np.diff(times), np.histogram(times, 1800, (0, 1800))[0]
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.05)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.15)


def test_who_asks_on_does_so_behind_what_was_said_and_after_a_while(shape: PoissonShape) -> None:
    last: dict[str | None, tuple[float, tuple[int, ...], int]] = {}
    continued = 0
    for request in generate_requests(replace(shape, duration_s=600.0)):
        if request.user in last:
            time_s, ids, tokens = last[request.user]
            assert request.timestamp_s - time_s >= shape.continue_after_s - 0.001
            assert request.hash_ids[: tokens // 512] == ids[: tokens // 512]
            continued += 1
        last[request.user] = (request.timestamp_s, request.hash_ids, request.input_tokens)
    assert continued > 300


def test_a_shape_without_continuation_reuses_nothing(shape: PoissonShape) -> None:
    assert describe_trace(generate_requests(replace(shape, continue_share=0.0, duration_s=200.0))).block_reuse == 0
