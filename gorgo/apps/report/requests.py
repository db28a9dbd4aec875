"""requests.jsonl as columns, read as a stream: half a million lines in seconds, about 50 bytes of memory each."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from math import nan
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gorgo.apps.report.reading import DECODER, MAX_NUMBER, shown
from gorgo.apps.report.runs import Requests
from gorgo.errors import ReportError

#: What makes a line one of requests.jsonl. A round trip is in newer files only.
NUMBERS = ("scheduled_s", "ttft_ms", "e2e_s", "predicted_ttft_ms")
NAMES = ("replica", "region", "error")
OPTIONAL = "rtt_ms"
#: A line has some 300 bytes; a longer one than this is no record and is not read into memory.
MAX_LINE_BYTES = 65_536
#: Between two words to the progress bar: each costs as much as a line.
SAY_EVERY_BYTES = 2**20
#: Kinds of errors told apart; the rest is counted together.
MAX_ERROR_KINDS = 20
#: Replicas told apart in one file: far more than any fleet here, few enough for a file of garbage.
MAX_REPLICAS = 4096


def read_requests(path: Path, advance: Callable[[int], None] = lambda _: None) -> Requests:
    """The columns of one file; `advance` is told the bytes read since the last call.

    Raises `ReportError` naming file, line, key and expectation.
    """
    columns = _Columns(path)
    try:
        with path.open("rb") as file:
            number = unsaid = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                unsaid += len(line)
                if not line.isspace():
                    columns.add(line, number)
                if unsaid > SAY_EVERY_BYTES:
                    advance(unsaid)
                    unsaid = 0
            advance(unsaid)
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None
    return columns.done()


class _Columns:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = {name: array("d") for name in (*NUMBERS, OPTIONAL)}
        self._replica = array("i")
        self._replicas: dict[str, int] = {}
        self._regions: dict[str, str] = {}
        self._errors: Counter[str] = Counter()

    def add(self, line: bytes, number: int) -> None:
        row = self._object(line, number)
        for name in NUMBERS:
            if name not in row:
                self._fail(number, row, name)
            value = row[name]
            self._numbers[name].append(nan if value is None else self._number(value, number, row, name))
        rtt_ms = row.get(OPTIONAL)
        self._numbers[OPTIONAL].append(nan if rtt_ms is None else self._number(rtt_ms, number, row, OPTIONAL))
        self._add_names(row, number)

    def _object(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = DECODER.decode(line.decode())
        except UnicodeDecodeError as error:
            raise ReportError(
                f"{self._path}, line {number}: not UTF-8 ({error.reason} at byte {error.start})"
            ) from None
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            cut = shown(line[:80].decode(errors="replace").strip())
            raise ReportError(f"{self._path}, line {number}: {cut} is not JSON ({why}); expected an object") from None
        if not isinstance(row, dict):
            raise ReportError(f"{self._path}, line {number}: {shown(row)}; expected a JSON object")
        return row

    def _number(self, value: object, number: int, row: Mapping[str, Any], name: str) -> float:
        if (type(value) is float or type(value) is int) and 0 <= value <= MAX_NUMBER:
            return value
        return self._fail(number, row, name)

    def _add_names(self, row: Mapping[str, Any], number: int) -> None:
        for name in NAMES:
            if name not in row or not (row[name] is None or type(row[name]) is str):
                self._fail(number, row, name, "a text or null")
        replica, region, error = (row[name] for name in NAMES)
        if replica is not None and replica not in self._replicas:
            if len(self._replicas) == MAX_REPLICAS:
                raise ReportError(f"{self._path}, line {number}: more than {MAX_REPLICAS} replicas; expected a fleet")
            self._replicas[replica] = len(self._replicas)
        if replica is not None and region is not None:
            self._regions[replica] = region
        self._replica.append(-1 if replica is None else self._replicas[replica])
        if error is not None:
            self._count(error.partition(":")[0])
            for column in ("ttft_ms", "e2e_s"):  # latencies are of requests that succeeded
                self._numbers[column][-1] = nan

    def _count(self, kind: str) -> None:
        self._errors[kind if kind in self._errors or len(self._errors) < MAX_ERROR_KINDS else "other"] += 1

    def _fail(
        self, number: int, row: Mapping[str, Any], name: str, expected: str = "a number from 0 or null"
    ) -> NoReturn:
        value = shown(row[name]) if name in row else "missing"
        raise ReportError(f"{self._path}, line {number}: {name} is {value}; expected {expected}")

    def done(self) -> Requests:
        columns = {name: np.frombuffer(values, dtype=np.float64) for name, values in self._numbers.items()}
        replicas = tuple(self._replicas)
        replica = np.frombuffer(self._replica, dtype=np.int32)
        return Requests(**columns, replica=replica, replicas=replicas, regions=self._regions, errors=dict(self._errors))
