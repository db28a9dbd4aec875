"""The page of results: the result files that are found and checked, its tables, and the page with its files.

Needs the extra `report`. Leaves what is written to `output`, and the drawings to `plots`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from itertools import count
from math import nan
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import TypeAdapter, ValidationError
from rich.progress import BarColumn, TimeRemainingColumn

from gorgo import __version__
from gorgo.errors import ReportError
from gorgo.lab.failures import count_cause
from gorgo.lab.progress import progress_display
from gorgo.lab.report.plots import PlannedPlot, comparison_plots, csv_text, load_number, tuning_plot
from gorgo.lab.report.runs import (
    MEASURES,
    RATIO_MEASURES,
    TTFT_P95,
    Cell,
    Comparison,
    Measure,
    ReportGeneration,
    ReportInput,
    Requests,
    Run,
    best_baseline,
    compare,
    format_weights,
    mean,
    mean_share,
    ratio,
)
from gorgo.lab.report.style import BROAD, NARROW, Layout, print_document, svg_document, svg_element
from gorgo.lab.results import Amount, ResultRow, load_text, rows_as_json
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
    return [_checked(_ROW, _printable(row, where), where) for row, where in rows]


def read_history(path: Path) -> tuple[ReportGeneration, ...]:
    """Return the generations of a tuning campaign in order; raise `ReportError` for a damaged one."""
    rows = ((row, f"{path}, generation {number}") for number, row in enumerate(_read_list(path), start=1))
    return tuple(_checked(_GENERATION, _printable(row, where), where) for row, where in rows)


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
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _printable(value: Any, where: str) -> Any:
    """Return a value of JSON with printable texts; raise `ReportError` for a long one."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ReportError(f"{where}: {_shown(value)} has {len(value)} characters; expected at most {MAX_TEXT}")
        return printable_text(value)
    if isinstance(value, list):
        return [_printable(inner, where) for inner in value]
    if isinstance(value, dict):
        return {_printable(key, where): _printable(inner, where) for key, inner in value.items()}
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


def _checked(adapter: TypeAdapter[T], value: object, where: str) -> T:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = f"{'.'.join(map(str, fault['loc']))} is " if fault["loc"] else ""
        found = "missing" if fault["type"] == "missing" else _shown(fault["input"])
        expected = "expected a JSON object" if fault["type"] == "dataclass_type" else fault["msg"].lower()
        raise ReportError(f"{where}: {key}{found}; {expected}") from None


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# Result files in a folder and below it: result rows, the requests behind them, tuning histories.
#
# A requests.jsonl belongs to the only row of the results.json beside it, or to the first of the windows of one run.
# `gorgo demo` writes each row twice: into the folder of all policies and into the policy's own folder. Of such equal
# rows the one with requests is used. A simulated run is determined by its digest, so a second one is a copy wherever it
# lies, and no replicate; equal rows of earlier versions, which have no digest, are copies as well.


RESULTS, REQUESTS, HISTORY = "results.json", "requests.jsonl", "history.json"
#: A sweep of 12 policies, 10 loads and 100 seeds; more files than this is the wrong folder.
MAX_FILES = 12_000


def find_results(folder: Path, *, policies: Sequence[str] = (), show_progress: bool = False) -> ReportInput:
    """Read all result files, of `policies` alone if any are named.

    Raises `ReportError` if there are none, for the first damaged file, and for a policy without a run.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    results, requests, histories = (_files_below(folder, name) for name in (RESULTS, REQUESTS, HISTORY))
    if not results and not histories:
        raise ReportError(f"{folder}: no {RESULTS} and no {HISTORY} in it or below; expected what --out DIR wrote")
    runs, left_out = _read_runs(results, show_progress=show_progress)
    ran = {run.row.policy: None for run in runs}
    if missing := [name for name in policies if name not in ran]:
        raise ReportError(f"{folder}: no run of {missing[0]!r}; there are: {', '.join(map(str, ran))}")
    runs = [run for run in runs if not policies or run.row.policy in policies]
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
    #: The row that counts, by digest.
    simulated: dict[str, str] = {}
    counted: set[str] = set()
    paths = sorted(results, key=lambda path: (-len(path.parts), path.parts))
    shown = progress_display("reading results", len(paths), BarColumn(), TimeRemainingColumn(), transient=True)
    with shown if show_progress else nullcontext(None) as display:
        for path in paths:
            rows = read_results(path)
            requests = _requests_beside(path, rows, left_out)
            copies, unlike = 0, 0
            for number, row in enumerate(rows):
                key = rows_as_json([row])
                if any(path.parent in folder.parents for folder in folders.get(key, ())):
                    continue
                folders.setdefault(key, set()).add(path.parent)
                if row.source == "simulated":
                    first = simulated.setdefault(row.digest or key, key)
                    if first != key:
                        unlike += 1
                        continue
                    if key in counted:
                        copies += 1
                        continue
                    counted.add(key)
                runs.append(Run(row, requests if number == 0 else None))
            left_out += _copies_left_out(path, copies, unlike)
            if display is not None:
                display.advance()
    return runs, left_out


def _copies_left_out(path: Path, copies: int, unlike: int) -> Iterator[str]:
    """Yield why rows of a file do not count."""
    if copies:
        rows = "row is a copy" if copies == 1 else "rows are copies"
        yield f"{path}: {copies} {rows} of simulated runs that count already: equal digests count once"
    if unlike:
        rows = "row has" if unlike == 1 else "rows have"
        yield (
            f"{path}: {unlike} {rows} the digest of a run that counts already and other figures: the code changed "
            "between them; run both again"
        )


def _requests_beside(path: Path, rows: Sequence[ResultRow], left_out: list[str]) -> Requests | None:
    beside = path.parent / REQUESTS
    if not beside.exists():
        return None
    is_one_run = len({(row.policy, row.seed, row.time_scale) for row in rows}) == 1
    if not is_one_run or len({row.window for row in rows}) != len(rows):
        left_out.append(f"{beside}: belongs to no row, because the {RESULTS} beside it has {len(rows)}")
        return None
    requests = read_requests(beside)
    if requests.count != (n := sum(row.n for row in rows)):
        raise ReportError(f"{beside}: {requests.count} lines, but n is {n} in {RESULTS}: they are of different runs")
    return requests


# The page: sections of tables and plots in the template, all text escaped except our own SVG.
#
# Owns the sections and the tables (policies per load, shares, errors by kind, the acceptance log), whose rows are
# bounded. Leaves the drawings to `gorgo.lab.report.plots`. Each plot is drawn twice, for a broad and for a narrow
# screen. The broad one and its points are files beside the page.


#: Rows of one table; results.json has the others.
MAX_ROWS = 200
#: Replicas with a column of their own in the table of shares; the others are added up.
MAX_REPLICAS = 12
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row; `bold` has the places of the cells in bold."""

    label: str
    cells: tuple[str, ...]
    bold: frozenset[int] = frozenset()
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table; `header` begins with the title of the labels, `left_out` counts the rows beyond the bound."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    left_out: int = 0
    note: str = ""


def load_table(comparison: Comparison, time_scale: float) -> PageTable:
    """Return all policies at one load: means over runs, the best in bold, and counts; unknown measures are left out."""
    cells = comparison.loads[time_scale]
    policies = [cell for cell in cells if not cell.is_reference]
    measures = [one for one in MEASURES if any(mean(cell, one) is not None for cell in cells)]
    best = [_best_text(policies, measure) for measure in measures]
    rows = []
    for cell in cells:
        size = (f"{len(cell.runs):,}", _requests_text(cell), f"{sum(run.row.errors for run in cell.runs):,}")
        texts = [measure.format(mean(cell, measure)) for measure in measures]
        bold = {column for column, text in enumerate(texts) if text == best[column] and not cell.is_reference}
        rows.append(TableRow(cell.label, (*texts, *size), frozenset(bold), cell.is_reference))
    header = ("policy", *(measure.title for measure in measures), "runs", "requests", "errors")
    return _table(f"{load_text(time_scale)}, {comparison.source}", header, rows)


def _table(caption: str, header: tuple[str, ...], rows: Sequence[TableRow], note: str = "") -> PageTable:
    return PageTable(caption, header, tuple(rows[:MAX_ROWS]), max(0, len(rows) - MAX_ROWS), note)


def _requests_text(cell: Cell) -> str:
    """Return the requests of all runs; after an interrupt with those of the trace."""
    ended = sum(run.row.n for run in cell.runs)
    if not cell.is_partial:
        return f"{ended:,}"
    planned = sum(run.row.n if run.row.planned is None else run.row.planned for run in cell.runs)
    return f"{ended:,} of {planned:,}, partial"


def _best_text(cells: Sequence[Cell], measure: Measure) -> str | None:
    """Return the best mean as displayed; None if all read the same."""
    means = [value for cell in cells if (value := mean(cell, measure)) is not None]
    if measure.best is None or len({measure.format(value) for value in means}) < 2:
        return None
    return measure.format(measure.best(means))


def ratio_table(comparison: Comparison) -> PageTable | None:
    """Return ratios to the best baseline of each load, by policy and load; None without a baseline to compare to."""
    rows = []
    for time_scale, cells in comparison.loads.items():
        bases = [(measure, best_baseline(cells, measure)) for measure in RATIO_MEASURES]
        for cell in cells:
            texts = [text for measure, base in bases for text in _ratio_texts(cell, base, measure)]
            if any(text != UNKNOWN for text in texts):
                rows.append(TableRow(cell.label, (load_number(time_scale), *texts), is_reference=cell.is_reference))
    titles = [measure.title.partition(",")[0] for measure in RATIO_MEASURES]
    header = [text for title in titles for text in (f"{title} /", "baseline", "95 % interval")]
    note = (
        "The geometric mean of the ratios of runs with the same seed: not the quotient of the two means above. Of "
        "windows (--windows) a unit of the interval is a window, with the mean over its seeds. "
        "An interval that contains 1 is undecided."
    )
    return _table("Ratios to the best baseline", ("policy", "load", *header), rows, note) if rows else None


def _ratio_texts(cell: Cell, base: Cell | None, measure: Measure) -> tuple[str, str, str]:
    """Return ratio, baseline and interval as in `0.880 to 0.945, lower`: the word is the interval's side of 1."""
    if base is None or cell is base or (interval := ratio(cell, base, measure)) is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}", base.label, UNKNOWN
    side = "lower" if interval.high < 1 else "higher" if interval.low > 1 else "undecided"
    return f"{interval.value:.3f}", base.label, f"{interval.low:.3f} to {interval.high:.3f}, {side}"


def share_table(comparison: Comparison) -> PageTable | None:
    """Return the share of requests per replica, by policy and load; None if no row names a replica."""
    shares = [(time_scale, cell, mean_share(cell)) for time_scale, cell in comparison.placed]
    shares = [one for one in shares if one[2]]
    total: Counter[str] = Counter()
    for _, _, share in shares:
        total.update(share)
    largest = sorted(sorted(total, key=lambda name: (-total[name], name))[:MAX_REPLICAS])
    more = len(total) > len(largest)
    rows = []
    for time_scale, cell, share in shares:
        values = [share.get(name, 0.0) for name in largest]
        values += [sum(share.values()) - sum(values)] if more else []
        texts = (load_number(time_scale), *(f"{value:.1%}" for value in values))
        rows.append(TableRow(cell.label, texts, is_reference=cell.is_reference))
    header = ("policy", "load", *largest, *(["others"] if more else []))
    return _table("Share of requests per replica", header, rows) if rows else None


def error_table(comparison: Comparison) -> PageTable | None:
    """Return errors by kind, policy and load, the most frequent first; None without an error in saved requests."""
    errors: Counter[tuple[str, float, str]] = Counter()
    for time_scale, cell in comparison.placed:
        for requests in cell.requests:
            errors.update({(cell.label, time_scale, kind): count for kind, count in requests.errors.items()})
    ranked = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    rows = [TableRow(label, (load_number(scale), kind, f"{count:,}")) for (label, scale, kind), count in ranked]
    return _table("Errors by kind", ("policy", "load", "error", "requests"), rows) if rows else None


def acceptance_log(generations: Sequence[ReportGeneration]) -> PageTable:
    """Return the candidates and their results; the last generations if there are too many."""
    rows = []
    for one in generations[-MAX_ROWS:]:
        sigma = UNKNOWN if one.sigma is None else f"{one.sigma:.3g}"
        objectives = (TTFT_P95.format(one.objective_ms), TTFT_P95.format(one.incumbent_objective_ms))
        cells = (format_weights(one.weights), sigma, *objectives, _decision(one), one.reason or UNKNOWN)
        rows.append(TableRow(str(one.number), cells, frozenset({4} if one.accepted else ())))
    header = ("generation", "weights", "sigma", "p95 TTFT, ms", "incumbent's, ms", "decision", "reason")
    return PageTable("Acceptance log", header, tuple(rows), max(0, len(generations) - MAX_ROWS))


def _decision(generation: ReportGeneration) -> str:
    return "accepted" if generation.accepted else "rejected"


def policies_csv(comparison: Comparison) -> str:
    """Return every measure of every policy and load as CSV: counts, then means over runs."""
    rows = []
    for time_scale, cell in comparison.placed:
        counts = (len(cell.runs), sum(run.row.n for run in cell.runs), sum(run.row.errors for run in cell.runs))
        rows.append((cell.label, 1 / time_scale, *counts, *(mean(cell, measure) for measure in MEASURES)))
    names = [measure.title.replace(",", "").replace("%", "percent").replace(" ", "_") for measure in MEASURES]
    return csv_text(["policy", "load", "runs", "requests", "errors", *names], rows)


def tuning_csv(generations: Sequence[ReportGeneration]) -> str:
    """Return the generations as CSV, a column per weight."""
    weights = list(dict.fromkeys(weight for one in generations for weight in one.weights))
    rows = []
    for one in generations:
        values = (*map(one.weights.get, weights), one.sigma, one.objective_ms, one.incumbent_objective_ms)
        rows.append((one.number, *values, _decision(one), one.reason))
    header = ("generation", *weights, "sigma", "objective_ms", "incumbent_objective_ms", "decision", "reason")
    return csv_text(header, rows)


TEMPLATE = "page.html"
#: The folder beside the page with its plots and figures.
FILES = "report"
#: Names in the title; the sections have the others.
MAX_TITLES = 3
#: Files named as left out; further ones are counted.
MAX_LEFT_OUT = 20
#: Load tables of one comparison.
MAX_TABLES = 24

#: What the template reads of one heading.
Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReportPages:
    """The page, and the contents of the files that it links to by name."""

    html: str
    files: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlotPictures:
    """Plots in forms beside SVG, by the names of their files."""

    forms: Sequence[str]
    made: dict[str, bytes] = field(default_factory=dict)

    def draw(self, key: str, plot: Callable[[Layout], Figure]) -> list[str]:
        """Add a plot in every form; return the names."""
        files = {f"{key}.{form}": print_document(partial(plot, BROAD), form) for form in self.forms}
        self.made.update(files)
        return list(files)


def report(inputs: ReportInput, slos_ms: Sequence[float], *, forms: Sequence[str] = ()) -> ReportPages:
    """Return the page and its files, plots as SVG and in other `forms`. The same results give the same bytes."""
    contents: dict[str, str] = {}
    pictures = PlotPictures(forms)
    numbers = count(1)
    sections = [_comparison_section(one, slos_ms, f"{next(numbers)}", contents, pictures) for one in inputs.comparisons]
    for path, rows in inputs.histories.items():
        sections.append(_tuning_section(path, rows, f"{next(numbers)}", contents, pictures))
    titles = "; ".join(_first([section["title"] for section in sections], MAX_TITLES))
    html = render_page(f"GORGO report: {titles}", sections, left_out=_first(inputs.left_out, MAX_LEFT_OUT))
    return ReportPages(html, contents, pictures.made)


def render_page(
    title: str, sections: Sequence[Section], *, left_out: Sequence[str] = (), footnotes: bool = True
) -> str:
    """Return a page. `footnotes` explain the measures of comparisons."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files(__package__) / TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        title=title, sections=sections, left_out=left_out, folder=FILES, version=__version__, footnotes=footnotes
    )


def _first(texts: Sequence[str], count: int) -> list[str]:
    more = len(texts) - count
    return [*texts[:count], *([f"{more} more"] if more > 0 else [])]


def _comparison_section(
    comparison: Comparison,
    slos_ms: Sequence[float],
    key: str,
    contents: dict[str, str],
    pictures: PlotPictures,
) -> Section:
    """Return the section of one trace. `key` is unique in the page: ids and file names begin with it."""
    tables = [load_table(comparison, time_scale) for time_scale in list(comparison.loads)[:MAX_TABLES]]
    more = (ratio_table(comparison), share_table(comparison), error_table(comparison))
    notes = []
    if comparison.settings > 1:
        notes.append(
            f"One of {comparison.settings} settings of this trace: fleet, limits, filters or version differ, so the "
            "runs of one are neither averaged nor paired with those of another."
        )
    interrupted = list(dict.fromkeys(cell.label for cell in comparison.cells if cell.is_partial))
    if interrupted:
        names = ", ".join(_first(interrupted, MAX_TITLES))
        notes.append(f"Partial: a run was interrupted; its figures are of the requests that had ended ({names}).")
    if len(comparison.loads) > MAX_TABLES:
        notes.append(f"{MAX_TABLES} of {len(comparison.loads)} loads have a table.")
    name = f"{key}-policies.csv"
    plots = [_plot(plan, f"{key}-{plan.key}", contents, pictures) for plan in comparison_plots(comparison, slos_ms)]
    contents[name] = policies_csv(comparison)
    return {
        "title": comparison.title,
        "note": " ".join(notes),
        "tables": [*tables, *filter(None, more)],
        "plots": plots,
        "files": (name,),
    }


def _tuning_section(
    path: str,
    generations: Sequence[ReportGeneration],
    key: str,
    contents: dict[str, str],
    pictures: PlotPictures,
) -> Section:
    note = "" if generations else "Left out: there is no generation."
    draw = partial(tuning_plot, generations) if generations else None
    plan = PlannedPlot("tuning", "Weights, sigma and objective", note, draw)
    plot = _plot(plan, f"{key}-{plan.key}", contents, pictures, tuning_csv(generations))
    return {
        "title": f"Tuning: {path}",
        "note": "",
        "tables": [acceptance_log(generations)],
        "plots": [plot],
        "files": (),
    }


def _plot(
    plan: PlannedPlot, key: str, contents: dict[str, str], pictures: PlotPictures, table: str = ""
) -> dict[str, object]:
    """Draw a plot for broad and narrow screens, and add its files; without a drawing its note has the reason."""
    if plan.draw is None:
        return {"title": plan.title, "note": plan.note, "broad": None, "files": ()}
    drawn = {
        name: svg_document(partial(plan.draw, layout), key=name)
        for name, layout in ((key, BROAD), (f"{key}-narrow", NARROW))
    }
    broad, narrow = (Markup(svg_element(text, key=name, title=plan.title)) for name, text in drawn.items())
    files = {f"{key}.svg": drawn[key], f"{key}.csv": table if plan.series is None else plan.series.csv()}
    contents |= files
    names = [*files, *pictures.draw(key, plan.draw)]
    return {"title": plan.title, "note": plan.note, "broad": broad, "narrow": narrow, "files": names}
