"""The proxy's request log as a trace, for `gorgo tune-offline`.

Owns the reading and the step from bytes to blocks. The form is `gorgo.live.telemetry.request_log_file`'s.

Theory of operation. A hash in the log ends at a multiple of 2,048 bytes of text, an id in a trace at a multiple of 512
tokens, and a model's tokens are of any length. So the bytes per token of each model are taken over the whole log, and
the id of a block is made of the first hash that ends where the block does or later. One ratio per model, not one per
request: requests that shared hashes then share ids, and never more than they shared. Blocks beyond the last hash are
not shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median_low

from gorgo.apps.request_log_lines import LoggedRequest, LogReader
from gorgo.apps.traces import BLOCK_TOKENS, TraceFilters, TraceRequest
from gorgo.apps.traces.load import SPAN_S_MAX
from gorgo.errors import TraceError


@dataclass(frozen=True, slots=True)
class RequestLogTrace:
    """The contents of a log.

    Parameters
    ----------
    requests:
        In order of time; `timestamp_s` is wall-clock time.
    boots:
        Runs of the proxy that wrote it. Prefixes are shared within one only, so that each begins cold.
    guessed_outputs:
        Requests without a reported output length; the median of their model replaces it.
    skipped:
        Invalid requests (4xx), which no replica served.
    cut_lines:
        Lines that a killed process or a full disk left unfinished.
    """

    requests: tuple[TraceRequest, ...]
    boots: int
    guessed_outputs: int
    skipped: int
    cut_lines: int


def is_request_log(path: Path) -> bool:
    """Whether the file begins as one; False for one that cannot be read, and for a pipe, which could be read once."""
    if path.is_fifo():
        return False
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b'{"gorgo_request_log"')
    except OSError:
        return False


def load_request_log(path: Path | str, filters: TraceFilters | None = None) -> list[TraceRequest]:
    """The requests that `filters` keep, in order of time, the first at 0, as `load_trace` has them.

    Raises `TraceError` as `read_request_log` does, or when nothing is left.
    """
    requests = (filters or TraceFilters()).apply(read_request_log(Path(path)).requests)
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def read_request_log(path: Path) -> RequestLogTrace:
    """`path` and the files that it was rotated to (`.1`, `.2`, ...), the oldest first.

    Raises `TraceError`, which names file and line, for lines that are not the proxy's, and for a log without any
    output length.
    """
    reader = LogReader()
    rows = _rows(path, reader)
    span_s = rows[-1].received_s - rows[0].received_s
    if span_s > SPAN_S_MAX:
        raise TraceError(f"{path}: {span_s:,.0f} s from the first request to the last; expected a year at most")
    ratios, outputs = _ratios(rows), _outputs(rows, path)
    requests = [
        TraceRequest(
            index=index,
            timestamp_s=row.received_s,
            input_tokens=row.input_tokens,
            output_tokens=outputs[row.model] if row.output_tokens is None else max(1, row.output_tokens),
            hash_ids=hash_ids(row.hashes, row.input_tokens, hash_tokens=row.block_bytes / ratios[row.model]),
            boundaries=row.boundaries,
        )
        for index, row in enumerate(rows)
    ]
    guessed = sum(row.output_tokens is None for row in rows)
    return RequestLogTrace(tuple(requests), reader.boots, guessed, reader.skipped, reader.cut_lines)


def read_logged_requests(path: Path) -> list[LoggedRequest]:
    """Return the lines of `path` and of the files that it was rotated to, by time; raises as `read_request_log`."""
    return _rows(path, LogReader())


def hash_ids(hashes: Sequence[int], input_tokens: int, *, hash_tokens: float) -> tuple[int, ...]:
    """Ids of the full 512-token blocks of a prompt whose hashes each stand for `hash_tokens` tokens more.

    >>> len(hash_ids([11, 12, 13], 1600, hash_tokens=512.0))
    3
    >>> hash_ids([11, 12, 13], 1600, hash_tokens=512.0)[:2] == hash_ids([11, 12, 99], 1600, hash_tokens=512.0)[:2]
    True
    """
    ids: list[int] = []
    for block in range(input_tokens // BLOCK_TOKENS):
        needed = ceil(BLOCK_TOKENS * (block + 1) / hash_tokens - 1e-9)
        if needed > len(hashes):
            break
        ids.append(_id(hashes[needed - 1], block))
    return tuple(ids)


def _id(prefix: int, block: int) -> int:
    """Two blocks that end within the same hash are two."""
    digest = blake2b(prefix.to_bytes(8, "little") + block.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _rows(path: Path, reader: LogReader) -> list[LoggedRequest]:
    rows = sorted((row for file in rotated_files(path) for row in reader.rows(file)), key=lambda row: row.received_s)
    if not rows:
        raise TraceError(f"{path}: the request log has no request that a replica worked for")
    return rows


def rotated_files(path: Path) -> list[Path]:
    """Return a log and the files that it was rotated to, oldest first."""
    older = []
    for number in count(1):
        file = path.with_name(f"{path.name}.{number}")
        if not file.exists():
            break
        older.append(file)
    return [*reversed(older), path]


def _ratios(rows: Iterable[LoggedRequest]) -> dict[str | None, float]:
    """Bytes per token of each model."""
    text: dict[str | None, int] = defaultdict(int)
    tokens: dict[str | None, int] = defaultdict(int)
    for row in rows:
        text[row.model] += row.text_bytes
        tokens[row.model] += row.input_tokens
    return {model: max(text[model], 1) / tokens[model] for model in tokens}


def _outputs(rows: Iterable[LoggedRequest], path: Path) -> dict[str | None, int]:
    """Return the replacement of unknown output lengths by model: its median, else that of all models."""
    known: dict[str | None, list[int]] = defaultdict(list)
    models = set()
    for row in rows:
        models.add(row.model)
        if row.output_tokens is not None:
            known[row.model].append(max(1, row.output_tokens))
    everything = [tokens for found in known.values() for tokens in found]
    if not everything:
        advice = "let engines tell it: request_usage: true in regions.yaml"
        raise TraceError(f"{path}: no request has output_tokens; {advice}")
    return {model: median_low(known.get(model) or everything) for model in models}
