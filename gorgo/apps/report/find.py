"""What lies in a folder and below it: result rows, the requests behind them, tuning histories.

A requests.jsonl belongs to the one row of the results.json beside it. `gorgo demo` writes each row twice, in the folder
of all policies and in the policy's own: of equal rows one counts, the one with requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from gorgo.apps.report.requests import read_requests
from gorgo.apps.report.rows import read_history, read_results
from gorgo.apps.report.runs import ReportInput, Requests, Run, compare
from gorgo.apps.results import ResultRow, rows_as_json
from gorgo.errors import ReportError
from gorgo.policies.registry import POLICIES

RESULTS, REQUESTS, HISTORY = "results.json", "requests.jsonl", "history.json"
#: A sweep of 12 policies, 10 loads and 100 seeds; more files than this is the wrong folder.
MAX_FILES = 12_000


def find_results(folder: Path, *, show_progress: bool = False) -> ReportInput:
    """Reads everything; raises `ReportError` if there is nothing to show, or for the first damaged file."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    results, requests, histories = (_below(folder, name) for name in (RESULTS, REQUESTS, HISTORY))
    if not results and not histories:
        raise ReportError(f"{folder}: no {RESULTS} and no {HISTORY} in it or below; expected what --out DIR wrote")
    with _progress(requests, shown=show_progress) as columns:
        runs, left_out = _runs(results, columns)
    alone = [path for path in requests if not (path.parent / RESULTS).exists()]
    left_out += [f"{path}: no {RESULTS} beside it, so the run did not end" for path in alone]
    return ReportInput(
        folder=folder,
        comparisons=compare(runs, order=list(POLICIES)),
        histories={str(path.relative_to(folder)): read_history(path) for path in histories},
        left_out=tuple(left_out),
    )


def _below(folder: Path, name: str) -> list[Path]:
    found: list[Path] = []
    for path in folder.rglob(name):
        if not path.is_file():  # a pipe would be waited for, a device read without end
            raise ReportError(f"{path}: no regular file; expected one that --out DIR wrote")
        found.append(path)
        if len(found) > MAX_FILES:
            raise ReportError(f"{folder}: more than {MAX_FILES} files named {name}; expected the folder of one sweep")
    return sorted(found, key=lambda path: path.parts)


@dataclass(frozen=True, slots=True)
class _ResultsReader:
    bar: Progress
    task: int

    def read(self, path: Path) -> Requests:
        return read_requests(path, lambda count: self.bar.advance(self.bar.task_ids[self.task], count))


@contextmanager
def _progress(paths: Sequence[Path], *, shown: bool) -> Iterator[_ResultsReader]:
    console = Console(stderr=True)
    columns = (TextColumn("reading requests"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        bar.add_task("reading", total=sum(path.stat().st_size for path in paths))
        yield _ResultsReader(bar, 0)


def _runs(results: Sequence[Path], reader: _ResultsReader) -> tuple[list[Run], list[str]]:
    """Runs in the order of the paths, deepest first, so that a row with requests goes before its copy above."""
    runs: list[Run] = []
    left_out: list[str] = []
    folders: dict[str, set[Path]] = {}
    for path in sorted(results, key=lambda path: (-len(path.parts), path.parts)):
        rows = read_results(path)
        requests = _requests_beside(path, rows, reader, left_out)
        for row in rows:
            key = rows_as_json([row])
            if not any(path.parent in folder.parents for folder in folders.get(key, ())):
                folders.setdefault(key, set()).add(path.parent)
                runs.append(Run(row, requests))
    return runs, left_out


def _requests_beside(
    path: Path, rows: Sequence[ResultRow], reader: _ResultsReader, left_out: list[str]
) -> Requests | None:
    beside = path.parent / REQUESTS
    if not beside.exists():
        return None
    if len(rows) != 1:
        left_out.append(f"{beside}: {len(rows)} rows in the {RESULTS} beside it, so it belongs to none of them")
        return None
    requests = reader.read(beside)
    _check_same_run(beside, requests, rows[0])
    return requests


def _check_same_run(path: Path, requests: Requests, row: ResultRow) -> None:
    if len(requests) != row.n:
        raise ReportError(f"{path}: {len(requests)} lines, but n is {row.n} in {RESULTS}: they are not of the same run")
