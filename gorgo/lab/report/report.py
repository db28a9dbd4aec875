"""The page of results and the plot of a tuning history on disk.

Owns the result files that are found and checked, what is written, and the check that the extra `report` is installed:
matplotlib and jinja2 are imported only after it. Leaves the page to `gorgo.lab.report.page`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from math import nan
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from rich.progress import BarColumn, TimeRemainingColumn

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import MissingExtra, ReportError
from gorgo.lab.failures import count_cause
from gorgo.lab.progress import progress_display
from gorgo.lab.report.runs import ReportGeneration, ReportInput, Requests, Run, compare
from gorgo.lab.results import Amount, ResultRow, rows_as_json
from gorgo.policies.registry import POLICIES

# Result files, checked: results.json, history.json and requests.jsonl.
#
# An error names the file, the row or line, the key and its value. Unknown keys are ignored: newer files have more.


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


# Result files in a folder and below it: result rows, the requests behind them, tuning histories.
#
# A requests.jsonl belongs to the only row of the results.json beside it. `gorgo demo` writes each row twice: into the
# folder of all policies and into the policy's own folder. Of such equal rows the one with requests is used.


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


#: File name extensions of a tuning plot.
PLOTS = (".svg", ".png", ".pdf")
EXTRA = ("matplotlib", "jinja2")
#: SLOs of the first token that are drawn by default: an interactive answer, and a patient one.
SLOS_MS = (500.0, 2000.0)
#: Panels that are readable in one plot.
MAX_SLOS = 4
#: Names of the files of a report.
_OWN_FILE = re.compile(r"\d+-[a-z0-9-]+\.(svg|csv)")


def write_report(folder: Path, *, slos_ms: Sequence[float] = SLOS_MS, show_progress: bool = True) -> Path:
    """Write report.html and the files of report/ in `folder`, of all results in and below it; return the page's path.

    Files of an earlier report that the new one has not are deleted. Raises `MissingExtra` without the extra `report`,
    and `ReportError` for a folder without results or a damaged file.
    """
    require_extra()
    from gorgo.lab.report.page import FILES, report

    made = report(find_results(folder, show_progress=show_progress), slos_ms)
    target, beside = folder / "report.html", folder / FILES
    beside.mkdir(exist_ok=True)
    for name, text in made.files.items():
        write_atomically(beside / name, _encoded(text), mode=PUBLIC)
    write_atomically(target, _encoded(made.html), mode=PUBLIC)
    for path in beside.iterdir():
        if _OWN_FILE.fullmatch(path.name) and path.name not in made.files:
            path.unlink()
    return target


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # folder names are shown, which need not be valid text


def write_tuning_plot(path: Path, generations: Sequence[Mapping[str, Any]]) -> None:
    """Plot rows of history.json. Raises `MissingExtra`, `ReportError` for an unknown format, `OSError`."""
    require_extra()
    if path.suffix not in PLOTS or not generations:
        expected = f"expected a name that ends in {', '.join(PLOTS)}" if generations else "no generation to plot yet"
        raise ReportError(f"{path}: {expected}")
    import matplotlib as mpl

    from gorgo.lab.report.plots import tuning_plot
    from gorgo.lab.report.runs import ReportGeneration
    from gorgo.lab.report.style import RC

    names = ReportGeneration.__dataclass_fields__
    image = BytesIO()
    with mpl.rc_context(RC):
        figure = tuning_plot([ReportGeneration(**{name: row[name] for name in names}) for row in generations])
        figure.savefig(image, format=path.suffix.removeprefix("."))
    write_atomically(path, image.getvalue(), mode=PUBLIC)


def require_extra(what: str = "a report") -> None:
    """Raise `MissingExtra` without the extra `report`, which `what` needs."""
    for package in EXTRA:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"{what} needs {package}, which is not installed: pip install 'gorgo-router[report]'"
            ) from error
