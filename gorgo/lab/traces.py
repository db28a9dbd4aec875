"""Traces: reading them from disk, filtering, and the times at which a replay sends their requests.

Owns the reading of a line and its errors, the filters, and the stream from a file: JSON lines, plain or as gzip, bzip2
or xz (by its first bytes, not by its name), of which only requests that pass the filters stay in memory. Leaves the
text of prompts to `gorgo.lab.prompt_text`.

A line has Mooncake's form, or ART-Chat's, which adds the `request` body. Reading is strict about what a replay needs,
lenient about the rest: unknown keys are left alone, `hash_ids` may be strings, time stamps may be integers or fractions
of a millisecond, and who asked (`user_id`, or ART-Chat's `token_hash`), in which session (`session_id`) and at which
`turn` is taken where it is told.

An id stands for the whole prefix up to and with its 512-token block, or one of `block_tokens`. The ids of a row without
a body must number ceil(input_length / 512), as in Mooncake's release. A row that hashes only its full blocks (floor) is
taken too: nothing is known of its rest, so that rest is shared with nobody. A row with a body needs no ids: its text is
its own. ART-Chat's blocks are said to have 256 tokens; where the ids of a row with a body number so many, two and all
before them become one of 512, and ids of such a row that fit neither size are left out.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import json
import lzma
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NoReturn

from gorgo.errors import TraceError

BLOCK_TOKENS = 512
#: Of ART-Chat's ids.
HALF_BLOCK_TOKENS = 256
#: Longest decimal string that is read as a number; longer ones, and other strings, are hashed to 64 bits.
MAX_DECIMAL_DIGITS = 20
#: Keys of the session in a row; the first present one counts.
SESSION_KEYS = ("session_id", "conversation_id")
#: Keys of the user in a row; the first present one counts.
USER_KEYS = ("user_id", "token_hash", "user_hash", "user")
#: Larger numbers are no lengths or times; floats hold whole numbers exactly up to here.
MAX_NUMBER = 2**53
#: Ten times the longest context of any model; a replay holds such a prompt's text, four bytes a token, in memory.
MAX_TOKENS = 10_000_000
#: First keys of other files of GORGO, with what they are and what reads them.
OTHER_FILES = {
    "gorgo_request_log": "the header of a compressed request log; expected the file unpacked",
    "gorgo_outcome_log": "the header of an outcome log; expected a trace (`gorgo learn` reads outcomes)",
}
#: Largest block of ids, tokens: that of any engine is smaller.
MAX_BLOCK_TOKENS = 65_536
#: Values of a line, by its commas and brackets; prose of the longest prompt has fewer. Each takes some 40 bytes.
MAX_VALUES = 1_000_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Parameters
    ----------
    index:
        Position in the file, from 0; filters do not change it, so it names the request.
    timestamp_s:
        As in the file; the filters rebase it to the first remaining request.
    input_tokens, output_tokens:
        Lengths; one token is four bytes of text in a replay.
    hash_ids:
        One per block of `block_tokens`, each standing for the whole prefix that its block ends.
    body:
        The chat completion body, where the trace has it.
    user:
        User by the name in the trace; None if unknown.
    boundaries:
        Tokens at the end of each message, ascending; empty: unknown, or those of the body.
    turns:
        Questions in the prompt, the new one included: 1 is a first question, more are a conversation. None: unknown.
    session:
        Session by its name in the trace; None if unknown.
    think_s:
        From the last token of the session's answer before it to this request; None if unknown.
    """

    index: int
    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    body: Mapping[str, Any] | None = None
    user: str | None = None
    turns: int | None = None
    boundaries: tuple[int, ...] = ()
    session: str | None = None
    think_s: float | None = None
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a value stands, for the errors."""

    file: str
    number: int
    row: Mapping[str, Any]

    def fail(self, field: str, expected: str) -> NoReturn:
        value = _short(self.row[field]) if field in self.row else "missing"
        raise TraceError(f"{self.file}, line {self.number}: {field} is {value}; expected {expected}")

    def number_of(self, field: str, *, expected: str) -> float:
        value = self.row.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
            self.fail(field, expected)
        return float(value)

    def tokens(self, field: str) -> int:
        expected = f"a whole number of tokens, at least 1 and at most {MAX_TOKENS:,}"
        value = self.number_of(field, expected=expected)
        if value != int(value) or not 1 <= value <= MAX_TOKENS:
            self.fail(field, expected)
        return int(value)


def read_row(text: str, *, file: str, line_number: int, index: int, block_tokens: int | None = None) -> TraceRequest:
    """The request on one line, with ids of `block_tokens` tokens; None: those that the row names, or 512.

    Raises `TraceError` naming file, line, field, value and expectation.
    """
    line = _Line(file, line_number, _object(text, file, line_number))
    if (other := next((what for key, what in OTHER_FILES.items() if key in line.row), None)) is not None:
        raise TraceError(f"{file}, line {line_number}: {other}")
    block_tokens = _block_tokens(line, block_tokens)
    body = line.row.get("request")
    if body is not None and not (isinstance(body, dict) and isinstance(body.get("messages"), list)):
        line.fail("request", "a chat completion body with a list of messages")
    if body is not None and block_tokens != BLOCK_TOKENS:
        line.fail("request", f"no body in a trace whose ids are of {block_tokens} tokens")
    input_tokens = line.tokens("input_length")
    return TraceRequest(
        index=index,
        timestamp_s=line.number_of("timestamp", expected="milliseconds, at least 0") / 1000,
        input_tokens=input_tokens,
        output_tokens=line.tokens("output_length"),
        hash_ids=_hash_ids(line, input_tokens, needed=body is None, block_tokens=block_tokens),
        body=body,
        user=_name(line.row, USER_KEYS),
        turns=_turns(line.row.get("turn"), body),
        boundaries=_boundaries(line.row.get("boundaries"), input_tokens),
        session=_name(line.row, SESSION_KEYS),
        think_s=_think_s(line.row.get("think_ms")),
        block_tokens=block_tokens,
    )


def _block_tokens(line: _Line, wanted: int | None) -> int:
    """Return the size of a block: a row that names another than the file's first, or the option, is an error."""
    if "block_tokens" not in line.row:
        return BLOCK_TOKENS if wanted is None else wanted
    expected = f"a whole number of tokens from 1 to {MAX_BLOCK_TOKENS:,}"
    value = line.tokens("block_tokens")
    if value > MAX_BLOCK_TOKENS:
        line.fail("block_tokens", expected)
    if wanted is not None and value != wanted:
        line.fail("block_tokens", f"{wanted}, as in the lines before or by --block-tokens")
    return value


def _think_s(value: object) -> float | None:
    """Return a think time; an invalid one is unknown."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        return None
    return float(value) / 1000


def _boundaries(value: object, input_tokens: int) -> tuple[int, ...]:
    """Return the ends of messages; ends that do not ascend within the prompt are unknown."""
    if not isinstance(value, list):
        return ()
    ends = tuple(end for end in value if isinstance(end, int) and not isinstance(end, bool))
    ascend = len(ends) == len(value) and all(one < other for one, other in pairwise((0, *ends)))
    return ends if ascend and ends and ends[-1] <= input_tokens else ()


def _name(entry: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """Return a user or session; an invalid one is unknown, not an error: a replay needs neither."""
    name = next((entry[key] for key in keys if entry.get(key) is not None), None)
    is_name = isinstance(name, str | int) and not isinstance(name, bool) and name != ""
    return str(name) if is_name else None


def _turns(value: object, body: Mapping[str, Any] | None) -> int | None:
    """Return the turns of the row, else those counted in the body."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_NUMBER:
        return value
    if body is None:
        return None
    questions = sum(isinstance(message, dict) and message.get("role") == "user" for message in body["messages"])
    return questions or None


def _object(text: str, file: str, line_number: int) -> dict[str, Any]:
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_VALUES:
        raise TraceError(f"{file}, line {line_number}: some {values:,} values; expected {MAX_VALUES:,} at most")
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:  # the second for absurd nesting
        shown = _short(text.strip())
        raise TraceError(f"{file}, line {line_number}: {shown} is not JSON ({error}); expected an object") from None
    if not isinstance(entry, dict):
        raise TraceError(f"{file}, line {line_number}: {_short(text)}; expected a JSON object")
    return entry


def _hash_ids(line: _Line, input_tokens: int, *, needed: bool, block_tokens: int) -> tuple[int, ...]:
    ids = line.row.get("hash_ids")
    if ids is None and not needed:
        return ()
    if not isinstance(ids, list):
        line.fail("hash_ids", f"a list of ids, one per {block_tokens}-token block")
    full, blocks = input_tokens // block_tokens, math.ceil(input_tokens / block_tokens)
    if needed and len(ids) not in (full, blocks):
        expected = f"{blocks} ids for input_length {input_tokens} (one per {block_tokens} tokens)"
        line.fail("hash_ids", f"{expected}, not {len(ids)}; --block-tokens names another size")
    numbers = tuple(_hash_id(line, value) for value in ids)
    return numbers if needed else _of_a_body(numbers, input_tokens)


def _of_a_body(ids: tuple[int, ...], input_tokens: int) -> tuple[int, ...]:
    """Ids of blocks of 512 tokens, from blocks of 256 where their number says so; none if they are of neither size."""
    if _fits(len(ids), input_tokens, HALF_BLOCK_TOKENS):
        return _paired(ids)
    return ids if _fits(len(ids), input_tokens, BLOCK_TOKENS) else ()


def _fits(count: int, input_tokens: int, block_tokens: int) -> bool:
    """So many blocks are all of them, or all the full ones."""
    return count in (input_tokens // block_tokens, math.ceil(input_tokens / block_tokens))


def _paired(ids: tuple[int, ...]) -> tuple[int, ...]:
    """One id for two, which stands for them and all before, whether or not theirs did."""
    chain, paired = hashlib.blake2b(digest_size=8), list[int]()
    for index in range(0, len(ids), 2):
        chain.update(repr(ids[index : index + 2]).encode())
        paired.append(int.from_bytes(chain.digest(), "little"))
    return tuple(paired)


def _hash_id(line: _Line, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        line.fail("hash_ids", f"integers or strings, not {_short(value)}")
    if value.isascii() and value.isdecimal() and len(value) <= MAX_DECIMAL_DIGITS:
        return int(value)
    return int.from_bytes(hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = repr(text) if isinstance(value, str) else text
    return text if len(text) <= 60 else text[:57] + "..."


# Filters of a trace: the replayed requests and their times.
#
# Owns the filters, the order in which they act, and the window, which is given as offsets or as dates and times
# (`parse_window`). The order, always the same:
#
# 1. `start` and `end` keep a window, counted from the file's first request, or from time stamp 0 (`from_zero`) where
#    the stamps of several files count from one instant,
# 2. `max_input` drops requests that are too long,
# 3. `limit` keeps the first N of those, in the file's order,
# 4. `max_output` caps the output of each, `min_output` extends it,
# 5. `spread` scatters requests that share a time stamp,
# 6. the rest is sorted by time (stable) and rebased: the first remaining request is at 0,
# 7. with `user_sessions` a request without a session has that of its user.
#
# `time_scale` is no filter: it acts once, in `scheduled_s`. `next_turns` says what a closed loop sends after what.


#: A file may be a little out of order. Reading stops only this long after `end`, so that a day's file of many GB is
#: not read to its last line for a window in its morning.
REORDER_SLACK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilters:
    """Filters of a trace; the defaults change nothing.

    Parameters
    ----------
    limit:
        Most requests.
    max_input:
        Requests with more input tokens are dropped.
    max_output:
        Output tokens of a request are capped at this.
    min_output:
        Every request has at least so many output tokens. At `max_output`, every answer ends at the cap.
    spread_s:
        Requests with equal time stamps are scattered uniformly over so many seconds. For traces whose clock is coarse.
    start_s, end_s:
        Window [start, end) in seconds from the file's first request, or from time stamp 0 with `from_zero`.
    seed:
        Of the scatter.
    user_sessions:
        All requests of a user without a session are one session.
    """

    limit: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    min_output: int = 1
    spread_s: float = 0.0
    start_s: float = 0.0
    end_s: float | None = None
    seed: int = 0
    from_zero: bool = False
    user_sessions: bool = False

    def apply(self, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Return the remaining requests in the order of their times, the first at 0."""
        selected = list(_first(self.limit, self._short_enough(self._window(requests))))
        selected = [replace(request, output_tokens=self._capped(request)) for request in selected]
        rebased = _rebased(sorted(self._scattered(selected), key=lambda request: request.timestamp_s))
        return [_in_user_session(request) for request in rebased] if self.user_sessions else rebased

    def _window(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        origin_s = 0.0 if self.from_zero else None
        for request in requests:
            origin_s = request.timestamp_s if origin_s is None else origin_s
            offset_s = request.timestamp_s - origin_s
            if self.end_s is not None and offset_s >= self.end_s + REORDER_SLACK_S:
                return
            begun = not self.start_s or offset_s >= self.start_s  # a start of 0 drops nothing that is out of order
            if begun and (self.end_s is None or offset_s < self.end_s):
                yield request

    def _short_enough(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        return (r for r in requests if self.max_input is None or r.input_tokens <= self.max_input)

    def _capped(self, request: TraceRequest) -> int:
        tokens = max(request.output_tokens, self.min_output)
        return tokens if self.max_output is None else min(tokens, self.max_output)

    def _scattered(self, requests: list[TraceRequest]) -> list[TraceRequest]:
        if not self.spread_s:
            return requests
        chance = random.Random(self.seed)
        on_stamp = Counter(request.timestamp_s for request in requests)
        return [
            _later(request, chance.random() * self.spread_s) if on_stamp[request.timestamp_s] > 1 else request
            for request in requests
        ]


def scheduled_s(request: TraceRequest, time_scale: float) -> float:
    """When to send it, in seconds from the start. The one place where `time_scale` acts: 2.0 = half the load."""
    return request.timestamp_s * time_scale


def next_turns(requests: Sequence[TraceRequest]) -> dict[int, tuple[TraceRequest, float]]:
    """Return the session's next request by the index of each, with the think time before it, s.

    A closed loop sends it that long after the end of the answer. Without a think time in the trace that is the time
    between the two stamps, which has the answer's duration in it.

    >>> one, two = (TraceRequest(index, 10.0 * index, 9, 9, session="a") for index in (0, 1))
    >>> next_turns([one, two])[0][1]
    10.0
    """
    turns: dict[int, tuple[TraceRequest, float]] = {}
    last: dict[str, TraceRequest] = {}
    for request in requests:
        if request.session is None:
            continue
        before = last.get(request.session)
        if before is not None:
            think_s = request.timestamp_s - before.timestamp_s if request.think_s is None else request.think_s
            turns[before.index] = request, think_s
        last[request.session] = request
    return turns


def parse_offset(text: str) -> float:
    """Seconds from `90`, `1.5`, `MM:SS` or `HH:MM:SS`; raises `TraceError` for anything else."""
    parts = text.strip().split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    in_range = all(0 <= number < 60 for number in numbers[1:]) and all(0 <= number < 1e9 for number in numbers)
    if not 1 <= len(numbers) <= 3 or not in_range:
        raise TraceError(f"{text!r} is no offset within a trace; expected seconds, MM:SS or HH:MM:SS")
    seconds = 0.0
    for number in numbers:
        seconds = seconds * 60 + number
    return seconds


def _first(limit: int | None, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Stops reading with the last one it gives."""
    if limit is not None and limit <= 0:
        return
    for count, request in enumerate(requests, start=1):
        yield request
        if count == limit:
            return


def _rebased(requests: list[TraceRequest]) -> list[TraceRequest]:
    origin_s = requests[0].timestamp_s if requests else 0.0
    return [_later(request, -origin_s) for request in requests]


def _in_user_session(request: TraceRequest) -> TraceRequest:
    return request if request.session is not None else replace(request, session=request.user)


def _later(request: TraceRequest, by_s: float) -> TraceRequest:
    return replace(request, timestamp_s=request.timestamp_s + by_s)


# The window of a trace: offsets from its first request, or dates and times.
#
# ART-Chat has a file per day, but its time stamps count from the first request of the week. A date is therefore an
# offset from the instant of time stamp 0, whichever file is read.


#: ART-Chat-2.5M is the week of April 1 to 7, 2026. The release does not state the time of its first request; this is
#: the beginning of the day, on the clock by which the paper names its windows.
WEEK_ORIGIN = "2026-04-01T00:00"


def parse_window(start: str | None, end: str | None) -> tuple[float, float | None, bool]:
    """Start and end in seconds, and whether they count from time stamp 0 rather than from the file's first request.

    Each is an offset as in `parse_offset`, or a date and time like `2026-04-05T16:15`; without a zone all are of one
    clock. Raises `TraceError` for anything else, for a mixture, and for a window that ends before it begins.

    >>> parse_window("2026-04-01T00:05", "2026-04-01T01:00")
    (300.0, 3600.0, True)
    >>> parse_window("05:00", None)
    (300.0, None, False)
    """
    dated = {_is_date(text) for text in (start, end) if text is not None}
    if len(dated) == 2:
        raise TraceError(f"window from {start!r} to {end!r}: expected two offsets or two dates")
    from_zero = True in dated
    zero = _instant(WEEK_ORIGIN)
    start_s, end_s = (_seconds(text, zero if from_zero else None) for text in (start, end))
    if start_s is not None and end_s is not None and end_s <= start_s:
        raise TraceError(f"window from {start!r} to {end!r}: expected an end after its start")
    return start_s or 0.0, end_s, from_zero


def _is_date(text: str) -> bool:
    return re.match(r"\d{4}-", text.strip()) is not None


def _seconds(text: str | None, zero: datetime | None) -> float | None:
    if text is None:
        return None
    if zero is None:
        return parse_offset(text)
    seconds = (_instant(text) - zero).total_seconds()
    if seconds < 0:
        raise TraceError(f"{text!r} lies before {WEEK_ORIGIN}, the date of time stamp 0; give an offset instead")
    return seconds


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise TraceError(f"{text!r} is no date and time; expected one like {WEEK_ORIGIN}") from None
    return instant if instant.tzinfo else instant.replace(tzinfo=UTC)


#: First bytes of compressed files, with the name of the form and what opens it.
_COMPRESSED: tuple[tuple[bytes, str, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\x00", "xz", lzma.open),
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
#: First bytes of every compressed file that is known here.
COMPRESSED = (*(magic for magic, _, _ in _COMPRESSED), _ZSTD_MAGIC)
#: Longest line that is read. A body of a million tokens is some 4 MB; a file without line ends must not fill memory.
LINE_BYTES_MAX = 64 * 1024 * 1024
#: In a row. A gigabyte of them is a megabyte of gzip, and the better part of a minute.
BLANK_MAX = 1024 * 1024

#: A year. Time stamps in another unit, or one that is wrong, would keep a simulation busy for ever.
SPAN_S_MAX = 366 * 86_400.0


def load_trace(
    path: Path | str, filters: TraceFilters | None = None, *, block_tokens: int | None = None
) -> list[TraceRequest]:
    """The requests that `filters` keep, in order of time, the first at 0; an id is of `block_tokens` tokens.

    None: as many as the first row names, or 512.

    Raises `TraceError` for a file that cannot be read, a line that cannot be replayed, or when nothing is left.

    Example
    -------
    >>> from gorgo.lab.datasets.catalogue import shipped_path
    >>> requests = load_trace(shipped_path("chat-small"), TraceFilters(limit=60, max_input=24_000))
    >>> len(requests), requests[0].timestamp_s
    (60, 0.0)
    """
    path = Path(path)
    requests = (filters or TraceFilters()).apply(read_requests(path, block_tokens=block_tokens))
    if not requests:
        raise TraceError(f"{path}: no request is left after the filters")
    return requests


def file_block_tokens(path: Path) -> int:
    """Return the tokens of a block of ids by the first row; 512 where it names none, or cannot be read."""
    try:
        first = next(read_requests(path), None)
    except TraceError:
        return BLOCK_TOKENS  # a run of the file says what is wrong
    return BLOCK_TOKENS if first is None else first.block_tokens


def read_requests(path: Path, *, block_tokens: int | None = None) -> Iterator[TraceRequest]:
    """Every request of the file as it stands there, lazily; empty lines are skipped."""
    index, origin_s, blank = 0, 0.0, 0
    for line_number, text in enumerate(_lines(path), start=1):
        blank = 0 if text.strip() else blank + len(text)
        if blank > BLANK_MAX:
            raise TraceError(
                f"{path}, line {line_number}: over {BLANK_MAX:,} bytes of blank lines; expected JSON lines"
            )
        if blank:
            continue
        request = read_row(text, file=str(path), line_number=line_number, index=index, block_tokens=block_tokens)
        block_tokens = request.block_tokens
        origin_s = origin_s if index else request.timestamp_s
        if not abs(request.timestamp_s - origin_s) <= SPAN_S_MAX:
            away = f"{request.timestamp_s - origin_s:,.0f} s from the first request"
            raise TraceError(f"{path}, line {line_number}: {away}; expected a year at most, in milliseconds")
        yield request
        index += 1


def _lines(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if len(line) > LINE_BYTES_MAX:
                    raise TraceError(f"{path}, line {number}: over {LINE_BYTES_MAX:,} bytes; expected JSON lines")
                yield _decoded(line, path, number)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise TraceError(f"{path}: damaged {_form(path)} file ({error})") from None
    except OSError as error:  # without a number from the modules that unpack
        said = error.strerror or (f"damaged {_form(path)} file ({error})" if error.errno is None else str(error))
        raise TraceError(f"{path}: {said}") from None


def _decoded(line: bytes, path: Path, number: int) -> str:
    """Return the text of a line, without the byte order mark that some programs write before the first."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _opened(path: Path) -> IO[bytes]:
    """Raise for a pipe: the file is opened twice, and a pipe without a writer blocks for ever."""
    if path.is_fifo():
        raise TraceError(f"{path}: a pipe; expected a file, because a trace is opened twice")
    compression = _compression(path)
    if compression is None:
        return path.open("rb")
    opened: IO[bytes] = compression[1](path)
    return opened


def _form(path: Path) -> str:
    compression = _compression(path)
    return "or changed" if compression is None else compression[0]


def _compression(path: Path) -> tuple[str, Callable[[Path], Any]] | None:
    """Return the name of a file's compression and what opens it; None for a plain file. Raises for zstd."""
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(_ZSTD_MAGIC):
        raise TraceError(
            f"{path}: compressed by zstd; expected JSON lines, plain or as gzip, bzip2 or xz (`zstd -d` unpacks it)"
        )
    return next(((name, opener) for magic, name, opener in _COMPRESSED if start.startswith(magic)), None)
