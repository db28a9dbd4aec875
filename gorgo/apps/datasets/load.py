"""Any trace by one word: a file, the name of a trace that comes along, or a shape, which is generated in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gorgo.apps.datasets.generate import generate_requests
from gorgo.apps.datasets.shape import read_shape
from gorgo.apps.datasets.shipped import datasets, shapes
from gorgo.apps.traces import TraceFilters, TraceRequest, load_trace
from gorgo.errors import TraceError

#: A file that ends so holds a shape, not a trace.
SHAPE_SUFFIX = ".toml"


def load_requests(
    trace: str | Path, filters: TraceFilters | None = None, *, seed: int | None = None
) -> list[TraceRequest]:
    """The requests that `filters` keep, in order of time, the first at 0.

    `trace` is a path, or the name of a shipped trace, or that of a shape; a file of that name goes before the others.
    `seed` is the one of a shape in place of its own, and picks the window; a trace has nothing to draw.
    Raises `TraceError` for what `load_trace` does, and for a name that nothing has.

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
