"""Shipped traces and shapes by name, traces made from shapes, the requests of any of them, and their statistics.

Owns the names and what they stand for. Leaves the rows to the generators and files to `gorgo.lab.traces`. A shape gives
the same requests on every machine, in memory and through a file.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

import numpy as np

import gorgo
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import TraceError
from gorgo.lab.datasets.prefix_shapes import AgentsShape, GroupsShape, HerdShape, RagShape, SharingShape
from gorgo.lab.datasets.shape import PoissonShape, Shape, UsersShape, read_shape
from gorgo.lab.datasets.synthetic import MadeRow, as_lines, as_requests, conversation_rows, poisson_rows
from gorgo.lab.datasets.users import agent_rows, group_rows, herd_rows, rag_rows, sharing_rows, user_rows
from gorgo.lab.request_log import is_request_log, load_request_log
from gorgo.lab.traces import BLOCK_TOKENS, TraceFilters, TraceRequest, file_block_tokens, load_trace

#: Trace of `gorgo demo`.
DEMO_TRACE = "chat-small"
#: Suffix of files with a shape.
SHAPE_SUFFIX = ".toml"
#: Mean times between two requests beyond which time stamps look like those of another unit, s. Published traces have
#: 0.03 to 10 s. A mean of few requests says nothing.
_GAP_S = (0.002, 200.0)
_FEW = 4


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
    shipped = (Dataset(name, shape.with_name(f"{name}.jsonl.gz"), shape) for name, shape in shapes().items())
    return sorted((one for one in shipped if one.path.exists()), key=lambda dataset: dataset.name)


def shipped_path(name: str) -> Path:
    """Return the path of the shipped trace of that name; raises `TraceError` with the names there are."""
    paths = {dataset.name: dataset.path for dataset in datasets()}
    if name not in paths:
        raise TraceError(f"no data set {name!r} comes with gorgo; there are: {', '.join(paths) or 'none'}")
    return paths[name]


def generate_requests(shape: Shape, *, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Return the requests of a shape: those of the file that `write_trace` writes, or the same in other blocks."""
    return as_requests(_rows(shape), block_tokens=block_tokens)


def generate_trace(shape: Shape) -> bytes:
    """Return the trace of a shape as JSON lines, in the order of time, in blocks of the shape's size."""
    return as_lines(_rows(shape), block_tokens=shape.block_tokens)


def write_trace(shape: Shape, path: Path) -> None:
    """Write the trace of a shape, compressed where the name ends in .gz; the file has no time stamp and no name."""
    text = generate_trace(shape)
    write_atomically(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text, mode=PUBLIC)


def load_requests(
    trace: str | Path,
    filters: TraceFilters | None = None,
    *,
    seed: int | None = None,
    block_tokens: int | None = None,
) -> list[TraceRequest]:
    """Return the requests that pass `filters`, in the order of time, the first at 0.

    `trace` is the path of a trace, a request log or a shape, else the name of a shipped one. `seed` replaces the seed
    of a shape and so selects another window; it is drawn in blocks of `block_tokens`, by default of 512. Those of a
    trace are of this size, by default of that which it names, and those of a log of 512 tokens. Raises `TraceError` as
    `load_trace` and `load_request_log` do, and for an unknown name.

    Example
    -------
    >>> len(load_requests("art-chat-apr5", TraceFilters(limit=60), seed=3))
    60
    """
    shape = _shape_of(trace)
    if shape is not None:
        return _generated(shape, filters or TraceFilters(), seed, block_tokens or BLOCK_TOKENS)
    shipped = {one.name: one.path for one in datasets()}
    path = Path(trace) if Path(trace).exists() else shipped.get(str(trace))
    if path is None:
        names = ", ".join(sorted({*shipped, *shapes()}))
        raise TraceError(f"{trace}: No such file, and no data set of that name; there are: {names}")
    if not is_request_log(path):
        return load_trace(path, filters, block_tokens=block_tokens)
    if block_tokens not in (None, BLOCK_TOKENS):
        raise TraceError(
            f"{path}: a request log is read in blocks of {BLOCK_TOKENS} tokens; expected it without --block-tokens"
        )
    return load_request_log(path, filters)


def unit_warning(trace: str | Path, requests: int, span_s: float) -> str | None:
    """Return a warning where so many requests in `span_s` look like time stamps in another unit than milliseconds.

    >>> unit_warning("t.jsonl", 101, 0.05)
    't.jsonl: 0.5 ms from one request to the next on average; the time stamps look like seconds, expected milliseconds'
    >>> unit_warning("t.jsonl", 101, 100_000.0).split("; ")[1]
    'the time stamps look like microseconds, expected milliseconds'
    >>> unit_warning("t.jsonl", 101, 100.0), unit_warning("t.jsonl", 101, 0.0)
    (None, None)
    """
    if _shape_of(trace) is not None or is_request_log(Path(trace)):
        return None  # of known units
    least_s, most_s = _GAP_S
    gap_s = span_s / max(requests - 1, 1)
    if requests < _FEW or gap_s == 0 or least_s <= gap_s <= most_s:
        return None
    unit, shown = ("seconds", f"{gap_s * 1e3:.3g} ms") if gap_s < least_s else ("microseconds", f"{gap_s:,.0f} s")
    average = f"{trace}: {shown} from one request to the next on average"
    return f"{average}; the time stamps look like {unit}, expected milliseconds"


def content_digest(trace: str | Path) -> str | None:
    """Return a digest of the file of a trace or shape, by path or name; None if it is no regular file."""
    shipped = {one.name: one.path for one in datasets()}
    path = _shape_of(trace) or (Path(trace) if Path(trace).exists() else shipped.get(str(trace)))
    if path is None or not path.is_file():
        return None
    status = path.stat()
    return _file_digest((path, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=64)
def _file_digest(version: tuple[Path, int, int]) -> str:
    """Hash a version of a file once: its path, its time of change in ns, and its size."""
    with version[0].open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def is_shape(trace: str | Path) -> bool:
    """Return whether a seed draws the requests of a trace."""
    return _shape_of(trace) is not None


def own_block_tokens(trace: str | Path) -> int:
    """Return the tokens of a block in which a shape's prefixes are drawn, or that a file names; 512 for others."""
    shape = _shape_of(trace)
    if shape is not None:
        return read_shape(shape).block_tokens
    path = Path(trace)
    return file_block_tokens(path) if path.is_file() and not is_request_log(path) else BLOCK_TOKENS


def _shape_of(trace: str | Path) -> Path | None:
    """Return the file of the shape that `trace` names, if it names one."""
    path = Path(trace)
    if path.suffix == SHAPE_SUFFIX:
        return path
    shipped = {one.name for one in datasets()}
    return None if path.exists() or str(trace) in shipped else shapes().get(str(trace))


def _generated(path: Path, filters: TraceFilters, seed: int | None, block_tokens: int) -> list[TraceRequest]:
    shape = read_shape(path)
    drawn = shape if seed is None else replace(shape, seed=seed)
    requests = filters.apply(generate_requests(drawn, block_tokens=block_tokens))
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def _rows(shape: Shape) -> Iterator[MadeRow]:
    match shape:
        case UsersShape():
            return user_rows(shape)
        case PoissonShape():
            return poisson_rows(shape)
        case GroupsShape():
            return group_rows(shape)
        case SharingShape():
            return sharing_rows(shape)
        case RagShape():
            return rag_rows(shape)
        case HerdShape():
            return herd_rows(shape)
        case AgentsShape():
            return agent_rows(shape)
        case _:
            return conversation_rows(shape)


def _folder() -> Path:
    """Return the folder of shipped traces: inside an installed package, or beside it in a clone."""
    package = Path(gorgo.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "datasets"


# Statistics of a trace: those of tables 1 and 4 of the GORGO paper.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStats:
    """Statistics of a trace. Lengths are in tokens; None is unknown.

    Parameters
    ----------
    users, requests_per_user:
        None unless every request has its user.
    turns_mean:
        Questions in a prompt, the new one and those of its history, on average over multi-turn requests.
    multi_turn_share:
        Ratio of requests with more than one question in the prompt. Both are None unless every request has its turns.
    block_reuse, user_block_reuse:
        Share of all 512-token blocks that an earlier request of the trace had too, and that an earlier request of the
        same user had. Requests before the trace do not count: the first request of each user is cold.
    """

    requests: int
    duration_s: float
    requests_per_s: float
    users: int | None
    requests_per_user: float | None
    turns_mean: float | None
    multi_turn_share: float | None
    input_p50: float
    input_mean: float
    input_p95: float
    output_mean: float
    block_reuse: float | None
    user_block_reuse: float | None


def describe_trace(requests: Sequence[TraceRequest]) -> TraceStats:
    """Figures of a loaded trace with at least one request, which are in the order of time."""
    inputs = np.array([request.input_tokens for request in requests], dtype=float)
    duration_s = requests[-1].timestamp_s - requests[0].timestamp_s
    users = None if any(request.user is None for request in requests) else len({r.user for r in requests})
    turns_mean, multi_turn_share = _turns(requests)
    return TraceStats(
        requests=len(requests),
        duration_s=duration_s,
        requests_per_s=len(requests) / duration_s if duration_s else float("nan"),
        users=users,
        requests_per_user=len(requests) / users if users else None,
        turns_mean=turns_mean,
        multi_turn_share=multi_turn_share,
        input_p50=float(np.median(inputs)),
        input_mean=float(inputs.mean()),
        input_p95=float(np.quantile(inputs, 0.95)),
        output_mean=float(np.mean([request.output_tokens for request in requests])),
        block_reuse=_block_reuse(requests),
        user_block_reuse=_block_reuse(requests, by_user=True) if users else None,
    )


def _turns(requests: Sequence[TraceRequest]) -> tuple[float | None, float | None]:
    turns = [request.turns for request in requests if request.turns is not None]
    if len(turns) < len(requests):
        return None, None
    several = [count for count in turns if count > 1]
    return (float(np.mean(several)) if several else None), len(several) / len(turns)


def _block_reuse(requests: Sequence[TraceRequest], *, by_user: bool = False) -> float | None:
    """None where a trace has texts but no ids of blocks."""
    stored_by_user: dict[str | None, set[int]] = {}
    reused = total = 0
    for request in requests:
        stored = stored_by_user.setdefault(request.user if by_user else None, set())
        reused += sum(hash_id in stored for hash_id in request.hash_ids)
        total += len(request.hash_ids)
        stored.update(request.hash_ids)
    return reused / total if total else None
