"""The figures of the documents: which commands make each, and what pages may show of the results.

Owns the list. `python -m tests.figures record NAME` runs the commands of one and stores what they print; a page shows
it between `<!-- figures: NAME -->` and `<!-- /figures -->`. What is shown in another unit, or as a mean over runs, is
worked out here from the stored result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from experiments.systems.policies import PUBLISHED_RATIOS
from gorgo.lab.simulate.compare import geometric_mean
from gorgo.policies.registry import ALL_READINGS
from tests.documents import tables
from tests.figures.attacks import BEFORE, attacks, attacks_of_seams, fast_failures
from tests.figures.attacks import BEFORE as ATTACKS_BEFORE
from tests.figures.cache_sources import COMMANDS as CACHE_SOURCES
from tests.figures.cache_sources import ENGINES, SCENARIOS, STICKY, WORKLOADS, cache_sources, engines
from tests.figures.comparison import BURST_COMMANDS, WINDOWS_COMMANDS, burst, by_window, comparison
from tests.figures.comparison import COMMANDS as COMPARISON
from tests.figures.herd import COMMANDS as HERD_COMMANDS
from tests.figures.herd import VIEWS as HERD_VIEWS
from tests.figures.learned_routers import (
    ABLATIONS,
    ACCURACY,
    CIRCULAR,
    GATES,
    GROUPS,
    K_FILTER,
    LADDERS,
    LATER,
    LODESTAR,
    LONG,
    MORE,
    MOTIVATION,
    POOLS,
    PREFILL,
    RATES,
    SCRAPES,
    SHADOWS,
    SHAPE,
    TAU,
    commands,
    learned_routers,
)
from tests.figures.marked import Cell, Rows, Table, View, numbers_of
from tests.figures.paper_tables import COMMAND as PAPER_COMMAND
from tests.figures.paper_tables import paper_tables
from tests.figures.peers import COMMANDS as PEER_COMMANDS
from tests.figures.peers import VIEWS as PEER_VIEWS
from tests.figures.relay import COMMANDS as RELAY_COMMANDS
from tests.figures.relay import relay
from tests.figures.scaling import DAY_COMMANDS as SCALING_DAY
from tests.figures.scaling import JOIN_COMMANDS as SCALING_JOIN
from tests.figures.scaling import scaling_day, scaling_join
from tests.figures.several_routers import COMMANDS as SEVERAL_ROUTERS
from tests.figures.several_routers import PROCESSES, processes, several_routers
from tests.figures.stored import read_stored
from tests.figures.tuning import COMMAND as ALGORITHMS_COMMAND
from tests.figures.tuning import COMMAND_TUNING_FLEETS as FLEETS_COMMAND
from tests.figures.tuning import MORE_COMMAND as FLEETS_MORE_COMMAND
from tests.figures.tuning import STEPS_COMMAND, tuning_algorithms, tuning_fleets, tuning_fleets_more, tuning_steps
from tests.figures.whatif import COMMAND as COVERAGE_COMMAND
from tests.figures.whatif import whatif_coverage
from tests.figures.wording import CLAIMS, FLEET, TUNING, in_words

#: Mooncake's conversation trace, as `gorgo datasets fetch mooncake-conversation` leaves it, packed.
CONVERSATION = "conversation_trace.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Figure:
    """Commands, each a line of shell typed in the root of the repository, and the view of their results in order."""

    commands: Sequence[str]
    view: Callable[[Sequence[Any]], View]


@dataclass(frozen=True, slots=True)
class NotStored:
    """Why a figure that was measured is not stored, and at which commits it was measured."""

    why: str
    commits: str


def view_of(names: Sequence[str]) -> View:
    """What a part that shows these stored results may say. Raises `LookupError` for a name that is not in the table."""
    return View.joined([_view(name) for name in names])


def _view(name: str) -> View:
    figure, stored = FIGURES[name], read_stored(name)
    dates = frozenset(run.date for run in stored.runs)
    view = figure.view(stored.results)
    return replace(view, commits=view.commits | {stored.commit}, dates=dates)


# -- tables of results, as replay, demo and simulate print them

_RESULT_COLUMNS = ("err", "TTFT p50 ms", "p95 ms", "p99 ms", "E2E p50 s", "p95 s", "ITL p95 ms", "hit %", "estim. %")


def _results(results: Sequence[Any]) -> View:
    lines = [line for printed in results for line in printed]
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for line in lines:
        name, *shown = line.split() or [""]
        if len(shown) == len(_RESULT_COLUMNS) + 1 and shown[0].isdecimal():
            rows[f"`{name}`",] = dict(zip(_RESULT_COLUMNS, map(float, shown), strict=False)) | {"share %": shown[-1]}
    return View(tables=[Table(labels=("policy",), rows=rows)], lines=lines)


#: Columns of the README's table, and those of the printed one that they show.
_DEMO_COLUMNS = {
    "first token, ms": "p95 ms",
    "whole answer, s": "p95 s",
    "prompt cached, %": "hit %",
}


def _demo(results: Sequence[Any]) -> View:
    """Return the table in words that need no legend; the lines stay as printed."""
    printed = _results(results)
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        label: {words: f"{cells[column]:g}" for words, column in _DEMO_COLUMNS.items()}
        for label, cells in printed.tables[0].rows.items()
    }
    return View(tables=[Table(labels=("policy",), rows=rows)], lines=printed.lines)


# -- gorgo overload

_TRACES = {
    "art-chat-apr5": "ART-Chat-like windows",
    f"{CONVERSATION} --spread 3 --max-input 16000 --max-output 128": "Mooncake conversations",
}
_SEEDS = 3
_LOADS = (0.7, 1.0, 1.3, 3.0)


def _overload(results: Sequence[Any]) -> View:
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values = {f"load {load:g}": load for load in _LOADS} | {"seeds": float(_SEEDS)}
    for number, trace in enumerate(_TRACES.values()):
        runs = results[number * _SEEDS : (number + 1) * _SEEDS]
        for load in _LOADS:
            for queueing in (False, True):
                found = [row for run in runs for row in run if (row["load"], row["queueing"]) == (load, queueing)]
                dispatch = "queued" if queueing else "at once"
                served = _served(found)
                rows[trace, f"{load:g}", dispatch] = {**served}
                values |= {f"{trace}, {load:g}, {dispatch}: {name}": served[name] for name in ("good", "worst seed")}
        values |= _capacity(trace, runs)
    return View(tables=[Table(labels=("trace", "load", "dispatch"), rows=rows)], values=values)


def _served(runs: Sequence[Any]) -> dict[str, float]:
    good = [run["goodput"]["good"] for run in runs]
    return {
        "seeds": float(len(runs)),
        "good": 100 * mean(good),
        "worst seed": 100 * min(good),
        "good per s": mean(run["goodput"]["per_s"] for run in runs),
        "turned away": 100 * mean(run["goodput"]["rejected"] for run in runs),
        "p95 E2E": mean(run["e2e_s"]["p95"] for run in runs),
    }


def _capacity(trace: str, runs: Sequence[Any]) -> dict[str, float]:
    """Load at capacity, and what 3 times the load gives of what 1.3 does, least and most of the seeds."""
    loads = [1 / (run[0]["load"] * run[0]["time_scale"]) for run in runs]
    per_s = [{row["load"]: row["goodput"]["per_s"] for row in run if row["queueing"]} for run in runs]
    grows = [run[3.0] / run[1.3] for run in per_s]
    return {
        f"{trace}, least load at capacity": min(loads),
        f"{trace}, most": max(loads),
        f"{trace}, 3 over 1.3, least": min(grows),
        f"{trace}, 3 over 1.3, most": max(grows),
    }


# -- claims about the policies

#: Groups with a table of their own are left out.
_CLAIM_GROUPS = ("baselines", "published", "oracle", "scenarios", "wildchat", "priors", "paper", "learned")
_CHOSEN = " ".join(f"--only {group}" for group in _CLAIM_GROUPS)
_POLICIES = "python -m experiments --system policies"
_CLAIMS = f"{_POLICIES} {_CHOSEN} --seeds 5 --trace {CONVERSATION}"
_PARTIAL_HITS = f"{_POLICIES} --only partial-hits --only tail --seeds 3 --jobs 1"
_RESIDUAL = f"{_POLICIES} --only residual --seeds 3 --jobs 1 --trace {CONVERSATION}"
_TWO_TERMS = {
    name: f"{_POLICIES} --only {name} --seeds 5 --jobs 1"
    for name in ("two-terms", "two-terms-hits", "two-terms-shapes")
}
_COUNTS = re.compile(r"(\d+) of (\d+) targets met, all simulated; (\d+) runs, (\d+) s of processor time")


def _claims(results: Sequence[Any]) -> View:
    (lines,) = results
    verdicts: dict[tuple[str, ...], dict[str, Cell]] = {}
    means: dict[tuple[str, str], list[float]] = {}
    for header, rows in tables("\n".join(lines)):
        if header[1] == "of":
            verdicts |= {_coded(row[:4]): _verdict(row) for row in rows}
        else:
            means |= {(row[0], row[1]): [float(cell) for cell in row[2:]] for row in rows}
    (counts,) = [found for line in lines if (found := _COUNTS.search(line))]
    names = ("targets met when stored", "targets", "runs", "processor time, s")
    met = sum(str(row["met"]).startswith("pass") for row in verdicts.values())
    shown = View(
        tables=[
            Table(labels=_VERDICT[:4], rows=verdicts),
            Table(
                labels=_MEANS[:2],
                rows={
                    (on, f"`{policy}`"): dict(zip(_MEANS[2:], row, strict=True)) for (on, policy), row in means.items()
                },
            ),
            _missed(verdicts),
        ],
        values=dict(zip(names, map(float, counts.groups()), strict=True)) | _beside(means) | {"targets met": met},
    )
    return in_words(shown, CLAIMS)


def _verdict(row: Sequence[str]) -> dict[str, Cell]:
    """The cells of a row; of the published claim with the published level, whatever bound it was stored with."""
    cells: dict[str, Cell] = dict(zip(_VERDICT[4:], row[4:], strict=True))
    level = PUBLISHED_RATIOS.get(row[0].split(",")[0])
    if level is not None and row[1].startswith("gorgo") and row[2] != "gorgo":
        value, *interval = map(float, numbers_of(row[5]))
        sure = len({one <= level for one in (value, *interval)}) == 1
        cells |= {"target": f"<= {level:.3f}", "met": ("pass" if value <= level else "missed") + ("" if sure else " ~")}
    return cells


_VERDICT = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
_RATIO = CLAIMS[_VERDICT[5]]
_MEANS = ("on", "policy", "TTFT p50 ms", "TTFT p95 ms", "E2E p50 s", "E2E p95 s", "hit %")


#: Traffic of the claims, in words that need no legend.
_TRAFFIC = {
    "ART-Chat-like": "three days",
    "April 6 like": "April 6",
    "April 7 like": "April 7",
    "geometric mean of 7": "mean of seven loads",
}


def _missed(verdicts: Rows) -> Table:
    """Return the missed targets in words that need no legend: a row per policy, figure and baseline."""
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for (on, of, against, figure), row in verdicts.items():
        if not str(row["met"]).startswith("missed"):
            continue
        value = 100 * (1 - float(numbers_of(str(row["of / against [95 %]"]))[0]))
        aim = 100 * (1 - float(str(row["target"]).removeprefix("<= ")))
        traffic, of_load, load = on.partition(", load ")
        reached = f"{value:.1f} %, not {aim:.0f} %" if aim > 0 else f"{-value:.1f} % above it, {-aim:.0f} % allowed"
        words = f"{_TRAFFIC.get(traffic, traffic)}{of_load}{load}: {reached}"
        place = "below" if aim > 0 else "beside"
        cells = rows.setdefault((f"{of}, {figure} {place} {against}",), {"reached": words})
        if cells["reached"] != words:
            cells["reached"] = f"{cells['reached']}<br>{words}"
    return Table(labels=("missed target",), rows=rows)


def _partial_hits(results: Sequence[Any]) -> View:
    """A row per workload: both ratios, and the share that was cached under `gorgo-ms` and `gorgo`."""
    verdicts, means, _ = _claims(results).tables
    hits = {label: row[CLAIMS["hit %"]] for label, row in means.rows.items()}
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for (on, *_, figure), row in verdicts.rows.items():
        cells = rows.setdefault((on,), {})
        cells[figure] = f"{row[_RATIO]} {row[CLAIMS['met']]}"
        cells[CLAIMS["hit %"]] = [float(str(hits[on, f"`{policy}`"])) for policy in ("gorgo-ms", "gorgo")]
    return View(tables=[Table(labels=(CLAIMS["on"],), rows=rows)])


def _residual(results: Sequence[Any]) -> View:
    """A row per workload: the ratio of each figure, without its interval."""
    found = _claims(results)
    rows = {on: {name: ratio[0] for name, ratio in row.items()} for on, row in _ratios(found).items()}
    return View(tables=[Table(labels=(CLAIMS["on"],), rows=rows)], values=found.values)


def _plateau(results: Sequence[Any]) -> View:
    """A row per change of the weights: the ratio of each figure with its interval."""
    found = _claims(results)
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for (_, _, against, figure), row in found.tables[0].rows.items():
        rows.setdefault((against,), {})[figure] = [float(number) for number in numbers_of(str(row[_RATIO]))][:3]
    return View(tables=[Table(labels=(CLAIMS["against"],), rows=rows)], values=found.values)


def _two_terms(results: Sequence[Any]) -> View:
    """A row per workload: the ratio of each figure with its interval; of each figure the mean and the most."""
    found = _claims(results)
    rows = _ratios(found)
    missed = sum(row[CLAIMS["met"]] == "missed" for row in found.tables[0].rows.values())
    values = {**found.values, "missed by the whole interval": float(missed), "workloads": float(len(rows))}
    for name in next(iter(rows.values())):
        column = [row[name][0] for row in rows.values()]
        values |= {f"{name}, mean": geometric_mean(column), f"{name}, most": max(column)}
    return View(tables=[Table(labels=(CLAIMS["on"],), rows=rows)], values=values)


def _ratios(found: View) -> dict[tuple[str, ...], dict[str, list[float]]]:
    """Return the ratio of each figure with its interval, by workload."""
    rows: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for (on, *_, figure), row in found.tables[0].rows.items():
        rows.setdefault((on,), {})[figure] = [float(number) for number in numbers_of(str(row[_RATIO]))]
    return rows


def _coded(label: Sequence[str]) -> tuple[str, ...]:
    """Policies as code, as pages have them."""
    on, of, against, figure = label
    return on, f"`{of}`", against if against in ("itself", "the best") else f"`{against}`", figure


def _beside(means: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, float]:
    """What the oracle has of the published policy's p50 TTFT and of the best baseline's p95 E2E, by the means."""
    found = {}
    for (on, policy), row in means.items():
        if policy != "oracle":
            continue
        if (on, "gorgo") in means:
            found[f"{on}: oracle / gorgo, p50 TTFT"] = row[0] / means[on, "gorgo"][0]
        best = [means[on, name][3] for name in ALL_READINGS if (on, name) in means]
        if best:
            found[f"{on}: oracle / best baseline, p95 E2E"] = row[3] / min(best)
    return found


# -- the paper's tables


def _fleet(results: Sequence[Any]) -> View:
    (found,) = results
    runs: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in found["stats"]:
        cells = runs.setdefault((row["window"], f"`{row['policy']}`"), {})
        cells[row["figure"]] = [row["simulated"], row["measured"]]
    windows: dict[tuple[str, ...], dict[str, Cell]] = {
        (row["window"],): {
            **row["ratios"],
            "fitted on": "yes" if row["fitted"] else "held out",
            "all": row["ratio"],
            "within 30 %": 100 * row["within"],
            "rho": row["rho"],
        }
        for row in found["windows"]
    }
    claims: dict[tuple[str, ...], dict[str, Cell]] = {}
    columns = [f"`{row['against']}`, {row['figure']}" for row in found["claims"]]
    for row, column in zip(found["claims"], columns, strict=True):
        cells = claims.setdefault((row["on"],), dict.fromkeys(columns))
        cells[column] = [row["published"], row["simulated"]]
    sweep: dict[tuple[str, ...], dict[str, Cell]] = {}
    for row in found["sweep"]:
        cells = sweep.setdefault((row["window"], f"`{row['policy']}`"), {})
        cells[row["figure"]] = [row["simulated"], row["measured"]]
    ratios = [row["simulated"] / row["measured"] for row in found["stats"]]
    missed = sum(not 1 / 1.3 <= ratio <= 1.3 for ratio in ratios)
    shown = View(
        tables=[
            Table(labels=("window", "policy"), rows=runs),
            Table(labels=("window",), rows=windows),
            Table(labels=("load", "policy"), rows=sweep),
            Table(labels=("`gorgo` over",), rows=claims),
        ],
        values={"seeds": found["seeds"], "figures": len(ratios), "met": len(ratios) - missed, "missed": missed},
    )
    return in_words(shown, FLEET)


# -- claims about the tuner


def _tuning(results: Sequence[Any]) -> View:
    (statements,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in statements:
        bound = one["at_most"] if one["at_most"] is not None else one["at_least"]
        shown = [one[name] for name in ("value", "low", "high") if one[name] is not None]
        met = {None: "", True: "passed", False: "**missed**"}[one["met"]]
        rows[one["text"],] = {"measured": shown, "target": bound, "": met, "note": one["note"]}
    judged = [one["met"] for one in statements if one["met"] is not None]
    values = {"seeds": float(TUNING_SEEDS), "statements": float(len(judged)), "passed": float(sum(judged))}
    return in_words(View(tables=[Table(labels=("statement",), rows=rows)], values=values), TUNING)


#: The whole table has 10 seeds and more groups, and takes two cores for more than an hour.
TUNING_SEEDS = 2
_GROUPS = "--only protocol --only 'no harm' --only 'bad start'"
_TUNING = f"python -m experiments --system tuner {_GROUPS} --seeds {TUNING_SEEDS} --jobs 1 --json"


# -- benches


def _prefix_index(results: Sequence[Any]) -> View:
    (lines,) = results
    weights = [
        [int(word.replace(",", "")) for word in line.split()] for line in lines if re.match(r" +\d+  +[\d,]+$", line)
    ]
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (str(blocks),): {"MB per 1 M blocks": size / 1e6} for blocks, size in weights
    }
    values = {f"MB per 1 M blocks, prompts of {blocks}": size / 1e6 for blocks, size in weights}
    return View(tables=[Table(labels=("blocks a prompt",), rows=rows)], values=values | {"million": 1.0})


def _submit(results: Sequence[Any]) -> View:
    (lines,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for line in lines:
        found = re.match(
            r"(gorgo\S*) +(\d+) +(0 at start|[\d,]+) +(without|with) +([\d.]+) +([\d.]+)(?: +[\d.]+)?$", line
        )
        if found:
            policy, replicas, indexed, fingerprint, p50, p99 = found.groups()
            column = "empty index" if indexed == "0 at start" else "1.3 M blocks indexed"
            row = rows.setdefault((f"`{policy}`", replicas), {})
            row[column if fingerprint == "without" else f"{column}, with the fingerprint"] = [float(p50), float(p99)]
    return View(tables=[Table(labels=("policy", "replicas"), rows=rows)])


def _lateness(results: Sequence[Any]) -> View:
    (lines,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for line in lines:
        found = re.match(r"(freezing|late-path|steady) +(neither|overdue clock|clock and hedging) +(.*)$", line)
        if found:
            scenario, way, rest = found.groups()
            p50, p95, p95_ratio, p99, p99_ratio, e2e, e2e_ratio, hedged = map(float, re.findall(r"\d+(?:\.\d+)?", rest))
            plain = way == "neither"
            rows[f"`{scenario}`", way] = {
                "p50 TTFT, ms": p50,
                "p95, ms": p95 if plain else [p95, p95_ratio],
                "p99, ms": p99 if plain else [p99, p99_ratio],
                "p95 E2E, s": e2e if plain else [e2e, e2e_ratio],
                "hedged": None if hedged == 0 else hedged,
            }
    return View(tables=[Table(labels=("scenario", "with"), rows=rows)])


def _continued(results: Sequence[Any]) -> View:
    (lines,) = results
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for line in lines:
        found = re.match(r"([\d.]+) +(an error|sent again|continued) +([\d.]+)% +(\d+) +([\d.]+)%$", line)
        if found:
            load, way, share, broken, of_broken = found.groups()
            rows[load, way] = {
                "of all requests": float(share),
                "broken answers": int(broken),
                "of these": float(of_broken),
            }
    return View(tables=[Table(labels=("load", "a broken answer is"), rows=rows)])


# -- data sets

_WINDOWS = ("art-chat-apr5", "art-chat-apr6", "art-chat-apr7")
#: Row of the GORGO paper's table 4: the key of ours, the factor to the unit shown, and what the paper has.
_TABLE_4: Mapping[str, tuple[str, float, Sequence[float]]] = {
    "requests": ("requests", 1, (7195, 7630, 8663)),
    "distinct users": ("users", 1, (579, 606, 540)),
    "requests per user": ("requests_per_user", 1, (12.8, 12.9, 16.4)),
    "mean turns": ("turns_mean", 1, (30.3, 27.7, 21.5)),
    "multi-turn requests": ("multi_turn_share", 100, (73.9, 74.1, 73.7)),
    "input tokens, median": ("input_p50", 1, (5638, 5787, 5745)),
    "input tokens, mean": ("input_mean", 1, (6877, 7008, 7148)),
    "input tokens, p95": ("input_p95", 1, (19_886, 20_974, 20_435)),
    "block reuse, global": ("block_reuse", 100, (78.8, 77.6, 87.9)),
    "block reuse, intra-user": ("user_block_reuse", 100, (78.5, 77.1, 87.4)),
}


#: Rows of the conversation trace: keys, and factors to the unit shown.
_CONVERSATION_ROWS: Mapping[str, Sequence[tuple[str, float]]] = {
    "requests, per second": [("requests", 1), ("requests_per_s", 1)],
    "input tokens median / mean / p95": [("input_p50", 1), ("input_mean", 1), ("input_p95", 1)],
    "output tokens mean": [("output_mean", 1)],
    "block reuse, global": [("block_reuse", 100)],
}


def _windows(results: Sequence[Any]) -> View:
    described, (whole,), (filtered,) = results
    ours = {one["trace"]: one for one in described}
    rows: dict[tuple[str, ...], dict[str, Cell]] = {
        (name,): {
            f"`{window}`": [ours[window][key] * factor, theirs] for window, theirs in zip(_WINDOWS, paper, strict=True)
        }
        for name, (key, factor, paper) in _TABLE_4.items()
    }
    columns = {"as it is": whole, "`--max-input 24000 --max-output 128`": filtered}
    conversation: dict[tuple[str, ...], dict[str, Cell]] = {
        (name,): {column: [one[key] * factor for key, factor in keys] for column, one in columns.items()}
        for name, keys in _CONVERSATION_ROWS.items()
    }
    values = {key: whole[key] for key in ("requests", "duration_s", "input_p50", "input_mean", "input_p95")}
    return View(
        tables=[
            Table(labels=("seed 0 (paper)",), rows=rows),
            Table(labels=("conversation trace",), rows=conversation),
        ],
        values=values | {"block reuse, %": 100 * whole["block_reuse"]},
    )


#: Published figures of the traffic that a shape follows: requests, mean input and output tokens, reuse in %.
_PUBLISHED: Mapping[str, Sequence[float | None]] = {
    "toolagent-like": (23_608, 8596, 182, 59),
    "synthetic-like": (3993, 15_325, 149, 66),
    "wildchat-like": (None, 840, None, 4.95),  # of the authors' rerun; the GORGO paper has 2,925 and 32.5
    "rag": (None, 2959, 198, None),
    "short-chat": (None, None, 214.5, None),
    "groups": (None, None, 256, None),
    "sharing": (None, None, None, None),
    "herd": (None, None, None, None),
    "agents": (None, None, None, None),
    "chat-small": (None, None, None, None),
}


def _shapes(results: Sequence[Any]) -> View:
    (described,) = results
    names = ("requests", "input mean", "output mean", "block reuse")
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for one in described:
        ours = (one["requests"], one["input_mean"], one["output_mean"], 100 * one["block_reuse"])
        pairs = zip(names, ours, _PUBLISHED[one["trace"]], strict=True)
        rows[f"`{one['trace']}`",] = {
            name: [value] if theirs is None else [value, theirs] for name, value, theirs in pairs
        }
    return View(tables=[Table(labels=("shape",), rows=rows)])


def _printed(results: Sequence[Any]) -> View:
    return View(lines=[line for printed in results for line in printed])


FIGURES: Mapping[str, Figure] = {
    "demo": Figure(["gorgo demo"], _demo),
    "comparison": Figure(COMPARISON, comparison),
    "burst": Figure(BURST_COMMANDS, burst),
    "comparison-windows": Figure(WINDOWS_COMMANDS, by_window),
    "overload": Figure(
        [f"gorgo overload {trace} --seed {seed} --json" for trace in _TRACES for seed in range(_SEEDS)], _overload
    ),
    "claims": Figure([_CLAIMS], _claims),
    "partial-hits": Figure([_PARTIAL_HITS], _partial_hits),
    "residual": Figure([_RESIDUAL], _residual),
    **{name: Figure([command], _two_terms) for name, command in _TWO_TERMS.items()},
    "plateau": Figure(["python -m experiments --system plateau --only plateau --seeds 3 --jobs 1"], _plateau),
    "engines": Figure([ENGINES], engines),
    **{name: Figure([command], HERD_VIEWS[name]) for name, command in HERD_COMMANDS.items()},
    **{name: Figure(PEER_COMMANDS[name], view) for name, view in PEER_VIEWS.items()},
    "fleet": Figure(["python -m experiments --system gorgo --only tables --seeds 3 --jobs 1 --json"], _fleet),
    "paper-tables": Figure([PAPER_COMMAND], paper_tables),
    "tuning": Figure([_TUNING], _tuning),
    "tuning-fleets": Figure([FLEETS_COMMAND], tuning_fleets),
    "tuning-fleets-more": Figure([FLEETS_MORE_COMMAND], tuning_fleets_more),
    "tuning-steps": Figure([STEPS_COMMAND], tuning_steps),
    "tuning-algorithms": Figure([ALGORITHMS_COMMAND], tuning_algorithms),
    "scaling": Figure(SCALING_DAY, scaling_day),
    "scaling-warmed": Figure(SCALING_JOIN, scaling_join),
    "whatif-coverage": Figure([COVERAGE_COMMAND], whatif_coverage),
    "decision": Figure(["python -m tests.bench router_submit"], _submit),
    "continued": Figure(["python -m tests.bench continued"], _continued),
    "lateness": Figure(["python -m tests.bench overload_lateness"], _lateness),
    "chaos": Figure(["python -m tests.chaos --short --seed 2026"], _printed),
    "fast-failures": Figure(
        [f"python -m tests.chaos.fast_failures --at {BEFORE}", "python -m tests.chaos.fast_failures"], fast_failures
    ),
    "attacks": Figure([f"python -m tests.attacks --at {ATTACKS_BEFORE}", "python -m tests.attacks"], attacks),
    "attacks-seams": Figure(["python -m tests.attacks --seams"], attacks_of_seams),
    "relay": Figure(RELAY_COMMANDS, relay),
    "learned-routers": Figure(commands(GROUPS), learned_routers),
    "learned-routers-motivation": Figure(commands(MOTIVATION), learned_routers),
    "learned-routers-lodestar": Figure(commands(LODESTAR), learned_routers),
    "learned-routers-ablations": Figure(commands(ABLATIONS), learned_routers),
    "learned-routers-k-filter": Figure(commands(K_FILTER), learned_routers),
    "learned-routers-long": Figure(commands(LONG), learned_routers),
    "learned-routers-prefill": Figure(commands(PREFILL), learned_routers),
    "learned-routers-shape": Figure(commands(SHAPE), learned_routers),
    "learned-routers-rates": Figure(commands(RATES), learned_routers),
    "learned-routers-circular": Figure(commands(CIRCULAR), learned_routers),
    "learned-routers-pools": Figure(commands(POOLS), learned_routers),
    "learned-routers-tau": Figure(commands(TAU), learned_routers),
    "learned-routers-accuracy": Figure(commands(ACCURACY), learned_routers),
    "learned-routers-scrapes": Figure(commands(SCRAPES), learned_routers),
    "learned-routers-gates": Figure(commands(GATES), learned_routers),
    "learned-routers-shadows": Figure(commands(SHADOWS), learned_routers),
    "learned-routers-later": Figure(commands(LATER), learned_routers),
    "learned-routers-ladders": Figure(commands(LADDERS), learned_routers),
    "learned-routers-more": Figure(commands(MORE), learned_routers),
    "cache-sources": Figure(CACHE_SOURCES, cache_sources),
    "cache-scenarios": Figure(SCENARIOS, cache_sources),
    "cache-sticky": Figure(STICKY, cache_sources),
    "cache-workloads": Figure([WORKLOADS], cache_sources),
    "several-routers": Figure(SEVERAL_ROUTERS, several_routers),
    "processes": Figure([PROCESSES], processes),
    "large-fleets": Figure(["python -m tests.bench large_fleets"], _printed),
    "prefix-index": Figure(["python -m tests.bench prefix_index"], _prefix_index),
    "shapes": Figure([f"gorgo datasets describe {' '.join(_PUBLISHED)} --json"], _shapes),
    "windows": Figure(
        [
            f"gorgo datasets describe {' '.join(_WINDOWS)} --json",
            f"gorgo datasets describe {CONVERSATION} --json",
            f"gorgo datasets describe {CONVERSATION} --max-input 24000 --max-output 128 --json",
        ],
        _windows,
    ),
}

#: Figures that were measured and cannot be made again in passing: why, and at which commits. A commit is that of the
#: code measured or, where it was not written down, that which brought the figure. Pages name none.
NOT_STORED: Mapping[str, NotStored] = {
    "workers": NotStored(
        "live processes in wall time: needs two cores to itself", "9d52d8c, a8d052b, 0bfe775, afd7243"
    ),
    "long-path": NotStored("needs root and NFQUEUE", "d685f41"),
    "kv-events": NotStored(
        "benches of time, which need the machine for themselves for minutes each", "ee77183, e0a016d"
    ),
    "calibrate": NotStored(
        "needs vLLM's CPU build and a processor of its own for each engine", "7f05e8b, 99c5014, 279d3fc"
    ),
    "simulator": NotStored(
        "compares with an earlier commit, in alternating runs that no command makes", "55aa876, cebacbb, ea16e44"
    ),
    "parity": NotStored("live processes in wall time: needs two cores to itself", "fd77f77, 42a9319"),
    "learned-cost": NotStored(
        "needs two cores to itself: `python -m tests.bench learned_submit training_beside`", "bd415b1, 4a1edaf, eab2f23"
    ),
    "plan-live": NotStored("live processes in wall time: `pytest -m system tests/system/test_plan.py`", "5f834dc"),
    "whatif-blocks": NotStored(
        "of its three fleets two were run whole; the eight candidates without a log have longer traffic, in a script",
        "89ff5b1, 5f834dc",
    ),
    "hacked-vllm": NotStored("live vLLM on a CPU, in a script", "89ed511"),
    "relay-plain": NotStored(
        "processes in wall time: needs two cores to itself, `python -m tests.bench.relay --pair plain`", "dc0a31a"
    ),
    "picker-price": NotStored(
        "processes in wall time: needs two cores to itself, `python -m tests.bench picker_price`", "89ed511, 4b00b9f"
    ),
    "picker": NotStored("needs two cores to itself for nine minutes", "ee77183"),
    "picker-faults": NotStored("live processes in wall time: needs two cores to itself", "e348171, cf7b8a3"),
    "chaos-long": NotStored("nine minutes of live processes for each schedule", "cf7b8a3"),
    "several-routers-more": NotStored(
        "one seed of an earlier commit, and time on a busy machine", "a8aa696, ee77183, b781046"
    ),
    "herd-live": NotStored("live processes in wall time, and a policy without two of its terms", "08c66ea"),
}
