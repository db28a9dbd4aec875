"""The proxy's request log as a trace.

Owns the reading of log files and their rotated predecessors, the check of each line (`LoggedRequest`), and the step
from bytes to blocks. The form is `gorgo.live.logs`'s.

Theory of operation. A hash in the log ends at a multiple of 2,048 bytes of text, an id in a trace at a multiple of 512
tokens, and a model's tokens are of any length. So the bytes per token of each model are taken over the whole log, and
the id of a block is made of the first hash that ends where the block does or later. One ratio per model, not one per
request: requests that shared hashes then share ids, and never more than they shared. Blocks beyond the last hash are
not shared.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median_low
from typing import Any, NoReturn

from gorgo.core.latency.ttft import PARTS
from gorgo.core.prompt.parse import MAX_BOUNDARIES
from gorgo.errors import TraceError
from gorgo.lab.traces import BLOCK_TOKENS, COMPRESSED, MAX_TOKENS, SPAN_S_MAX, TraceFilters, TraceRequest

#: Form of the log that is read here: that of `gorgo.live.logs`, which a simulation does not load.
SCHEMA = 1

# Log files of the proxy as lines of JSON, with a bound on each line.


#: A prompt of ten million tokens; a file without line ends must not fill memory.
MAX_LINE_BYTES = 4 << 20


def read_lines(path: Path, expected: str) -> Iterator[bytes]:
    """Yield the lines of a file; raise `TraceError`, which says what was `expected`.

    For a line that is too long, and for a compressed file: a log is written and rotated without.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if number == 1 and line.startswith(COMPRESSED):
                    raise TraceError(f"{path}: a compressed file; expected {expected}, unpacked")
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}, line {number}: over {MAX_LINE_BYTES:,} bytes; expected {expected}")
                yield line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; expected {expected}") from None


def cut_lines_warning(path: Path, lines: int) -> str | None:
    """Return what to say of so many lines that were skipped; None for none.

    >>> cut_lines_warning(Path("requests.jsonl"), 2)
    'requests.jsonl: 2 lines were cut off by a full disk or a killed process and are skipped'
    """
    if not lines:
        return None
    verb = (
        "line was cut off by a full disk or a killed process and is"
        if lines == 1
        else ("lines were cut off by a full disk or a killed process and are")
    )
    return f"{path}: {lines:,} {verb} skipped"


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; `None` if it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


_HASH = re.compile(r"[0-9a-f]{16}")
#: Statuses of invalid requests, which use no cache and no batch.
_REFUSED = range(400, 500)
#: 429: busy, 499: the client left. Both were load, or would have been.
_LOAD = frozenset({429, 499})


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line as it is read: a checked `gorgo.live.logs.Finished`.

    The proxy packs all hashes into bytes, because it writes a line per request. Here they are numbers, with the bytes
    of text per hash from the header of the file. Older logs end at `hashes`.
    """

    received_s: float
    model: str | None
    input_tokens: int
    output_tokens: int | None
    text_bytes: int
    status: int
    hashes: tuple[int, ...]
    block_bytes: int
    replica: str | None = None
    cached_tokens: int | None = None
    attempts: int = 0
    queued_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    boundaries: tuple[int, ...] = ()
    client: str | None = None
    #: As `core.latency.ttft.PARTS`; empty without a first token, and in older logs.
    ttft_parts_s: tuple[float, ...] = ()


class LogReader:
    """A reader of files in order, which counts lines without a request."""

    def __init__(self) -> None:
        self.boots = 0
        self.skipped = 0
        self.cut_lines = 0
        self._boot: str | None = None
        self._block_bytes = 0

    def rows(self, path: Path) -> Iterator[LoggedRequest]:
        has_header = False
        for number, line in enumerate(read_lines(path, "a request log"), start=1):
            where = f"{path}, line {number}"
            entry = json_object(line)
            if entry is None:
                if not has_header and number > 1:
                    raise TraceError(f"{where}: {_short(line)} is no JSON object; expected a line of a request log")
                self.cut_lines += 1  # by a full disk or a killed process; the first line may be a cut header
            elif "gorgo_request_log" in entry:
                self._header(entry, where)
                has_header = True
            else:
                yield from self._row(entry, where)

    def _header(self, entry: Mapping[str, Any], where: str) -> None:
        schema, boot = entry["gorgo_request_log"], entry.get("boot_id")
        if schema != SCHEMA:
            raise TraceError(f"{where}: gorgo_request_log is {_short(schema)}; this GORGO reads {SCHEMA}")
        if not isinstance(boot, str):
            _fail(where, "boot_id", boot, "text")
        self._block_bytes = _whole(entry, "block_bytes", where, least=1)
        self.boots += boot != self._boot
        self._boot = boot

    def _row(self, entry: Mapping[str, Any], where: str) -> Iterator[LoggedRequest]:
        if self._boot is None:
            raise TraceError(f"{where}: expected the header of a request log, with gorgo_request_log and boot_id")
        received_s, model, status = (
            entry.get("received_s"),
            _text(entry, "model", where),
            _whole(entry, "status", where),
        )
        if isinstance(received_s, bool) or not isinstance(received_s, int | float) or not 0 <= received_s < 1e11:
            _fail(where, "received_s", received_s, "seconds since the epoch")
        reported = _whole_or_none(entry, "output_tokens", where)
        request = LoggedRequest(
            received_s=float(received_s),
            model=model,
            # As reported; a wrong report must not make the rest unreadable.
            input_tokens=min(max(1, _whole(entry, "input_tokens", where)), MAX_TOKENS),
            output_tokens=None if reported is None else min(reported, MAX_TOKENS),
            text_bytes=_whole(entry, "text_bytes", where),
            status=status,
            hashes=_hashes(entry.get("block_hashes"), where),
            block_bytes=self._block_bytes,
            replica=_text(entry, "replica", where),
            cached_tokens=_whole_or_none(entry, "cached_tokens", where),
            attempts=_whole_or_none(entry, "attempts", where) or 0,
            queued_s=_seconds(entry, "queued_s", where),
            ttft_s=_seconds(entry, "ttft_s", where),
            e2e_s=_seconds(entry, "e2e_s", where),
            boundaries=_boundaries(entry.get("boundaries"), where),
            client=_text(entry, "client", where),
            ttft_parts_s=_parts(entry, where),
        )
        if status in _REFUSED and status not in _LOAD:
            self.skipped += 1
        else:
            yield request


def _whole(entry: Mapping[str, Any], key: str, where: str, *, least: int = 0) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        _fail(where, key, value, f"a whole number from {least}")
    return value


def _whole_or_none(entry: Mapping[str, Any], key: str, where: str) -> int | None:
    return None if entry.get(key) is None else _whole(entry, key, where)


def _text(entry: Mapping[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        _fail(where, key, value, "text or null")
    return value


def _seconds(entry: Mapping[str, Any], key: str, where: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < SPAN_S_MAX:
        _fail(where, key, value, "seconds or null")
    return float(value)


def _parts(entry: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """Return the parts of the TTFT."""
    value = entry.get("ttft_parts_s")
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != len(PARTS):
        _fail(where, "ttft_parts_s", value, f"{len(PARTS)} times in s: {', '.join(PARTS)}")
    return tuple(_seconds({"ttft_parts_s": part}, "ttft_parts_s", where) or 0.0 for part in value)


def _hashes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and _HASH.fullmatch(text) for text in value):
        _fail(where, "block_hashes", value, "a list of hashes of 16 hexadecimal digits")
    return tuple(int(text, 16) for text in value)


def _boundaries(value: object, where: str) -> tuple[int, ...]:
    """Return the ends of messages; older logs have none."""
    if value is None:
        return ()
    expected = f"at most {MAX_BOUNDARIES} ascending numbers of tokens"
    if not isinstance(value, list) or len(value) > MAX_BOUNDARIES:
        _fail(where, "boundaries", value, expected)
    if not all(type(end) is int and 0 <= end <= MAX_TOKENS for end in value) or value != sorted(value):
        _fail(where, "boundaries", value, expected)
    return tuple(value)


def _fail(where: str, key: str, value: object, expected: str) -> NoReturn:
    raise TraceError(f"{where}: {key} is {_short(value)}; expected {expected}")


def _short(value: object) -> str:
    text = value.decode("utf-8", "replace").strip() if isinstance(value, bytes) else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


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
            timestamp_s=request.received_s,
            input_tokens=request.input_tokens,
            output_tokens=outputs[request.model] if request.output_tokens is None else max(1, request.output_tokens),
            hash_ids=hash_ids(
                request.hashes, request.input_tokens, hash_tokens=request.block_bytes / ratios[request.model]
            ),
            boundaries=request.boundaries,
        )
        for index, request in enumerate(rows)
    ]
    guessed = sum(request.output_tokens is None for request in rows)
    return RequestLogTrace(tuple(requests), reader.boots, guessed, reader.skipped, reader.cut_lines)


def read_logged_requests(path: Path) -> list[LoggedRequest]:
    """Return the lines of `path` and of the files that it was rotated to, by time; raises as `read_request_log`."""
    return _rows(path, LogReader())


def skipped_lines(path: Path) -> str | None:
    """Return a warning where a log, or a file that it was rotated to, has lines that were cut off; None for a trace."""
    if not is_request_log(path):
        return None
    cut = sum(
        not line.rstrip().endswith(b"}") for file in rotated_files(path) for line in read_lines(file, "a request log")
    )
    return cut_lines_warning(path, cut)


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
    rows = sorted(
        (request for file in rotated_files(path) for request in reader.rows(file)),
        key=lambda request: request.received_s,
    )
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
    for request in rows:
        text[request.model] += request.text_bytes
        tokens[request.model] += request.input_tokens
    return {model: max(text[model], 1) / tokens[model] for model in tokens}


def _outputs(rows: Iterable[LoggedRequest], path: Path) -> dict[str | None, int]:
    """Return the replacement of unknown output lengths by model: its median, else that of all models."""
    lengths_by_model: dict[str | None, list[int]] = defaultdict(list)
    models = set()
    for request in rows:
        models.add(request.model)
        if request.output_tokens is not None:
            lengths_by_model[request.model].append(max(1, request.output_tokens))
    everything = [tokens for lengths in lengths_by_model.values() for tokens in lengths]
    if not everything:
        advice = "let engines tell it: request_usage: true in regions.yaml"
        raise TraceError(f"{path}: no request has output_tokens; {advice}")
    return {model: median_low(lengths_by_model.get(model) or everything) for model in models}
