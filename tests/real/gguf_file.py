"""Writes GGUF version 3, the file that llama.cpp loads: metadata, then tensors, 32-byte aligned, little-endian."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Value = str | bool | int | float | Sequence[str] | Sequence[int]

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TENSOR_F32 = 0


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Writes the whole file; tensors are given as (outputs, inputs) and stored with the inner dimension first."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _typed(value))
        offset = 0
        for name, tensor in tensors.items():
            file.write(_tensor_info(name, tensor, offset))
            offset += _padded(tensor.nbytes)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for tensor in tensors.values():
            file.write(tensor.tobytes() + bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _tensor_info(name: str, tensor: NDArray[np.float32], offset: int) -> bytes:
    shape = tensor.shape[::-1]
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _TENSOR_F32, offset)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _:
            return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_string, texts))
    return struct.pack(f"<IQ{len(values)}i", _I32, len(values), *values)
