from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gorgo.policies.learned.affinity import cached_shares, gate
from tests.policies.table import request, table

SHARES, TTFT_S = np.array([1.0, 0.85, 0.2]), np.array([4.0, 3.0, 1.0])


def gated(
    share: float, *, rows: tuple[int, ...] = (0, 1, 2), max_penalty_s: float = 5.0, explores: bool = False
) -> tuple[list[int], str | None]:
    found = gate(np.array(rows), SHARES, TTFT_S, share=share, max_penalty_s=max_penalty_s, explores=explores)
    return found.rows.tolist(), found.guard


def test_candidates_with_the_share_pass_alone() -> None:
    assert gated(0.99) == ([0], "affinity_kept")
    assert gated(0.8) == ([0, 1], "affinity_kept")


@pytest.mark.parametrize(
    ("share", "rows"),
    [(0.0, (0, 1, 2)), (0.99, (1, 2)), (0.1, (0, 1, 2)), (0.99, (0,))],
    ids=["no gate", "no candidate has it", "each has it", "one candidate"],
)
def test_all_pass_where_there_is_nothing_to_prefer(share: float, rows: tuple[int, ...]) -> None:
    assert gated(share, rows=rows) == (list(rows), None)


def test_the_gate_opens_where_the_cached_ones_are_later_by_more_than_the_penalty() -> None:
    assert gated(0.99, max_penalty_s=2.0) == ([0, 1, 2], "affinity_left")
    assert gated(0.99, max_penalty_s=3.0) == ([0], "affinity_kept")
    assert gated(0.99, max_penalty_s=0.0) == ([0], "affinity_kept")  # no limit


def test_the_penalty_is_between_the_best_of_both_sides() -> None:
    assert gated(0.8, max_penalty_s=1.9) == ([0, 1, 2], "affinity_left")
    assert gated(0.8, max_penalty_s=2.1) == ([0, 1], "affinity_kept")


def test_exploration_opens_the_gate() -> None:
    assert gated(0.8, explores=True) == ([0, 1, 2], "explore")
    assert gated(0.1, explores=True) == ([0, 1, 2], None)


def test_shares_are_of_full_blocks() -> None:
    asked = replace(request(prompt_tokens=1000), blocks=bytes(8 * 15))
    assert cached_shares(asked, table(3, cached=[960, 480, 1000])).tolist() == [1.0, 0.5, 1.0]
    assert cached_shares(request(prompt_tokens=10), table(2, cached=[10, 0], prompt_tokens=10)).tolist() == [0.0, 0.0]
