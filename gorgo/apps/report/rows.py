"""Result files, checked: results.json, history.json and requests.jsonl.

An error names the file, the row or line, the key and its value. Unknown keys are ignored: newer files have more.
"""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from gorgo.apps.failures import count_cause
from gorgo.apps.report.runs import ReportGeneration, Requests
from gorgo.apps.results import Amount, ResultRow
from gorgo.errors import ReportError

#: results.json and history.json are lists of small rows; a larger file is another kind of file.
MAX_BYTES = 256 * 2**20
#: A line of requests.jsonl has about 300 bytes; the rest of a longer one is not read into memory.
MAX_LINE_BYTES = 65_536
#: Regions told apart; requests of further ones are counted together.
MAX_REGIONS = 32
OTHER_REGIONS = "other"
#: Characters of a region's name; the rest is cut.
MAX_REGION = 64
#: Characters of a value in an error message.
MAX_SHOWN = 60

#: Characters of a text in a file; names of traces are names of files.
MAX_TEXT = 1000
#: What no page or drawing may contain: controls, marks of direction, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _RequestLine:
    """The keys of a line of requests.jsonl that the report uses."""

    ttft_ms: Amount | None
    error: str | None
    input_tokens: Amount | None = None
    region: str | None = None


_ROW, _GENERATION, _LINE = TypeAdapter(ResultRow), TypeAdapter(ReportGeneration), TypeAdapter(_RequestLine)


def read_results(path: Path) -> list[ResultRow]:
    """Return every row of a results.json; raise `ReportError` for a damaged one."""
    rows = ((row, f"{path}, row {number}") for number, row in enumerate(_read_list(path), start=1))
    return [_checked(_ROW, _printable(row, place), place) for row, place in rows]


def read_history(path: Path) -> tuple[ReportGeneration, ...]:
    """Return the generations of a tuning campaign in order; raise `ReportError` for a damaged one."""
    rows = ((row, f"{path}, generation {number}") for number, row in enumerate(_read_list(path), start=1))
    return tuple(_checked(_GENERATION, _printable(row, place), place) for row, place in rows)


def read_requests(path: Path) -> Requests:
    """Read requests.jsonl as a stream; raise `ReportError` for a damaged line."""
    ttft_ms, input_tokens, count = array("d"), array("d"), 0
    errors: dict[str, int] = {}
    regions: dict[str, int] = {}
    region_of = array("H")
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
            if line.isspace():
                continue
            request = _read_line(path, line, number)
            count += 1
            if request.error is not None:  # latencies are of requests that succeeded
                count_cause(errors, request.error)
            elif request.ttft_ms is not None:
                ttft_ms.append(request.ttft_ms)
                input_tokens.append(nan if request.input_tokens is None else request.input_tokens)
                region = printable_text(request.region or "")[:MAX_REGION]
                region = region if region in regions or len(regions) < MAX_REGIONS else OTHER_REGIONS
                region_of.append(regions.setdefault(region, len(regions)))
    names = np.array([*regions], dtype=np.str_) if regions else np.empty(0, dtype=np.str_)
    return Requests(
        count,
        np.frombuffer(ttft_ms, dtype=np.float64),
        errors,
        np.frombuffer(input_tokens, dtype=np.float64),
        names[np.frombuffer(region_of, dtype=np.uint16)] if regions else names,
    )


def _read_line(path: Path, line: bytes, number: int) -> _RequestLine:
    try:
        return _LINE.validate_json(line)
    except ValidationError:  # Python's reader is slower, names the fault, and accepts surrogates in text
        return _checked(_LINE, _parse(path, line.rstrip(), number), f"{path}, line {number}")


def _read_list(path: Path) -> list[Any]:
    if path.stat().st_size > MAX_BYTES:
        raise ReportError(f"{path}: larger than {MAX_BYTES // 2**20} MB; expected a results file")
    value = _parse(path, path.read_bytes())
    if isinstance(value, dict):  # as `gorgo history --json` prints it
        value = value.get("generations", value)
    if not isinstance(value, list):
        raise ReportError(f"{path}: {_shown(value)}; expected a list of objects")
    return value


def printable_text(text: str) -> str:
    """Return a text with escapes in the place of what no page or drawing may contain.

    >>> printable_text("a\\x1b\\u202eb")
    'a\\\\x1b\\\\u202eb'
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _printable(value: Any, place: str) -> Any:
    """Return a value of JSON with printable texts; raise `ReportError` for a long one."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ReportError(f"{place}: {_shown(value)} has {len(value)} characters; expected at most {MAX_TEXT}")
        return printable_text(value)
    if isinstance(value, list):
        return [_printable(inner, place) for inner in value]
    if isinstance(value, dict):
        return {_printable(key, place): _printable(inner, place) for key, inner in value.items()}
    return value


def _parse(path: Path, data: bytes, first_line: int = 1) -> object:
    try:
        return _DECODER.decode(data.decode())
    except json.JSONDecodeError as error:
        raise ReportError(f"{path}, line {first_line + error.lineno - 1}: not JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ReportError(f"{path}, line {line}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}, line {first_line}: not JSON ({error})") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


#: Refuses NaN and Infinity, which Python's reader accepts by default.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _checked(adapter: TypeAdapter[T], value: object, place: str) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = f"{'.'.join(map(str, fault['loc']))} is " if fault["loc"] else ""
        found = "missing" if fault["type"] == "missing" else _shown(fault["input"])
        expected = "expected a JSON object" if fault["type"] == "dataclass_type" else fault["msg"].lower()
        raise ReportError(f"{place}: {key}{found}; {expected}") from None


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
