"""The views of comparisons with others: settings that nobody tuned on, Dynamo's simulator, the queue, live routers.

`python -m tests.figures.peers` writes the stored results into docs/peers.md, after they were recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.systems import dynamo, live_engines, perturbed
from experiments.systems.policies import TITLES
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.policies.registry import OURS
from tests.documents import DOCS, tables
from tests.figures.marked import Cell, Table, View, numbers_of
from tests.figures.stored import read_stored, stored_names
from tests.figures.written import markdown

PAGE = DOCS / "peers.md"
_TRACE = "--trace conversation_trace.jsonl.gz"
_BOTH_WAYS = ("baselines", "published", "oracle", "rivals", "scenarios", "wildchat", "priors", "paper", "learned")
_CLAIMS = f"python -m experiments --system policies {' '.join(f'--only {one}' for one in _BOTH_WAYS)} {_TRACE}"
#: By the name of the figure.
COMMANDS: Mapping[str, Sequence[str]] = {
    "perturbed": ["python -m experiments --system perturbed --only all --seeds 3 --jobs 2"],
    "dynamo": [f"python -m experiments --system dynamo --only all --seeds 1 --jobs 1 {_TRACE}"],
    "claims-queue": [f"{_CLAIMS} --seeds 3 --queue {queue} --jobs 1" for queue in ("off", "on")],
    "live": [f"python -m experiments --system live --only all --seeds 1 --scale 0.15 --jobs 1 {_TRACE}"],
}
BEST = "best rival at p95 TTFT"
#: Of the means of both simulators, each under a name of its own.
_COLUMNS = ("mean TTFT, ms", "p50 TTFT, ms", "p95 TTFT, ms", "mean E2E, s", "p95 E2E, s", "cached tokens found, %")
_OF_ROUTERS = (
    "requests",
    "errors",
    "TTFT mean ms",
    "p95",
    "hit %",
    "largest share %",
    "router CPU ms a request",
    "us an event",
    "sent late ms",
)
#: A ratio above this is a loss that is counted.
_LOST = perturbed.OF_BEST


def settings(results: Sequence[Any]) -> View:
    """Return a row per setting and a row per rival, with the ratio of each figure, and how many are lost."""
    ((lines),) = results
    by_setting: dict[tuple[str, ...], dict[str, Cell]] = {}
    by_rival: dict[tuple[str, ...], dict[str, Cell]] = {}
    for on, against, figure, ratio in _ratios(lines):
        if on.startswith("geometric mean"):
            by_rival.setdefault((f"`{against}`",), {})[figure] = ratio
            continue
        cells = by_setting.setdefault((on,), {BEST: None})
        cells[figure] = ratio
        if figure == "p95 TTFT":
            cells[BEST] = f"`{against}`"
    values = {"settings": float(len(by_setting)), "rivals": float(len(by_rival)), "allowed, %": 100 * (_LOST - 1)}
    for figure in perturbed.STATS:
        found = [float(str(cells[figure])) for cells in by_setting.values()]
        values |= {f"{figure}, lost": float(sum(ratio > _LOST for ratio in found)), f"{figure}, most": max(found)}
        values |= {f"{figure}, won": float(sum(ratio < 1 for ratio in found)), f"{figure}, least": min(found)}
    return View(
        tables=[Table(labels=("setting",), rows=by_setting), Table(labels=("rival",), rows=by_rival)], values=values
    )


def simulators(results: Sequence[Any]) -> View:
    """Return the figures of both simulators, and their ratios."""
    ((lines),) = results
    figures: dict[tuple[str, ...], dict[str, Cell]] = {}
    ratios: dict[tuple[str, ...], dict[str, Cell]] = {}
    for header, rows in tables("\n".join(lines)):
        if header[1] == "simulator":
            figures |= {tuple(row[:3]): dict(zip(_COLUMNS, map(float, row[3:]), strict=True)) for row in rows}
        else:
            for on, way, figure, _, ratio, *_ in rows:
                cells = ratios.setdefault((on, way), dict.fromkeys(dynamo.STATS, "-"))
                cells[figure] = float(numbers_of(ratio)[0])
    values = {f"{on}, {way}, {figure}": ratio for (on, way), cells in ratios.items() for figure, ratio in _known(cells)}
    whole = {"engines": float(dynamo.ENGINES), "requests": float(dynamo.REQUESTS), "answers": 128.0, "within, %": 0.1}
    return View(
        tables=[
            Table(labels=("on", "simulator", "requests go"), rows=figures),
            Table(labels=("on", "requests go"), rows=ratios),
        ],
        values=values | whole,
    )


def by_queue(results: Sequence[Any]) -> View:
    """Return how many targets of each group are met without and with the queue, and those that the queue turns."""
    off, on = (list(_verdicts(lines)) for lines in results)
    met: dict[str, dict[str, int]] = {}
    turned: dict[tuple[str, ...], dict[str, Cell]] = {}
    for (group, without), (_, queued) in zip(off, on, strict=True):
        assert without[3:5] == queued[3:5], "the same targets in the same order"
        passed = [row[6].startswith("pass") for row in (without, queued)]
        cells = met.setdefault(group, dict.fromkeys(("number", "met, queue off", "met, queue on"), 0))
        for name, more in zip(cells, (True, *passed), strict=True):
            cells[name] += more
        if passed[0] != passed[1]:
            beside = " or ".join(f"`{name}`" for name in dict.fromkeys((without[2], queued[2])))
            label = (without[0].removesuffix(", queue off"), f"{without[3]} of `{without[1]}`", beside)
            turned[label] = {"target": without[4], "queue off": without[5], "queue on": queued[5]}
    values: dict[str, float] = {
        f"{group}, {name}": cell for group, cells in met.items() for name, cell in cells.items()
    }
    values |= {name: sum(cells[name] for cells in met.values()) for name in next(iter(met.values()))}
    for queue, lines in zip(("off", "on"), results, strict=True):
        for header, rows in tables("\n".join(lines)):
            if header[1] == "policy":
                values |= {f"{on}, {of}: p95 TTFT, {queue}": float(cells[1]) for on, of, *cells in rows if of == OURS}
    return View(
        tables=[
            Table(labels=("targets",), rows={(group,): {**cells} for group, cells in met.items()}),
            Table(labels=("on", "figure", "compared with"), rows=turned),
        ],
        values=values | {"turned": float(len(turned))},
    )


def _verdicts(lines: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the title of the group and the cells of every verdict."""
    for title in TITLES.values():
        if f"**{title}**" in lines:
            rows = tables("\n".join(lines[lines.index(f"**{title}**") :]))[0][1]
            yield from ((title, row) for row in rows)


#: What the first column of each table of routers is on the page; a row is found by it.
TRAFFIC_TO = ("traffic", "traffic to real vLLM", "traffic to Dynamo's mockers")


def routers(results: Sequence[Any]) -> View:
    """Return a table of routers before each kind of engine, and how busy the machine was at the end."""
    ((lines),) = results
    shown: list[Table] = []
    values = {"engines": float(live_engines.ENGINES), "away, s": live_engines.AWAY_S}
    values |= {"load": float(numbers_of(lines[-1].rpartition("load average ")[2].rstrip("."))[0])}
    for label, (header, found) in zip(TRAFFIC_TO, tables("\n".join(lines)), strict=False):
        rows: dict[tuple[str, ...], dict[str, Cell]] = {}
        for row in found:
            cells = dict(zip(header, row, strict=True))
            rows[row[0], row[1]] = {name: cells[name] for name in _OF_ROUTERS}
            numbers = {name: cell for name in _OF_ROUTERS if (cell := cells[name]) != "-"}
            values |= {f"{label}: {row[0]}, {row[1]}, {name}": float(cell) for name, cell in numbers.items()}
        shown.append(Table(labels=(label, "router"), rows=rows))
    return View(tables=shown, values=values)


def _known(cells: Mapping[str, Cell]) -> Iterator[tuple[str, float]]:
    yield from ((name, cell) for name, cell in cells.items() if isinstance(cell, float))


def _ratios(lines: Sequence[str]) -> Iterator[tuple[str, str, str, float]]:
    """Yield on what, against which policy, the figure and its ratio, of every verdict."""
    for header, rows in tables("\n".join(lines)):
        if header[1] == "of":
            for on, _, against, figure, _, ratio, _ in rows:
                yield on, against, figure, float(numbers_of(ratio)[0])


VIEWS = {"perturbed": settings, "dynamo": simulators, "claims-queue": by_queue, "live": routers}


def main() -> None:
    """Write every table of a stored result, each into the next part of the page that names it."""
    text = PAGE.read_text()
    for name, view in VIEWS.items():
        if name in stored_names():
            found = iter(view(read_stored(name).results).tables)
            mark = re.compile(rf"(<!-- figures: {name} -->\n)(?:\|.*?)?(<!-- /figures -->)", re.DOTALL)
            text = mark.sub(lambda part, found=found: part[1] + markdown(next(found)) + part[2], text)  # type: ignore[misc]
    write_atomically(PAGE, text.encode(), mode=PUBLIC)


if __name__ == "__main__":
    main()
