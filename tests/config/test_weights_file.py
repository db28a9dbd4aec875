"""Weights files: read back as written, and refused with place and expectation."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorgo.config.weights_file import WeightsFile, parse_weights_file, read_weights_file, write_weights_file
from gorgo.errors import ConfigError

FULL = WeightsFile(
    policy="gorgo-ms",
    weights={"m_rtt": 1.25, "lambda": 0.02},
    widened=True,
    source="gorgo tune",
    created="2026-04-01T12:00:00+00:00",
    note="found at night",
    evidence={"ttft_ms_p95": [900.0, 950.0]},
)


@pytest.mark.parametrize("file", [FULL, WeightsFile(policy="gorgo", weights={})])
def test_file_is_read_as_it_was_written(tmp_path: Path, file: WeightsFile) -> None:
    write_weights_file(tmp_path / "weights.json", file)
    assert read_weights_file(tmp_path / "weights.json") == file


def test_file_replaces_the_one_that_was_there_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for file in (FULL, WeightsFile(policy="random", weights={})):
        write_weights_file(tmp_path / "weights.json", file)
    assert read_weights_file(tmp_path / "weights.json").policy == "random"
    assert [path.name for path in tmp_path.iterdir()] == ["weights.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", '{"policy": 1, "weights": {}}', '{"policy": "gorgo", "weights": []}',
     '{"policy": "gorgo", "weights": {"w_rtt": "1"}}', '{"policy": "gorgo", "weights": {"w_rtt": true}}',
     '{"policy": "gorgo", "weights": {}, "more": 1}', '{"policy": "gorgo", "weights": {}, "widened": 1}',
     '{"policy": "gorgo", "weights": {}, "note": 1}', '{"policy": "gorgo", "weights": {}, "evidence": []}',
     '{"policy": "gorgo", "weights": {}, "gorgo_weights": 0}',
     '{"policy": "gorgo", "weights": {}, "gorgo_weights": "1"}',
     '{"policy": "gorgo", "weights": {"w_rtt": 1%s}}' % ("0" * 400), '{"policy": "gorgo", "weights": {"w_rtt": NaN}}',
     "[" * 50_000, '{"policy": "' + "x" * 70_000],
)  # fmt: skip
def test_other_json_is_no_weights_file(text: str) -> None:
    with pytest.raises(ConfigError, match=r'^weights\.json: .*expected \{"policy"'):
        parse_weights_file(text.encode(), source="weights.json")


def test_file_of_a_newer_form_says_so() -> None:
    with pytest.raises(ConfigError, match="form 2, of a newer GORGO"):
        parse_weights_file(b'{"gorgo_weights": 2, "policy": "gorgo", "weights": {}}', source="weights.json")


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_weights_file(tmp_path / "none.json")
