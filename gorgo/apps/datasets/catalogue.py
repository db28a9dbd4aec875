"""Shipped traces and shapes by name, traces made from shapes, and the requests of any of them.

A shape gives the same requests on every machine, in memory and through a file.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gorgo
from gorgo.apps.datasets.conversations import conversation_rows
from gorgo.apps.datasets.poisson import poisson_rows
from gorgo.apps.datasets.shape import PoissonShape, Shape, UsersShape, read_shape
from gorgo.apps.datasets.synthetic import MadeRow, as_lines, as_requests
from gorgo.apps.datasets.users import user_rows
from gorgo.apps.traces import TraceFilters, TraceRequest, load_trace
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import TraceError

#: Trace of `gorgo demo`.
DEMO_TRACE = "chat-small"
#: Suffix of files with a shape.
SHAPE_SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A shipped trace; `shape` is the file with its generator's parameters."""

    name: str
    path: Path
    shape: Path


def shapes() -> dict[str, Path]:
    """Return the files of all shipped shapes by name, including those whose trace is not shipped."""
    return {path.stem: path for path in sorted(_folder().glob(f"*{SHAPE_SUFFIX}"))}


def datasets() -> list[Dataset]:
    """Return all shipped traces, in the order of their names."""
    found = (Dataset(name, shape.with_name(f"{name}.jsonl.gz"), shape) for name, shape in shapes().items())
    return sorted((one for one in found if one.path.exists()), key=lambda dataset: dataset.name)


def shipped_path(name: str) -> Path:
    """Return the path of the shipped trace of that name; raises `TraceError` with the names there are."""
    found = {dataset.name: dataset.path for dataset in datasets()}
    if name not in found:
        raise TraceError(f"no data set {name!r} comes with gorgo; there are: {', '.join(found) or 'none'}")
    return found[name]


def generate_requests(shape: Shape) -> list[TraceRequest]:
    """Return the requests of a shape: those of the file that `write_trace` writes."""
    return as_requests(_rows(shape))


def generate_trace(shape: Shape) -> bytes:
    """Return the trace of a shape as JSON lines, in the order of time."""
    return as_lines(_rows(shape))


def write_trace(shape: Shape, path: Path) -> None:
    """Write the trace of a shape, compressed where the name ends in .gz; the file has no time stamp and no name."""
    text = generate_trace(shape)
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text, mode=PUBLIC)


def load_requests(
    trace: str | Path, filters: TraceFilters | None = None, *, seed: int | None = None
) -> list[TraceRequest]:
    """Return the requests that pass `filters`, in the order of time, the first at 0.

    `trace` is the path of a trace or a shape, else the name of a shipped one. `seed` replaces the seed of a shape and
    so selects another window. Raises `TraceError` as `load_trace` does, and for an unknown name.

    Example
    -------
    >>> len(load_requests("art-chat-apr5", TraceFilters(limit=60), seed=3))
    60
    """
    name, path = str(trace), Path(trace)
    shipped = {one.name: one.path for one in datasets()}
    shape = path if path.suffix == SHAPE_SUFFIX else shapes().get(name)
    if path.exists() and path.suffix != SHAPE_SUFFIX:
        return load_trace(path, filters)
    if name in shipped:
        return load_trace(shipped[name], filters)
    if shape is not None:
        return _generated(shape, filters or TraceFilters(), seed)
    raise TraceError(
        f"{name}: No such file, and no data set of that name; there are: {', '.join(sorted({*shipped, *shapes()}))}"
    )


def _generated(path: Path, filters: TraceFilters, seed: int | None) -> list[TraceRequest]:
    shape = read_shape(path)
    requests = filters.apply(generate_requests(shape if seed is None else replace(shape, seed=seed)))
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def _rows(shape: Shape) -> Iterator[MadeRow]:
    match shape:
        case UsersShape():
            return user_rows(shape)
        case PoissonShape():
            return poisson_rows(shape)
        case _:
            return conversation_rows(shape)


def _folder() -> Path:
    """Return the folder of shipped traces: inside an installed package, or beside it in a clone."""
    package = Path(gorgo.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "datasets"
