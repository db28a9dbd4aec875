"""Files of models: the same predictions after a save and a load, and clear errors for anything else."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.training.learning import Model, ModelKind, TrainingSpec
from gorgo.core.training.outcomes import COLUMNS
from gorgo.errors import ConfigError, ModelFileError
from gorgo.learning import model_file
from gorgo.learning.trainer import fit
from gorgo.learning.trees import TreesModel, check_text
from tests.learning.extra import needs_lightgbm
from tests.learning.outcomes import NAMES, training_rows, with_censoring


def fitted(kind: ModelKind = "linear", rows: int = 200) -> Model:
    return fit(training_rows(rows), TrainingSpec(kind, NAMES, epochs=1), seed=1, version=6)


SAVED = {kind: model_file.dumps(fitted(kind)) for kind in ("linear", "mlp", "rls", "residual")}


def changed(data: bytes, header: dict[str, Any] | None = None, **arrays: Any) -> bytes:
    """The file with other values; an array that is None is left out."""
    with np.load(io.BytesIO(data)) as file:
        parts = {name: file[name] for name in file.files}
    if header is not None:
        old = json.loads(parts["header"].tobytes())
        parts["header"] = np.frombuffer(json.dumps(old | header).encode(), dtype=np.uint8)
    parts = {name: value for name, value in (parts | arrays).items() if value is not None}
    file = io.BytesIO()
    np.savez(file, **parts)
    return file.getvalue()


@pytest.mark.parametrize("kind", get_args(ModelKind))
def test_loaded_model_is_the_saved_one(kind: ModelKind, tmp_path: Path) -> None:
    model, table = fitted(kind), training_rows(50, seed=3).features
    path = tmp_path / "model.npz"
    model_file.save(model, path)
    loaded = model_file.load(path, names=NAMES, kinds=(model.kind,))
    assert (loaded.kind, loaded.version, loaded.names, loaded.samples) == (model.kind, 6, NAMES, 200)
    assert (loaded.low == model.low).all()
    assert (loaded.high == model.high).all()
    assert (loaded.ttft_s(table) == model.ttft_s(table)).all()
    assert str(loaded.tpot_s(table)) == str(model.tpot_s(table))
    assert model_file.dumps(loaded) == model_file.dumps(model)


def test_save_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.write_text("old")
    model_file.save(fitted(), path)
    model_file.save(fitted("mlp"), path)
    assert model_file.load(path).kind == "mlp"
    assert [each.name for each in tmp_path.iterdir()] == ["model.npz"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        model_file.load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "model.npz: an empty file; expected a model file that GORGO wrote"),
        (b"{}", "model.npz: no npz file; expected a model file"),
        (b"PK\x03\x04 and nothing", "model.npz: damaged"),
    ],
)
def test_what_is_no_model_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        model_file.loads(data, "model.npz")


def test_array_that_the_model_does_not_use_is_ignored() -> None:
    assert model_file.loads(changed(SAVED["mlp"], other=np.ones(3)), "m").kind == "mlp"


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (npz(weights=np.ones(3)), "m: an npz file without a header; expected"),
        (npz(header=np.ones(3)), "m: an npz file without a header; expected"),
        (npz(header=np.frombuffer(b"{", dtype=np.uint8)), "m: header: no JSON"),
        (npz(header=np.frombuffer(b"[]", dtype=np.uint8)), "m: header: another format"),
        (npz(header=np.array([{}], dtype=object)), "m: damaged"),
        (changed(SAVED["mlp"], {"format": "other"}), "m: header: another format"),
        (changed(SAVED["mlp"], {"format_version": 2}), "m: format_version: 2; expected 1: train a new model"),
        (changed(SAVED["mlp"], {"kind": "oracle"}), "m: kind: 'oracle'; expected one of mlp, linear, rls"),
        (changed(SAVED["mlp"], {"names": "kv"}), "m: names: 'kv'; expected a list of names"),
        (changed(SAVED["mlp"], {"names": ["kv", "kv"]}), "m: names: .* different names"),
        (changed(SAVED["mlp"], {"version": -1}), "m: version: -1; expected a count from 0"),
        (changed(SAVED["mlp"], {"samples": True}), "m: samples: True; expected a count from 0"),
        (changed(SAVED["mlp"], {"parts": {"hidden": [0]}}), r"m: hidden: \[0\]; expected 1 to 8 widths"),
        (
            changed(SAVED["mlp"], {"parts": {"hidden": [64]}}),
            "m: parameters: float32 .*; expected 577 float32",
        ),
        (changed(SAVED["mlp"], {"parts": 7}), "m: hidden: None"),
        (
            changed(SAVED["mlp"], {"parts": {"hidden": [128, 128, 128], "target": "ms"}}),
            "m: target: 'ms'; expected seconds or log",
        ),
        (changed(SAVED["mlp"], low=None), "m: low: no such array; expected 7 float32 numbers"),
        (changed(SAVED["mlp"], low=np.zeros(6, np.float32)), r"m: low: float32 of shape \(6,\); expected 7 float32"),
        (changed(SAVED["mlp"], mean=np.zeros(7)), r"m: mean: float64 of shape \(7,\); expected 7 float32"),
        (changed(SAVED["mlp"], high=np.full(7, np.nan, np.float32)), "m: high: a number that is not finite"),
        (changed(SAVED["linear"], {"parts": {"squares": [7]}}), r"m: squares: \[7\]; expected columns from 0 to 6"),
        (changed(SAVED["rls"], tpot_weights=np.zeros(2)), "m: tpot_weights: float64 of shape"),
        (
            changed(SAVED["residual"], {"parts": {"hidden": [32, 32], "factor": "1"}}),
            "m: factor: '1'; expected",
        ),
        (changed(SAVED["residual"], {"names": [*NAMES[:-1], "other"]}), "m: names: .*; expected prior_s among them"),
        (changed(SAVED["mlp"], {"kind": "trees"}), "m: boosters: None; expected a list of names"),
        (
            changed(SAVED["mlp"], {"kind": "trees", "parts": {"boosters": ["tpot"]}}),
            "m: boosters: tpot; expected",
        ),
    ],
)
def test_damaged_or_foreign_part_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_file.loads(data, "m")


def test_model_of_other_features_or_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"m: features: uncached_tokens, .*; expected kv_usage, rtt_s"):
        model_file.loads(SAVED["mlp"], "m", names=("kv_usage", "rtt_s"))
    with pytest.raises(ModelFileError, match="m: kind: 'mlp'; expected one of trees, rls"):
        model_file.loads(SAVED["mlp"], "m", kinds=("trees", "rls"))


@given(st.data())
def test_cut_or_flipped_file_is_refused_or_is_the_model(data: st.DataObject) -> None:
    whole = SAVED["linear"]
    cut = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    flipped = bytearray(whole)
    flipped[cut] ^= flip
    with pytest.raises(ModelFileError):
        model_file.loads(whole[:cut], "m")
    try:
        loaded = model_file.loads(bytes(flipped), "m")
    except ModelFileError:
        return
    assert model_file.dumps(loaded) == whole


def test_file_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "MAX_BYTES", 10_000)
    with pytest.raises(ModelFileError, match=r"m: arrays of .* bytes; expected at most 10000"):
        model_file.loads(npz_compressed(weights=np.zeros(10_000)), "m")
    with pytest.raises(ModelFileError, match="m: more than 10000 bytes"):
        model_file.loads(b"PK" + bytes(10_000), "m")


def npz_compressed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def test_pickles_are_never_read() -> None:
    data = npz(header=np.array([{"format": "gorgo-model"}], dtype=object))
    with pytest.raises(ModelFileError, match=r"m: damaged .*pickle"):
        model_file.loads(data, "m")


@needs_lightgbm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ttft_text": np.frombuffer(b"no trees", np.uint8)}, "m: ttft_text: no model"),
        ({"ttft_columns": np.array([0, 99])}, r"m: ttft_columns: \[0, 99\]; expected columns from 0 to 6"),
        (
            {"ttft_columns": np.array([0, 1])},
            "m: ttft_text: no model .max_feature_idx '6'; expected 1.; exp",
        ),
    ],
)
def test_damaged_trees_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        model_file.loads(changed(model_file.dumps(fitted("trees")), **change), "m")


#: A tree of four leaves over two columns, one of them of categories.
TREE = """tree
version=v4
num_class=1
num_tree_per_iteration=1
label_index=0
max_feature_idx=1
objective=regression
feature_names=a b
feature_infos=[0:1] -1:3:0:1:2
tree_sizes={size}

{tree}end of trees

pandas_categorical:null
"""
FOUR_LEAVES = """Tree=0
num_leaves=4
num_cat=1
split_feature=1 0 0
split_gain=4 2 1
threshold=0 0.4 0.6
decision_type=1 2 2
left_child=1 -1 -2
right_child=2 -3 -4
leaf_value=1 2 3 4
leaf_weight=5 5 5 5
leaf_count=5 5 5 5
internal_value=1 2 3
internal_weight=20 10 10
internal_count=20 10 10
cat_boundaries=0 1
cat_threshold=3
is_linear=0
shrinkage=1


"""


def with_tree(tree: str, text: str = TREE) -> str:
    return text.format(size=len(tree), tree=tree)


def test_trees_of_that_form_are_accepted() -> None:
    check_text(with_tree(FOUR_LEAVES), 2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        # Each of these aborts LightGBM, is followed for ever, or reads and writes memory of others.
        ("left_child=1 -1 -2", "left_child=1 0 -2", "left_child that is neither a later node nor a leaf"),
        ("left_child=1 -1 -2", "left_child=1 -9 -2", "left_child that is neither a later node nor a leaf"),
        ("right_child=2 -3 -4", "right_child=9 -3 -4", "right_child that is neither a later node nor a leaf"),
        ("right_child=2 -3 -4", "right_child=2 -3", "2 numbers of right_child; expected 3"),
        ("right_child=2 -3 -4\n", "", "no right_child"),
        ("split_feature=1 0 0", "split_feature=1 0 7", "split_feature that is not 0 to 1"),
        ("split_feature=1 0 0", "split_feature=1 0 -1", "split_feature that is not 0 to 1"),
        ("num_leaves=4", "num_leaves=4000000000", "expected 3999999999"),
        ("num_leaves=4", "num_leaves=-4", "leaves, categories or linear leaves that there are not"),
        ("num_leaves=4", "num_leaves=4\nnum_leaves=9", "the line 'num_leaves=9'"),
        ("leaf_value=1 2 3 4", "leaf_value=1 2 3 nan", "leaf_value that is not finite"),
        ("leaf_value=1 2 3 4", "leaf_value=1 2 3", "3 numbers of leaf_value; expected 4"),
        ("threshold=0 0.4", "threshold=1 0.4", "threshold of categories that is not 0 to 0"),
        ("decision_type=1 2 2", "decision_type=1 2 1", "threshold of categories"),
        ("decision_type=1 2 2", "decision_type=1 2 14", "decision_type that there is not"),
        ("cat_boundaries=0 1", "cat_boundaries=0 99", "1 numbers of cat_threshold; expected 99"),
        ("cat_boundaries=0 1", "cat_boundaries=-5 1", "cat_boundaries that do not ascend"),
        ("is_linear=0", "is_linear=1", "linear leaves"),
        ("shrinkage=1", "shrinkage=1\nleaf_features=0", "the line 'leaf_features=0'"),
        ("shrinkage=1\n\n\n", "shrinkage=1\n", "no end"),
    ],
)
def test_trees_that_lightgbm_would_follow_astray_are_refused(before: str, after: str, message: str) -> None:
    assert before in FOUR_LEAVES
    with pytest.raises(ValueError, match=message):
        check_text(with_tree(FOUR_LEAVES.replace(before, after)), 2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("num_class=1", "num_class=9", "num_class '9'; expected 1"),
        ("num_tree_per_iteration=1", "num_tree_per_iteration=9", "num_tree_per_iteration '9'; expected 1"),
        ("objective=regression", "objective=multiclass num_class:9", "expected regression"),
        ("max_feature_idx=1", "max_feature_idx=8", "max_feature_idx '8'; expected 1"),
        ("tree_sizes={size}", "tree_sizes=20 {size}", "no end"),
        ("tree_sizes={size}", "tree_sizes=99999", "no tree 0 where it begins by tree_sizes"),
        ("tree_sizes={size}", "tree_sizes=", "no trees"),
        ("end of trees", "Tree=1", "no end of the trees"),
        ("tree\n", "dart\n", "another format"),
        ("label_index=0", "label_index=0\r", "another format"),
        ("label_index=0", "average_output", "the line 'average_output'"),
    ],
)
def test_a_head_that_sends_lightgbm_astray_is_refused(before: str, after: str, message: str) -> None:
    assert before in TREE
    with pytest.raises(ValueError, match=message):
        check_text(with_tree(FOUR_LEAVES, TREE.replace(before, after, 1)), 2)


@needs_lightgbm
@pytest.mark.parametrize("rows", [5, 30, 1500])
def test_trees_of_any_training_pass(rows: int) -> None:
    model = fitted("trees", rows)
    assert isinstance(model, TreesModel)
    censored = fit(
        with_censoring(training_rows(400), seed=1, patience_s=0.5), TrainingSpec("trees", NAMES), seed=1, version=1
    )
    for found in (model, censored):
        assert model_file.loads(model_file.dumps(found), "m").kind == "trees"


@needs_lightgbm
def test_trees_without_the_package_are_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    data = model_file.dumps(fitted("trees"))
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(ModelFileError, match=r"m: kind: 'trees'; expected .*gorgo-router\[learned\]"):
        model_file.loads(data, "m")


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = replace(training_rows(50, first_seq=700), unstreamed=np.arange(50) % 3 == 0)
    path = tmp_path / "outcomes.npz"
    path.write_bytes(model_file.dump_outcomes(rows))
    found = model_file.load_outcomes(path, names=NAMES)
    assert (found.first_seq, len(found)) == (700, 50)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_file_of_outcomes_is_refused(tmp_path: Path, share: float) -> None:
    whole = model_file.dump_outcomes(training_rows(50))
    path = tmp_path / "outcomes.npz"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelFileError, match=r"outcomes\.npz"):
        model_file.load_outcomes(path, names=NAMES)


def test_outcomes_of_other_features_or_impossible_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.npz"
    path.write_bytes(model_file.dump_outcomes(training_rows(5)))
    with pytest.raises(ModelFileError, match=r"features: .*; expected rtt_s"):
        model_file.load_outcomes(path, names=("rtt_s",))
    rows = training_rows(5)
    for bad in (replace(rows, ttft_s=-rows.ttft_s), replace(rows, e2e_s=0.5 * rows.ttft_s)):
        path.write_bytes(model_file.dump_outcomes(bad))
        with pytest.raises(ModelFileError, match="outcomes that no attempt can leave"):
            model_file.load_outcomes(path, names=NAMES)
    path.write_bytes(model_file.dump_outcomes(replace(rows, slots=rows.slots[:3])))
    with pytest.raises(ModelFileError, match=r"slots: .*of shape"):
        model_file.load_outcomes(path, names=NAMES)
    path.write_bytes(SAVED["linear"])
    with pytest.raises(ModelFileError, match="another format"):
        model_file.load_outcomes(path, names=NAMES)
