"""Lines of the proxy's request log, checked: the form of `gorgo.live.telemetry.request_log_file`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gorgo.apps.log_files import json_object, read_lines
from gorgo.apps.traces.load import SPAN_S_MAX
from gorgo.apps.traces.rows import MAX_TOKENS
from gorgo.core.prompt.boundaries import MAX_BOUNDARIES
from gorgo.errors import TraceError
from gorgo.live.telemetry.request_log_file import SCHEMA

_HASH = re.compile(r"[0-9a-f]{16}")
#: Statuses of invalid requests, which use no cache and no batch.
_REFUSED = range(400, 500)
#: 429: busy, 499: the client left. Both were load, or would have been.
_LOAD = frozenset({429, 499})


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One line as it is read: a checked `gorgo.live.telemetry.request_log_file.Finished`.

    The proxy packs all hashes into bytes, because it writes a line per request. Here they are numbers, with the bytes
    of text per hash from the header of the file. The client is not read. Older logs end at `hashes`.
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


class LogReader:
    """A reader of files in order, which counts lines without a request."""

    def __init__(self) -> None:
        self.boots = 0
        self.skipped = 0
        self.cut_lines = 0
        self._boot: str | None = None
        self._block_bytes = 0

    def rows(self, path: Path) -> Iterator[LoggedRequest]:
        unfinished: str | None = None
        for number, line in enumerate(read_lines(path, "a request log"), start=1):
            where = f"{path}, line {number}"
            entry = json_object(line)
            if entry is None:
                if unfinished is not None:
                    raise TraceError(unfinished)
                unfinished = f"{where}: {_short(line)} is no JSON object; expected a line of a request log"
                continue
            if "gorgo_request_log" in entry:
                self._header(entry, where)
            elif unfinished is not None:
                raise TraceError(unfinished)
            else:
                yield from self._row(entry, where)
                continue
            self.cut_lines += unfinished is not None
            unfinished = None
        self.cut_lines += unfinished is not None

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
        row = LoggedRequest(
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
        )
        if status in _REFUSED and status not in _LOAD:
            self.skipped += 1
        else:
            yield row


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
