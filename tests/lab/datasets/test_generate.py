from __future__ import annotations

import errno
import gzip
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gorgo.errors import TraceError
from gorgo.lab.datasets import (
    DEMO_TRACE,
    WorkloadShape,
    datasets,
    describe_trace,
    generate_trace,
    read_shape,
    shapes,
    shipped_path,
    write_trace,
)
from gorgo.lab.traces import load_trace


@pytest.fixture
def shape() -> WorkloadShape:
    found = read_shape(next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE))
    assert isinstance(found, WorkloadShape)
    return found


@pytest.mark.parametrize("name", [dataset.name for dataset in datasets()])
def test_each_shipped_trace_is_what_its_parameters_give(name: str) -> None:
    dataset = next(dataset for dataset in datasets() if dataset.name == name)
    assert gzip.decompress(dataset.path.read_bytes()) == generate_trace(read_shape(dataset.shape))


def test_the_demo_trace_has_long_prompts_many_turns_and_high_reuse() -> None:
    path = shipped_path(DEMO_TRACE)
    figures = describe_trace(load_trace(path))
    assert 200 <= figures.requests <= 320
    assert 20 <= figures.duration_s <= 30
    assert 5_000 <= figures.input_p50 <= 7_000
    assert 85 <= figures.output_mean <= 110
    assert figures.block_reuse == pytest.approx(0.785, abs=0.065)
    assert path.stat().st_size < 300_000


def test_another_seed_is_another_trace_of_the_same_shape(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(replace(shape, seed=shape.seed + 1), tmp_path / "other.jsonl")
    assert (tmp_path / "other.jsonl").read_bytes() != generate_trace(shape)
    assert describe_trace(load_trace(tmp_path / "other.jsonl")).block_reuse == pytest.approx(0.78, abs=0.12)


def test_no_prompt_is_longer_than_allowed_and_no_output_either(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(replace(shape, input_max=4_000, output_max=90), tmp_path / "t.jsonl")
    requests = load_trace(tmp_path / "t.jsonl")
    assert max(request.input_tokens for request in requests) == 4_000
    assert max(request.output_tokens for request in requests) == 90


def test_an_id_stands_for_its_whole_prefix(shape: WorkloadShape, tmp_path: Path) -> None:
    write_trace(shape, tmp_path / "t.jsonl.gz")
    before: dict[int, int | None] = {}
    for request in load_trace(tmp_path / "t.jsonl.gz"):
        for previous, hash_id in zip((None, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(hash_id, previous) == previous


def test_an_unknown_data_set_lists_those_there_are() -> None:
    with pytest.raises(TraceError, match=f"there are: .*{DEMO_TRACE}"):
        shipped_path("nothing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seed = ", "sed = "), "sed is unknown; the keys are seed"),
        (("seed = ", "seed = 2.5 # "), "seed is 2.5; expected a whole number"),
        (("turns_mean = ", "turns_mean = -"), "expected a number, at least 0"),
        (("seed = ", "seed = = "), "Invalid"),
        (("seed = ", 'kind = "chat"\nseed = '), "kind is 'chat'; expected one of conversations, users, poisson"),
        (("seed = ", 'kind = "users"\nseed = '), "answer_share is missing; the keys are seed, duration_s, users"),
    ],
)
def test_wrong_parameters_are_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    good = next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE)
    path = tmp_path / "shape.toml"
    path.write_text(good.read_text().replace(*change))
    with pytest.raises(TraceError, match=said):
        read_shape(path)


@pytest.mark.parametrize(
    ("value", "right"), [("0.0", True), ("999999999999.0", True), ("1e12", False), ("true", False)]
)
def test_a_parameter_is_from_0_to_below_the_largest(tmp_path: Path, value: str, right: bool) -> None:
    good = next(dataset.shape for dataset in datasets() if dataset.name == DEMO_TRACE)
    path = tmp_path / "shape.toml"
    path.write_text(re.sub(r"ramp_s = .*", f"ramp_s = {value}", good.read_text()))
    if right:
        found = read_shape(path)
        assert isinstance(found, WorkloadShape)
        assert found.ramp_s == float(value)
    else:
        with pytest.raises(TraceError, match=r"ramp_s is .*; expected a number, at least 0"):
            read_shape(path)


@pytest.mark.parametrize(
    "points",
    [
        "7",
        "[[0, 1]]",
        "[[0, 5], [0.5, 4], [1, 9]]",
        "[[0, 1], [0.5, 2]]",
        "[[0, 1], [1, true]]",
        "[[0, 1], [0, 2], [1, 3]]",
    ],
)
def test_quantiles_that_do_not_rise_from_0_to_1_are_named(tmp_path: Path, points: str) -> None:
    text = shapes()["art-chat-apr5"].read_text()
    path = tmp_path / "shape.toml"
    path.write_text(re.sub(r"input_quantiles = .*", f"input_quantiles = {points}", text))
    with pytest.raises(TraceError, match=r"shape.toml: input_quantiles is .*; expected points \[share, tokens\]"):
        read_shape(path)


def test_trace_that_cannot_be_written_leaves_the_one_that_was_there(
    shape: WorkloadShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "t.jsonl").write_text("an earlier one")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_trace(shape, tmp_path / "t.jsonl")
    assert (tmp_path / "t.jsonl").read_text() == "an earlier one"
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_file_without_end_is_no_shape() -> None:
    with pytest.raises(TraceError, match="/dev/zero: larger than 8,192 bytes; expected a shape"):
        read_shape(Path("/dev/zero"))
