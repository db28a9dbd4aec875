"""Made rows as a trace: order, times, and which blocks are the same."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gorgo.lab.datasets import PoissonShape, describe_trace, generate_requests, read_shape, shapes
from gorgo.lab.datasets.synthetic import MadeRow, as_lines, as_requests


def row(timestamp_ms: int, tokens: int, **more: Any) -> MadeRow:
    given: dict[str, Any] = {"shared": ("system", 1), "shared_tokens": 1024, "own": ("text", 1), "output_tokens": 7}
    return MadeRow(timestamp_ms=timestamp_ms, input_tokens=tokens, **given | more)


def test_blocks_of_a_shared_beginning_are_everybody_s_and_a_block_that_grows_is_another() -> None:
    """Blocks of 512 tokens: two of the system prompt, then the row's own."""
    rows = [
        row(0, 1300),
        row(1, 1536),
        row(2, 2000),
        row(3, 1536, own=("text", 2)),
        # One token of the second block lies behind the shared text: then it is the row's own.
        row(4, 1536, own=("text", 3), shared_tokens=1023),
        row(5, 512),
    ]
    assert [request.hash_ids for request in as_requests(rows)] == [
        (0, 1, 2),
        (0, 1, 3),
        (0, 1, 3, 4),
        (0, 1, 5),
        (0, 6, 7),
        (0,),
    ]


def test_rows_are_in_the_order_of_time_and_numbered_so() -> None:
    rows = [row(2500, 512, user="b", turn=2), row(500, 600, own=("text", 9))]
    first, second = as_requests(rows)
    assert [(one.index, one.timestamp_s, one.input_tokens, one.output_tokens) for one in (first, second)] == [
        (0, 0.5, 600, 7),
        (1, 2.5, 512, 7),
    ]
    assert [(one.user, one.turns) for one in (first, second)] == [(None, None), ("b", 2)]
    assert [json.loads(line) for line in as_lines(rows).splitlines()] == [
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
        {"timestamp": 2500, "input_length": 512, "output_length": 7, "hash_ids": [0], "user_id": "b", "turn": 2},
    ]


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
