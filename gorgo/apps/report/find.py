"""Result files in a folder and below it: result rows, the requests behind them, tuning histories.

A requests.jsonl belongs to the only row of the results.json beside it. `gorgo demo` writes each row twice: into the
folder of all policies and into the policy's own folder. Of such equal rows the one with requests is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.progress import BarColumn, TimeRemainingColumn

from gorgo.apps.progress import progress_display
from gorgo.apps.report.rows import printable_text, read_history, read_requests, read_results
from gorgo.apps.report.runs import ReportInput, Requests, Run, compare
from gorgo.apps.results import ResultRow, rows_as_json
from gorgo.errors import ReportError
from gorgo.policies.registry import POLICIES

RESULTS, REQUESTS, HISTORY = "results.json", "requests.jsonl", "history.json"
#: A sweep of 12 policies, 10 loads and 100 seeds; more files than this is the wrong folder.
MAX_FILES = 12_000


def find_results(folder: Path, *, show_progress: bool = False) -> ReportInput:
    """Read all result files; raise `ReportError` if there are none, or for the first damaged file."""
    if not folder.is_dir():
        raise ReportError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    results, requests, histories = (_files_below(folder, name) for name in (RESULTS, REQUESTS, HISTORY))
    if not results and not histories:
        raise ReportError(f"{folder}: no {RESULTS} and no {HISTORY} in it or below; expected what --out DIR wrote")
    runs, left_out = _read_runs(results, show_progress=show_progress)
    alone = [path for path in requests if not (path.parent / RESULTS).exists()]
    left_out += [f"{path}: no {RESULTS} beside it: the run did not end" for path in alone]
    return ReportInput(
        comparisons=compare(runs, order=list(POLICIES)),
        histories={printable_text(str(path.relative_to(folder))): read_history(path) for path in histories},
        left_out=tuple(map(printable_text, left_out)),
    )


def _files_below(folder: Path, name: str) -> list[Path]:
    paths: list[Path] = []
    for path in folder.rglob(name):
        if not path.is_file():  # a pipe blocks, a device has no end
            raise ReportError(f"{path}: no regular file; expected one that --out DIR wrote")
        paths.append(path)
        if len(paths) > MAX_FILES:
            raise ReportError(f"{folder}: more than {MAX_FILES} files named {name}; expected the folder of one sweep")
    return sorted(paths, key=lambda path: path.parts)


def _read_runs(results: Sequence[Path], *, show_progress: bool) -> tuple[list[Run], list[str]]:
    """Return runs and files left out, deepest path first: a row with requests precedes its copy above."""
    runs: list[Run] = []
    left_out: list[str] = []
    folders: dict[str, set[Path]] = {}
    paths = sorted(results, key=lambda path: (-len(path.parts), path.parts))
    shown = progress_display("reading results", len(paths), BarColumn(), TimeRemainingColumn(), transient=True)
    with shown if show_progress else nullcontext(None) as display:
        for path in paths:
            rows = read_results(path)
            requests = _requests_beside(path, rows, left_out)
            for row in rows:
                key = rows_as_json([row])
                if not any(path.parent in folder.parents for folder in folders.get(key, ())):
                    folders.setdefault(key, set()).add(path.parent)
                    runs.append(Run(row, requests))
            if display is not None:
                display.advance()
    return runs, left_out


def _requests_beside(path: Path, rows: Sequence[ResultRow], left_out: list[str]) -> Requests | None:
    beside = path.parent / REQUESTS
    if not beside.exists():
        return None
    if len(rows) != 1:
        left_out.append(f"{beside}: belongs to no row, because the {RESULTS} beside it has {len(rows)}")
        return None
    requests = read_requests(beside)
    if requests.count != rows[0].n:
        raise ReportError(
            f"{beside}: {requests.count} lines, but n is {rows[0].n} in {RESULTS}: they are of different runs"
        )
    return requests
