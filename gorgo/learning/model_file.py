"""Files of models: numpy's npz with a JSON header as one of its arrays, and no pickle.

A file that is damaged, foreign or of other features is refused with its place and what was expected, so that a policy
starts without a model. Checksums are those of the zip format.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.config.atomic import write_atomically
from gorgo.core.training.model import Model
from gorgo.errors import ModelFileError
from gorgo.learning.model_parts import READERS, ModelParts

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
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    return loads(data, str(path), names=names, kinds=kinds)


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
    data: bytes, place: str, *, names: tuple[str, ...] | None = None, kinds: Collection[str] | None = None
) -> Model:
    """Return the model of a file's bytes, as `load` does; `place` names the file in errors."""
    arrays = _arrays(data, place)
    header = _header(arrays, place)
    parts = ModelParts(place, header, arrays)
    if parts.kind not in READERS:
        raise ModelFileError(f"{place}: kind", repr(parts.kind), f"one of {', '.join(READERS)}")
    if kinds is not None and parts.kind not in kinds:
        raise ModelFileError(f"{place}: kind", repr(parts.kind), f"one of {', '.join(kinds)}")
    if names is not None and parts.names != names:
        raise ModelFileError(f"{place}: features", ", ".join(parts.names), ", ".join(names))
    return READERS[parts.kind](parts)


def _arrays(data: bytes, place: str) -> dict[str, NDArray[Any]]:
    """Return all arrays of a file; numpy checks each one's length, zip its checksum."""
    if len(data) > MAX_BYTES:
        raise ModelFileError(place, f"more than {MAX_BYTES} bytes", _EXPECTED)
    if not data.startswith(b"PK"):
        raise ModelFileError(place, "no npz file" if data else "an empty file", _EXPECTED)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ModelFileError(place, f"arrays of {size} bytes", f"at most {MAX_BYTES}")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    # What numpy and zipfile raise for bytes that neither wrote.
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ModelFileError(place, f"damaged ({error})", _EXPECTED) from error
    except (MemoryError, RuntimeError, SyntaxError) as error:
        raise ModelFileError(place, f"damaged ({error})", _EXPECTED) from error


def _header(arrays: dict[str, NDArray[Any]], place: str) -> dict[str, Any]:
    text = arrays.get(_HEADER)
    if text is None or text.dtype != np.uint8:
        raise ModelFileError(place, "an npz file without a header", _EXPECTED)
    try:
        header = json.loads(text.tobytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{place}: header", f"no JSON ({error})", _EXPECTED) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ModelFileError(f"{place}: header", "another format", _EXPECTED)
    if header.get("format_version") != FORMAT_VERSION:
        raise ModelFileError(
            f"{place}: format_version", repr(header.get("format_version")), f"{FORMAT_VERSION}: train a new model"
        )
    return header
