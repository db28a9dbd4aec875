from __future__ import annotations

from math import nan

import numpy as np
import pytest

from gorgo.core.fleet.replica import accelerator_code
from gorgo.core.training.features import FEATURES, GROUP_BLOCKS, feature_table, prefix_group
from gorgo.errors import ConfigError
from tests.core.routers import a_request, blocks_of
from tests.policies.table import request, table


def test_a_table_has_a_row_per_candidate_and_a_column_per_name() -> None:
    candidates = table(3, cached=[0, 250, 1000], in_flight_requests=[1, 2, 3])
    made = feature_table(("prompt_tokens", "uncached_tokens", "hit_share", "in_flight_requests"), request(), candidates)
    assert made.dtype == np.float32
    assert made.tolist() == [[1000, 1000, 0, 1], [1000, 750, 0.25, 2], [1000, 0, 1, 3]]


def test_an_unknown_cell_is_the_worst_known_one_and_0_where_none_is_known() -> None:
    candidates = table(3, rtt_s=[0.1, nan, 0.3], used_tokens=[nan, nan, nan])
    made = feature_table(("rtt_s", "kv_usage", "scrape_age_s", "is_queued"), request(), candidates)
    np.testing.assert_allclose(made, [[0.1, 0, 0, 0], [0.3, 0, 0, 0], [0.3, 0, 0, 0]], rtol=1e-6)


def test_every_feature_of_an_empty_table_of_any_size_is_a_finite_number() -> None:
    for rows in (1, 3):
        for prompt_tokens in (0, 1000):
            candidates = table(rows, prompt_tokens=prompt_tokens)
            made = feature_table((*FEATURES, "accelerator=A30"), request(prompt_tokens=prompt_tokens), candidates)
            assert made.shape == (rows, len(FEATURES) + 1)
            assert np.isfinite(made).all()


def test_quarters_of_the_hit_are_0_to_3() -> None:
    candidates = table(5, cached=[0, 249, 250, 750, 1000])
    assert feature_table(("hit_quarter",), request(), candidates)[:, 0].tolist() == [0, 0, 1, 3, 3]


def test_counts_by_the_router_are_split_by_the_first_token() -> None:
    candidates = table(
        2, in_flight_requests=[3, 5], decoding_requests=[1, 5], queued_prefill_tokens=[900, 0],
        uncached_prefill_tokens=[300, 0],
    )  # fmt: skip
    names = ("prefilling_requests", "decoding_requests", "prefill_tokens", "uncached_prefill_tokens")
    assert feature_table(names, request(), candidates).tolist() == [[2, 1, 900, 300], [0, 5, 0, 0]]


@pytest.mark.parametrize("name", ["L40S", "2xL40S", "8 x l40s", "NVIDIA-L40S", "nvidia L40S-48GB"])
def test_a_one_hot_knows_an_accelerator_whatever_its_number_and_maker(name: str) -> None:
    codes = [accelerator_code(name), accelerator_code("L40"), nan]
    made = feature_table(("accelerator=L40S",), request(), table(3, accelerator=codes))
    assert made.ravel().tolist() == [1.0, 0.0, 0.0]


def test_a_one_hot_is_1_on_replicas_of_that_accelerator_alone() -> None:
    codes = [accelerator_code("A30"), accelerator_code("V100"), nan]
    made = feature_table(("accelerator=A30", "accelerator=V100"), request(), table(3, accelerator=codes))
    assert made.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_a_name_that_is_no_feature_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no feature named 'kv_use' .*'kv_usage'.*; there are: prompt_tokens, "):
        feature_table(("kv_use",), request(), table(1))


def test_a_prefix_group_is_that_of_all_prompts_with_the_same_first_blocks() -> None:
    shared = list(range(1, GROUP_BLOCKS + 1))
    one, other = (a_request("r", prompt_tokens=2000, blocks=blocks_of(*shared, last)) for last in (77, 88))
    apart = a_request("r", prompt_tokens=2000, blocks=blocks_of(9, *shared))
    assert prefix_group(one) == prefix_group(other) != prefix_group(apart)
    assert prefix_group(a_request("r", prompt_tokens=10, blocks=b"")) == 0
    assert prefix_group(one, depth=11) != prefix_group(other, depth=11)


def test_a_decode_step_is_the_learned_gap_at_the_number_that_decodes_and_0_where_none_does() -> None:
    candidates = table(3, decoding_requests=[0, 16, 16], token_gap_s=[0.01, 0.02, nan])
    made = feature_table(("decode_step_s",), request(), candidates)[:, 0]
    assert made == pytest.approx([0.0, 0.04, 0.04])


def test_kv_tokens_are_short_by_what_waits_and_the_prompt_less_what_is_free() -> None:
    candidates = table(
        4, cached=[0, 0, 900, 0], kv_capacity_tokens=[5000, 5000, 5000, nan], used_tokens=[4500, 1000, 4500, 0],
        uncached_prefill_tokens=[700, 700, 300, 0],
    )  # fmt: skip
    made = feature_table(("kv_short_tokens",), request(), candidates)[:, 0]
    assert made.tolist() == [1200, 0, 0, 1200]
