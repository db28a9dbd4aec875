"""Which engines regions.yaml may name."""

from __future__ import annotations

import pytest

from gorgo.config.values import BUILT_IN, checked_engine, engine_names


def test_names_of_this_package_come_first() -> None:
    assert tuple(engine_names()[: len(BUILT_IN)]) == BUILT_IN
    assert [checked_engine(name) for name in BUILT_IN] == list(BUILT_IN)


def test_another_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"^'sglang', 'vllm', .* or '\w+'$"):
        checked_engine("triton")
