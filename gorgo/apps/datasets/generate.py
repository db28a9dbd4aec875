"""From a shape to a trace: the generators behind one verb each for a file, for memory and for bytes.

The same shape gives the same requests everywhere, in memory and through a file.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from gorgo.apps.datasets.conversations import conversation_rows
from gorgo.apps.datasets.poisson import poisson_rows
from gorgo.apps.datasets.shape import PoissonShape, Shape, UsersShape
from gorgo.apps.datasets.synthetic import MadeRow, as_lines, as_requests
from gorgo.apps.datasets.users import user_rows
from gorgo.apps.traces import TraceRequest
from gorgo.config.atomic import PUBLIC, write_atomically


def generate_requests(shape: Shape) -> list[TraceRequest]:
    """The trace in memory: what reading the file of `write_trace` would give, without the file."""
    return as_requests(_rows(shape))


def generate_trace(shape: Shape) -> bytes:
    """The trace as JSON lines, in the order of time."""
    return as_lines(_rows(shape))


def write_trace(shape: Shape, path: Path) -> None:
    """Writes it whole, compressed where the name ends in .gz; no time stamp or name goes into the file."""
    text = generate_trace(shape)
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text, mode=PUBLIC)


def _rows(shape: Shape) -> Iterator[MadeRow]:
    match shape:
        case UsersShape():
            return user_rows(shape)
        case PoissonShape():
            return poisson_rows(shape)
        case _:
            return conversation_rows(shape)
