"""Runs that were made, a file each, so that an interrupted table goes on where it was.

Owns the folder OUT/runs: KEY.json is a list of one result row, as in results.json, with `cpu_s` beside its keys. A file
is renamed into place when it is whole. What is there for another key is left alone: it may be wanted again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gorgo.apps.report.rows import read_results
from gorgo.apps.results import ResultRow
from gorgo.errors import ReportError


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A row, and the processor's time that it took when it was made, s."""

    row: ResultRow
    cpu_s: float | None


class Kept:
    """Runs by key, in memory and, with a folder, on disk."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._runs: dict[str, KeptRun] = {}

    def find(self, key: str) -> KeptRun | None:
        """The run of that key, from this time or an earlier one; raises `ReportError` for a damaged file."""
        if key not in self._runs and self._folder is not None:
            path = self._folder / f"{key}.json"
            if path.exists():
                self._runs[key] = _read(path)
        return self._runs.get(key)

    def keep(self, key: str, run: KeptRun) -> None:
        """To be found from now on."""
        self._runs[key] = run
        if self._folder is not None:
            _write(self._folder / f"{key}.json", run)


def _read(path: Path) -> KeptRun:
    rows = read_results(path)
    if len(rows) != 1:
        raise ReportError(f"{path}: {len(rows)} rows; expected one; remove it and the run is made again")
    (row,) = rows
    cpu_s = json.loads(path.read_bytes())[0].get("cpu_s")
    return KeptRun(row, cpu_s if isinstance(cpu_s, float) else None)


def _write(path: Path, run: KeptRun) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([run.row.as_json() | {"cpu_s": run.cpu_s}], allow_nan=False)
    whole = path.with_suffix(".part")
    whole.write_text(text + "\n", encoding="utf-8")
    whole.replace(path)
