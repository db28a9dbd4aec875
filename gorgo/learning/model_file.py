"""Files of models: numpy's npz with a JSON header as one of its arrays, and no pickle.

Owns the format (`save`, `load`), and the checks of each value in it (`ModelParts`). A file that is damaged, foreign or
of other features is refused with its place and what was expected, so that a policy starts without a model. Checksums
are those of the zip format. The outcomes that a training begins with after a restart have the same format
(`dump_outcomes`, `load_outcomes`).
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray

from gorgo.config.atomic import write_atomically
from gorgo.core.numeric import is_number
from gorgo.core.training.learning import Model, TargetKind
from gorgo.core.training.outcomes import COLUMNS, TrainingRows
from gorgo.errors import MissingExtra, ModelFileError
from gorgo.learning.base import Scaler
from gorgo.learning.linear import LinearModel
from gorgo.learning.network import MlpModel, Perceptron, parameter_count
from gorgo.learning.residual import PRIOR, EngineWaits, ResidualModel
from gorgo.learning.trees import BOOSTERS, SPLIT_BOOSTERS, Trees, TreesModel, check_text

# Models out of the header and the arrays of a file: each value is checked, and the first wrong one is named.


#: More features and wider layers than any policy has.
_MOST_NAMES, _MOST_WIDTH, _MOST_LAYERS = 1000, 4096, 8


class ModelParts:
    """What a file has, read with checks. Each method raises `ModelFileError`.

    Parameters
    ----------
    place:
        The file, for errors.
    header:
        Its JSON.
    arrays:
        Its arrays by name.
    """

    def __init__(self, source: str, header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        self._place = source
        self._header = header
        self._arrays = arrays
        parts = header.get("parts")
        self._parts: Mapping[str, Any] = parts if isinstance(parts, dict) else {}
        self.kind = str(header.get("kind"))
        self.names = self._names()

    def facts(self) -> dict[str, Any]:
        """Return the fields of `FittedModel`."""
        width = len(self.names)
        return {
            "version": self._count(self._header, "version"),
            "samples": self._count(self._header, "samples"),
            "names": self.names,
            "low": self.array("low", np.float32, width),
            "high": self.array("high", np.float32, width),
        }

    def scaler(self) -> Scaler:
        """Return the statistics of the features."""
        width = len(self.names)
        return Scaler(self.array("mean", np.float32, width), self.array("inverse", np.float32, width))

    def network(self) -> Perceptron:
        """Return the network of the features and the hidden widths."""
        hidden = self._parts.get("hidden")
        if not isinstance(hidden, list) or not 1 <= len(hidden) <= _MOST_LAYERS or not all(map(_is_width, hidden)):
            raise self.error("hidden", repr(hidden), f"1 to {_MOST_LAYERS} widths from 1 to {_MOST_WIDTH}")
        sizes = (len(self.names), *hidden)
        return Perceptron(sizes, self.array("parameters", np.float32, parameter_count(sizes)))

    def columns(self, name: str) -> tuple[int, ...]:
        """Return a list of columns of the header."""
        columns = self._parts.get(name)
        if not isinstance(columns, list) or not all(
            type(each) is int and 0 <= each < len(self.names) for each in columns
        ):
            raise self.error(name, repr(columns), f"columns from 0 to {len(self.names) - 1}")
        return tuple(columns)

    def number(self, name: str) -> float:
        """Return a number of the header."""
        number = self._parts.get(name)
        if not is_number(number):
            raise self.error(name, repr(number), "a number")
        return float(number)

    def target(self) -> TargetKind:
        """Return the target of the training."""
        target = self._parts.get("target")
        if target not in get_args(TargetKind):
            raise self.error("target", repr(target), " or ".join(get_args(TargetKind)))
        return cast(TargetKind, target)

    def strings(self, name: str) -> list[str]:
        """Return a list of words of the header."""
        words = self._parts.get(name)
        if not isinstance(words, list) or not all(isinstance(each, str) for each in words):
            raise self.error(name, repr(words), "a list of names")
        return words

    def has(self, name: str) -> bool:
        """Return whether the file has an array."""
        return name in self._arrays

    def array(self, name: str, dtype: Any, length: int | None = None) -> NDArray[Any]:
        """Return a vector of finite numbers of one type, and of one length if given."""
        array = self._arrays.get(name)
        expected = f"{np.dtype(dtype).name} numbers" if length is None else f"{length} {np.dtype(dtype).name} numbers"
        if array is None:
            raise self.error(name, "no such array", expected)
        if array.ndim != 1 or array.dtype != dtype or (length is not None and len(array) != length):
            raise self.error(name, f"{array.dtype.name} of shape {array.shape}", expected)
        if not np.isfinite(array).all():
            raise self.error(name, "a number that is not finite", expected)
        return array

    def error(self, name: str, found: str, expected: str) -> ModelFileError:
        """Return the error of one part."""
        return ModelFileError(f"{self._place}: {name}", found, expected)

    def _names(self) -> tuple[str, ...]:
        names = self._header.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.error("names", repr(names)[:200], "a list of names of features")
        if not 1 <= len(names) <= _MOST_NAMES or len(set(names)) < len(names):
            raise self.error("names", repr(names)[:200], f"1 to {_MOST_NAMES} different names of features")
        return tuple(names)

    def _count(self, part: Mapping[str, Any], name: str) -> int:
        count = part.get(name)
        if type(count) is not int or count < 0:
            raise self.error(name, repr(count), "a count from 0")
        return count


def _is_width(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST_WIDTH


def _mlp(parts: ModelParts) -> Model:
    return MlpModel(**parts.facts(), network=parts.network(), scaler=parts.scaler(), target=parts.target())


def _residual(parts: ModelParts) -> Model:
    if PRIOR not in parts.names:
        raise parts.error("names", ", ".join(parts.names), f"{PRIOR} among them")
    return ResidualModel(
        **parts.facts(),
        network=parts.network(),
        scaler=parts.scaler(),
        factor=parts.number("factor"),
        least=parts.number("least"),
        most=parts.number("most"),
        prior_error=parts.number("prior_error"),
        waits=EngineWaits(
            step_share=parts.number("step_share"), hold_s=parts.number("hold_s"), answer_s=parts.number("answer_s")
        ),
    )


def _linear(parts: ModelParts) -> Model:
    squares = parts.columns("squares")
    count = 1 + len(parts.names) + len(squares)
    return LinearModel(
        **parts.facts(),
        kind=parts.kind,
        scaler=parts.scaler(),
        squares=squares,
        ttft_weights=parts.array("ttft_weights", np.float64, count),
        tpot_weights=parts.array("tpot_weights", np.float64, count) if parts.has("tpot_weights") else None,
    )


def _trees(parts: ModelParts) -> Model:
    names = parts.strings("boosters")
    if tuple(names) not in BOOSTERS:
        raise parts.error("boosters", ", ".join(names), " or ".join(", ".join(each) for each in BOOSTERS))
    if tuple(names) == SPLIT_BOOSTERS and "queued_requests" not in parts.names:
        raise parts.error("names", ", ".join(parts.names), "queued_requests among them")
    return TreesModel(**parts.facts(), boosters={name: _booster(parts, name) for name in names}, target=parts.target())


def _booster(parts: ModelParts, name: str) -> Trees:
    columns = parts.array(f"{name}_columns", np.int64)
    if not len(columns) or columns.min() < 0 or columns.max() >= len(parts.names):
        raise parts.error(f"{name}_columns", repr(columns.tolist()), f"columns from 0 to {len(parts.names) - 1}")
    try:
        text = parts.array(f"{name}_text", np.uint8).tobytes().decode()
        check_text(text, len(columns))
        trees = Trees(text, columns.astype(np.intp))
    except MissingExtra as error:
        raise parts.error("kind", "'trees'", str(error)) from error
    except Exception as error:
        raise parts.error(f"{name}_text", f"no model ({error})", "the text of a LightGBM model") from error
    if trees.features != len(columns):
        raise parts.error(f"{name}_text", f"trees of {trees.features} columns", f"trees of {len(columns)}")
    return trees


READERS: Mapping[str, Callable[[ModelParts], Model]] = {
    "mlp": _mlp,
    "linear": _linear,
    "rls": _linear,
    "residual": _residual,
    "trees": _trees,
}


#: Kinds that a library reads by code of its own, which a damaged file can end or occupy: in another process first.
NATIVE_KINDS = ("trees",)

FORMAT = "gorgo-model"
FORMAT_VERSION = 1
#: Largest file, and largest sum of its arrays: ten times the boosted trees of 200,000 rows.
MAX_BYTES = 64 * 1024 * 1024
_HEADER = "header"
_EXPECTED = "a model file that GORGO wrote"


def save(model: Model, path: Path) -> None:
    """Write the file atomically, readable by its owner alone. Raises `OSError`, and the file is then as it was."""
    write_atomically(path, dumps(model))


def load(path: Path, *, names: tuple[str, ...] | None = None, kinds: Collection[str] | None = None) -> Model:
    """Return the model of a file.

    Parameters
    ----------
    names, kinds:
        Features and kinds that the caller can use; all of them by default.

    Raises `ModelFileError` for a file that is damaged, foreign, of other features or of another kind, and `OSError`
    for one that cannot be read.
    """
    return loads(read(path), str(path), names=names, kinds=kinds)


def read(path: Path) -> bytes:
    """Return the bytes of a file, one more than allowed at most. Raises `OSError`."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def dumps(model: Model) -> bytes:
    """Return a model as the bytes of a file; the same model makes the same bytes."""
    arrays, parts = model.arrays()
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": model.kind,
        "version": model.version,
        "names": list(model.names),
        "samples": model.samples,
        "parts": dict(parts),
    }
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, header=text, low=model.low, high=model.high, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def loads(
    data: bytes, source: str, *, names: tuple[str, ...] | None = None, kinds: Collection[str] | None = None
) -> Model:
    """Return the model of a file's bytes, as `load` does; `source` names the file in errors."""
    arrays = _arrays(data, source)
    header = _header(arrays, source)
    parts = ModelParts(source, header, arrays)
    if parts.kind not in READERS:
        raise ModelFileError(f"{source}: kind", repr(parts.kind), f"one of {', '.join(READERS)}")
    if kinds is not None and parts.kind not in kinds:
        raise ModelFileError(f"{source}: kind", repr(parts.kind), f"one of {', '.join(kinds)}")
    if names is not None and parts.names != names:
        raise ModelFileError(f"{source}: features", ", ".join(parts.names), ", ".join(names))
    return READERS[parts.kind](parts)


def _arrays(data: bytes, source: str) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file; numpy checks each one's length, zip its checksum."""
    if len(data) > MAX_BYTES:
        raise ModelFileError(source, f"more than {MAX_BYTES} bytes", _EXPECTED)
    if not data.startswith(b"PK"):
        raise ModelFileError(source, "no npz file" if data else "an empty file", _EXPECTED)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ModelFileError(source, f"arrays of {size} bytes", f"at most {MAX_BYTES}")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    # What numpy and zipfile raise for bytes that neither wrote.
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ModelFileError(source, f"damaged ({error})", _EXPECTED) from error
    except (MemoryError, RuntimeError, SyntaxError) as error:
        raise ModelFileError(source, f"damaged ({error})", _EXPECTED) from error


def _header(
    arrays: dict[str, NDArray[Any]], source: str, *, form: str = FORMAT, expected: str = _EXPECTED
) -> dict[str, Any]:
    text = arrays.get(_HEADER)
    if text is None or text.dtype != np.uint8:
        raise ModelFileError(source, "an npz file without a header", expected)
    try:
        header = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{source}: header", f"no JSON ({error})", expected) from error
    if not isinstance(header, dict) or header.get("format") != form:
        raise ModelFileError(f"{source}: header", "another format", expected)
    if header.get("format_version") != FORMAT_VERSION:
        raise ModelFileError(
            f"{source}: format_version", repr(header.get("format_version")), f"{FORMAT_VERSION}: train a new model"
        )
    return header


# Files of outcomes: the rows of a Router's ring, by column.


OUTCOMES_FORMAT = "gorgo-outcomes"
_OUTCOMES_EXPECTED = "a file of outcomes that GORGO wrote"


def dump_outcomes(rows: TrainingRows) -> bytes:
    """Return rows as the bytes of a file."""
    header = {"format": OUTCOMES_FORMAT, "format_version": FORMAT_VERSION, "names": list(rows.names)}
    header["first_seq"] = rows.first_seq
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    file = io.BytesIO()
    # Not compressed: a round takes place each hundred outcomes, and 10,000 of them are two megabytes.
    np.savez(file, header=text, **{name: getattr(rows, name) for name in COLUMNS})
    return file.getvalue()


def load_outcomes(path: Path, *, names: tuple[str, ...]) -> TrainingRows:
    """Return the rows of a file.

    Raises `ModelFileError` for one that is damaged or of other features, and `OSError`.
    """
    arrays = _arrays(read(path), str(path))
    header = _header(arrays, str(path), form=OUTCOMES_FORMAT, expected=_OUTCOMES_EXPECTED)
    names_in_file, first_seq = header.get("names"), header.get("first_seq")
    if names_in_file != list(names):
        raise ModelFileError(f"{path}: features", repr(names_in_file)[:500], ", ".join(names))
    if type(first_seq) is not int or first_seq < 0:
        raise ModelFileError(f"{path}: first_seq", repr(first_seq)[:100], "a number from 0")
    empty = TrainingRows.empty(names)
    count = len(arrays.get("ttft_s", ()))
    for name in COLUMNS:
        column, dtype = arrays.get(name), getattr(empty, name).dtype
        shape = (count, len(names)) if name == "features" else (count,)
        if column is None or column.dtype != dtype or column.shape != shape:
            shown = "no such column" if column is None else f"{column.dtype.name} of shape {column.shape}"
            raise ModelFileError(f"{path}: {name}", shown, f"{dtype.name} of shape {shape}")
    columns: dict[str, Any] = {name: arrays[name] for name in COLUMNS}
    rows = TrainingRows(names, **columns, first_seq=first_seq)
    if not (np.isfinite(rows.features).all() and (rows.ttft_s >= 0.0).all() and (rows.e2e_s >= rows.ttft_s).all()):
        raise ModelFileError(str(path), "outcomes that no attempt can leave", _OUTCOMES_EXPECTED)
    return rows
