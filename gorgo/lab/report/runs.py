"""Result files below a folder, and their runs in the groups that tables and plots show.

A **cell** is all runs of one policy at one load, one per seed. A **comparison** is all runs on one trace (whose name
has the scenario of a simulation) from one source in one setting, so unlike fleets or limits are neither averaged nor
paired. `simulate.compare` owns the arithmetic of means and ratios.

A requests.jsonl belongs to the only row of the results.json beside it, or to the first of the windows of one run.
`gorgo demo` writes each row twice: into the folder of all policies and into the policy's own folder. Of such equal
rows the one with requests is used. A simulated run is determined by its digest, so a second one is a copy wherever it
lies, and no replicate; equal rows of earlier versions, which have no digest, are copies as well.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Strict, TypeAdapter, ValidationError
from rich.progress import BarColumn, TimeRemainingColumn

from gorgo.core.numeric import Floats
from gorgo.errors import ReportError
from gorgo.lab.progress import progress_display
from gorgo.lab.request_log import read_lines
from gorgo.lab.results import Amount, Count, Number, ResultRow, rows_as_json
from gorgo.lab.simulate.compare import mean_row
from gorgo.policies.registry import POLICIES

#: Rows that no proxy can run, see `gorgo.lab.simulate.job`: beside the others, never the best of them.
REFERENCES = ("oracle", "pinned", "floor")
RESULTS, REQUESTS, HISTORY = "results.json", "requests.jsonl", "history.json"
#: Of one file, which is read whole: half a million rows. A larger one is none that a command wrote.
MAX_BYTES = 256 * 2**20
#: Why a row does not count.
COPY = "copies of simulated runs that count already: equal digests count once"
UNLIKE = "digests of runs that count already, with other figures: the code changed between them; run both again"

T = TypeVar("T")
#: A row, and the TTFT of the run's requests that succeeded, if they were saved.
Run = tuple[ResultRow, Floats | None]


@dataclass(frozen=True)
class Cell:
    """One policy (with one weight set) at one load.

    `rows` are by seed, repetition of the seed, and window: runs of two policies with the same had the same random
    numbers. `ttft_ms` has the requests that succeeded, for each run whose requests were saved.
    """

    label: str
    rows: Mapping[tuple[int, int, int | None], ResultRow]
    ttft_ms: tuple[Floats, ...] = ()

    @cached_property
    def mean(self) -> ResultRow:
        """The mean of each figure over the rows that know it; counts are sums."""
        return mean_row([*self.rows.values()])

    @property
    def load(self) -> float:
        return 1 / self.mean.time_scale

    @property
    def is_reference(self) -> bool:
        return self.mean.policy in REFERENCES


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs on one trace from one source, live or simulated, in one of `settings` that this trace has.

    `cells` are in order of load, the highest last, then of policies, references last.
    """

    title: str
    source: str
    cells: tuple[Cell, ...]
    settings: int = 1

    @property
    def loads(self) -> dict[float, list[Cell]]:
        loads: dict[float, list[Cell]] = {}
        for cell in self.cells:
            loads.setdefault(cell.load, []).append(cell)
        return loads

    @property
    def labels(self) -> list[str]:
        """Return every policy in order of first appearance, references last."""
        return list(dict.fromkeys(cell.label for cell in sorted(self.cells, key=lambda cell: cell.is_reference)))


@dataclass(frozen=True, slots=True)
class ReportGeneration:
    """One generation of a tuning history, as a file that anyone may have written is validated: what the report plots.

    The tuner's own record is `tuner.campaign.generation.Generation`, which this package does not know. The objective
    is the window's p95 TTFT.
    """

    number: Count
    weights: Mapping[str, Number]
    sigma: Number | None
    objective_ms: Number | None
    incumbent_objective_ms: Number | None
    accepted: Annotated[bool, Strict()]
    reason: str | None

    @property
    def decision(self) -> str:
        return "accepted" if self.accepted else "rejected"


@dataclass(frozen=True, slots=True)
class ReportInput:
    """All results below a folder: comparisons, tuning histories by path, and each file left out with its reason."""

    comparisons: Sequence[Comparison]
    histories: Mapping[str, Sequence[ReportGeneration]] = field(default_factory=dict)
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _RequestLine:
    """The keys of a line of requests.jsonl that the report uses."""

    ttft_ms: Amount | None
    error: str | None


_ROWS, _GENERATIONS = TypeAdapter(list[ResultRow]), TypeAdapter(list[ReportGeneration])
_LINE = TypeAdapter(_RequestLine)


def find_results(folder: Path, *, policies: Sequence[str] = ()) -> ReportInput:
    """Read all result files in a folder and below it, of `policies` alone if any are named.

    Raises `ReportError` if there are none, for the first damaged file, and for a policy without a run.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    results, requests, histories = (
        sorted(path for path in folder.rglob(name) if path.is_file()) for name in (RESULTS, REQUESTS, HISTORY)
    )
    if not results and not histories:
        raise ReportError(f"{folder}: no {RESULTS} and no {HISTORY} in it or below; expected what --out DIR wrote")
    left_out: list[str] = []
    runs = _read_runs(results, left_out)
    ran = dict.fromkeys(str(row.policy) for row, _ in runs)
    if missing := [name for name in policies if name not in ran]:
        raise ReportError(f"{folder}: no run of {missing[0]!r}; there are: {', '.join(ran)}")
    alone = [path for path in requests if not path.with_name(RESULTS).exists()]
    left_out += [f"{path}: no {RESULTS} beside it: the run did not end" for path in alone]
    return ReportInput(
        compare([run for run in runs if not policies or run[0].policy in policies]),
        {str(path.relative_to(folder)): read_history(path) for path in histories},
        left_out,
    )


def _read_runs(results: Sequence[Path], left_out: list[str]) -> list[Run]:
    """Return runs, deepest path first, so that a row with requests precedes its copy above; add what is left out."""
    runs: list[Run] = []
    folders: dict[str, set[Path]] = defaultdict(set)
    #: The row that counts, by digest.
    simulated: dict[str, str] = {}
    shown = progress_display("reading results", len(results), BarColumn(), TimeRemainingColumn(), transient=True)
    with shown as display:
        for path in sorted(results, key=lambda path: -len(path.parts)):
            rows = read_results(path)
            ttft_ms = _ttft_beside(path, rows, left_out)
            repeated = Counter[str]()
            for number, row in enumerate(rows):
                text = rows_as_json([row])
                if any(path.parent in folder.parents for folder in folders[text]):
                    continue
                folders[text].add(path.parent)
                digest = row.digest or text
                if row.source == "simulated" and digest in simulated:
                    repeated[COPY if simulated[digest] == text else UNLIKE] += 1
                    continue
                simulated[digest] = text
                runs.append((row, ttft_ms if number == 0 else None))
            left_out += [f"{path}: {count} {reason}" for reason, count in repeated.items()]
            display.advance()
    return runs


def _ttft_beside(path: Path, rows: Sequence[ResultRow], left_out: list[str]) -> Floats | None:
    """Return the TTFT of the requests saved beside a results.json; None without such, or if they are of no row."""
    beside = path.with_name(REQUESTS)
    if not beside.is_file():
        return None
    is_one_run = len({(row.policy, row.seed, row.time_scale) for row in rows}) == 1
    if not is_one_run or len({row.window for row in rows}) != len(rows):
        left_out.append(f"{beside}: belongs to no row, because the {RESULTS} beside it has {len(rows)}")
        return None
    count, ttft_ms = read_requests(beside)
    if count != (n := sum(row.n for row in rows)):
        raise ReportError(f"{beside}: {count} lines, but n is {n} in {RESULTS}: they are of different runs")
    return ttft_ms


def read_results(path: Path) -> list[ResultRow]:
    return _checked(_ROWS, _read(path), f"{path}", each=", row ")


def read_history(path: Path) -> list[ReportGeneration]:
    return _checked(_GENERATIONS, _read(path), f"{path}", each=", generation ")


def _read(path: Path) -> bytes:
    if path.stat().st_size > MAX_BYTES:
        raise ReportError(f"{path}: larger than {MAX_BYTES // 2**20} MB; expected a results file")
    return path.read_bytes()


def read_requests(path: Path) -> tuple[int, Floats]:
    """Return the number of requests, and the TTFT of those that succeeded. Raises `ReportError` and `TraceError`."""
    ttft_ms, count = array("d"), 0
    for number, line in enumerate(read_lines(path, "requests of a run"), start=1):
        if not line.isspace():
            request = _checked(_LINE, line, f"{path}, line {number}")
            count += 1
            if request.error is None and request.ttft_ms is not None:
                ttft_ms.append(request.ttft_ms)
    return count, np.array(ttft_ms)


def _checked(adapter: TypeAdapter[T], data: bytes, where: str, *, each: str = "") -> T:
    """Return checked JSON; an error says where (in a list with a number behind `each`), what is there and expected."""
    try:
        value = json.loads(data)  # pydantic's own reader refuses names of files that are no text
        if each and isinstance(value, dict):  # as `gorgo history --json` prints it
            value = value.get("generations", value)
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        keys = [*map(str, fault["loc"])]
        if each and keys:
            where += f"{each}{int(keys.pop(0)) + 1}"
        given = "missing" if fault["type"] == "missing" else shortened(fault["input"])
        expected = "expected a JSON object" if fault["type"] == "dataclass_type" else fault["msg"].lower()
        raise ReportError(f"{where}: {'.'.join(keys)}{' is ' if keys else ''}{given}; {expected}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{where}: not JSON ({error})") from None


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Group runs into comparisons, one per trace, source and setting."""
    groups: dict[tuple[str, str], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for row, ttft_ms in runs:
        groups[row.trace, row.source][row.setting or ""].append((row, ttft_ms))
    comparisons = []
    for (trace, source), settings in sorted(groups.items()):
        for setting, setting_runs in sorted(settings.items()):
            more = f", setting {setting or 'unknown'}" if len(settings) > 1 else ""
            comparisons.append(Comparison(f"{trace}, {source}{more}", source, _cells(setting_runs), len(settings)))
    return comparisons


def _cells(runs: Sequence[Run]) -> tuple[Cell, ...]:
    """Return a cell per load and policy: policies as the reference lists them, then others, then references."""
    weights: dict[str | None, set[str]] = defaultdict(set)
    for row, _ in runs:
        weights[row.policy].add(format_weights(row.weights))
    groups: dict[tuple[float, str], list[Run]] = defaultdict(list)
    for row, ttft_ms in runs:
        label = row.policy or "unnamed policy"
        label += f" ({format_weights(row.weights)})" if len(weights[row.policy]) > 1 else ""
        groups[row.time_scale, label].append((row, ttft_ms))
    places = {name: index for index, name in enumerate(POLICIES)}

    def rank(cell: Cell) -> tuple[float, bool, int, str]:
        return cell.load, cell.is_reference, places.get(cell.mean.policy or "", len(places)), cell.label

    return tuple(sorted((_cell(label, cell_runs) for (_, label), cell_runs in groups.items()), key=rank))


def _cell(label: str, runs: Sequence[Run]) -> Cell:
    rows: dict[tuple[int, int, int | None], ResultRow] = {}
    repetitions = Counter[tuple[int, int | None]]()
    for row, _ in runs:
        rows[row.seed, repetitions[row.seed, row.window], row.window] = row
        repetitions[row.seed, row.window] += 1
    return Cell(label, rows, tuple(ttft_ms for _, ttft_ms in runs if ttft_ms is not None))


def format_weights(weights: Mapping[str, float] | None) -> str:
    """Return weights as in `w_rtt 0.5, w_queue 0.1`."""
    return ", ".join(f"{name} {value:g}" for name, value in (weights or {}).items()) or "weights unknown"
