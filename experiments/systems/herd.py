"""This project's claims about traffic on which sessions herd, and whether the tuner finds weights that herd less.

The workloads, each on eight H100 in one region and on six in three regions, with whole KV pools and a quarter of each:

- 61 sessions behind 1, 3 or 10 system prompts, a turn each per round, at three gaps, and at a fourth where nothing
  but the terms that look ahead can spread them: one prompt, one region, whole pools;
- the same with sessions that are replaced by new ones;
- agents' sessions that come and go.

Where the near pools cannot hold all sessions the floor is out of reach, and the targets are to `pinned` and to the
policy without the terms `room` and `shared`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import cast

from experiments.reports import FigureColumn, Grid, SystemReport, target_report
from experiments.runner import Experiment, Runner
from experiments.systems.tuner_claims import HEADER as TUNER_HEADER
from experiments.systems.tuner_claims import part_ratio, shown_weights, ttft
from experiments.tables import ClaimVerdict, sections
from experiments.tuning import Search, TuningTask, Windows
from experiments.windows import SHORT_SIGHTED, RatioTarget, Workload, targets_of
from gorgo.lab.datasets import AgentsShape, HerdShape, read_shape, shapes
from gorgo.lab.results import load_text
from gorgo.lab.simulate import FLOOR, PINNED
from gorgo.lab.simulate.compare import ratio_of
from gorgo.policies.registry import PAPER

NAME, TITLE = "herd", "this project's claims about sessions that share a system prompt"
TITLES: Mapping[str, str] = {
    "herd": "Sessions side by side, one region, whole pools: against the floor, itself before, the best of the others",
    "herd-pools": "The same with a quarter of each pool: against `pinned`, itself before and the best of the others",
    "herd-regions": "In three regions, whole pools: against `pinned`, itself before and the best of the others",
    "herd-regions-pools": "In three regions, a quarter of each pool: against the same",
    "herd-changing": "Sessions that come and go: against the best of the others",
    "herd-tuner": "Whether the tuner finds weights of the published policy that herd less",
}
GROUPS = tuple(TITLES)
TUNER = "herd-tuner"
#: Policies that were published with such traffic in mind, and the published one.
OTHERS = (PAPER, "prefix-cache-and-load", "mooncake", "lmetric", "dualmap", "skywalker", "preble-e2")
ONE_REGION, THREE_REGIONS, QUARTER = "8x1xH100", "6x1xH100", 0.25
GAPS_S, LONG_GAP_S, SYSTEM_PROMPTS = (0.4, 1.5, 4.0), 15.0, (1, 3, 10)
HERD = cast(HerdShape, read_shape(shapes()["herd"]))
#: Share of the sessions that end before each round.
LEAVING = 0.15
#: A third ask once, the others take nine turns on average, of the lengths of the herd's; no bursts.
AGENTS = AgentsShape(
    seed=0, duration_s=1500.0, sessions_per_s=0.1, burst_mean=1.0, one_shot_share=0.3, turns_mean=9.0, groups=1,
    system_median=8192.0, system_sigma=0.0, task_median=1948.0, task_sigma=0.5, tool_median=1948.0, tool_sigma=0.5,
    pause_s_min=1.0, pause_s_mean=30.0, answer_token_s=0.01, output_median=100.0, output_sigma=0.5, output_max=512,
    input_max=32_000,
)  # fmt: skip
#: New sessions per second on each fleet, with the part of its pools that there is.
ARRIVALS: Sequence[tuple[str, float, float]] = (
    (ONE_REGION, QUARTER, 0.05), (ONE_REGION, QUARTER, 0.1), (ONE_REGION, QUARTER, 0.5), (ONE_REGION, 1.0, 0.5),
    (THREE_REGIONS, QUARTER, 0.2), (THREE_REGIONS, 1.0, 1.0),
)  # fmt: skip
#: Bounds: where the pools hold all sessions, where they do not, and behind the best of the others.
OF_FLOOR, OF_PINNED, OF_OTHERS = 1.1, 1.1, 1.03
MEAN, P95, P99 = "mean TTFT", "p95 TTFT", "p99 TTFT"
#: Of the policy without `room` and `shared`: where the pools hold all sessions, and where they do not.
OF_BEFORE, OF_BEFORE_QUARTERED = ((MEAN, 1.0), (P95, 1.0), (P99, 1.0)), ((MEAN, 0.85), (P95, 1.03), (P99, 1.03))
MEANS: Sequence[FigureColumn] = (
    ("TTFT mean ms", "mean TTFT", ".0f", 1), ("p50", "p50 TTFT", ".0f", 1), ("p95", "p95 TTFT", ".0f", 1),
    ("p99", "p99 TTFT", ".0f", 1), ("E2E p95 s", "p95 E2E", ".2f", 1), ("hit %", "hit", ".1f", 100),
    ("largest share %", "largest share", ".0f", 100),
)  # fmt: skip
#: The search of a window, and the loads: the herd's own, and four times that.
SEARCH, SEARCH_SCALES = Search(candidates=12, seeds=2, held_out_seeds=6), (1.0, 0.25)


def herd(groups: int, gap_s: float, *, leaving_share: float = 0.0) -> Workload:
    """Return a herd, steady unless a share of its sessions leaves."""
    shape = replace(HERD, groups=groups, gap_s=gap_s, leaving_share=leaving_share)
    prompts = "1 system prompt" if groups == 1 else f"{groups} system prompts"
    name = f"{'changing' if leaving_share else 'steady'}, {prompts}, a request per {gap_s:g} s"
    return Workload(name=name, traces=("herd",), shape=shape)


def agents(sessions_per_s: float) -> Workload:
    shape = replace(AGENTS, sessions_per_s=sessions_per_s)
    return Workload(name=f"agents, {sessions_per_s:g} sessions/s", traces=("agents",), shape=shape)


def all_targets() -> list[RatioTarget]:
    """Return every target in the order of the tables."""
    steady = [herd(groups, gap_s) for groups, gap_s in product(SYSTEM_PROMPTS, GAPS_S)]
    places = {
        "herd": [one.on(ONE_REGION) for one in (*steady, herd(1, LONG_GAP_S))],
        "herd-pools": [one.on(ONE_REGION, pool_share=QUARTER) for one in steady],
        "herd-regions": [one.on(THREE_REGIONS) for one in steady],
        "herd-regions-pools": [one.on(THREE_REGIONS, pool_share=QUARTER) for one in steady],
    }
    of_others = (MEAN, OF_OTHERS), (P95, OF_OTHERS)
    found: list[RatioTarget] = []
    for group, workloads in places.items():
        if group == "herd":
            found += targets_of(group, workloads, (FLOOR,), (MEAN, OF_FLOOR), (P95, OF_FLOOR))
            found += targets_of(group, workloads, (SHORT_SIGHTED,), *OF_BEFORE)
        else:
            found += targets_of(group, workloads, (PINNED,), (MEAN, OF_PINNED))
            found += targets_of(group, workloads, (SHORT_SIGHTED,), *OF_BEFORE_QUARTERED)
        found += targets_of(group, workloads, OTHERS, *of_others)
    changing = [
        herd(groups, 1.5, leaving_share=LEAVING).on(fleet, pool_share=share)
        for fleet, share, groups in product((ONE_REGION, THREE_REGIONS), (1.0, QUARTER), SYSTEM_PROMPTS)
    ]
    arrivals = [agents(rate).on(fleet, pool_share=share) for fleet, share, rate in ARRIVALS]
    found += targets_of("herd-changing", [*changing, *arrivals], OTHERS, *of_others)
    return [*found, *targets_of("herd-changing", arrivals, (PINNED,), (MEAN, OF_PINNED))]


def tuner(seeds: Sequence[int]) -> Experiment:
    """Search the published policy's weights on the herd, those of its prompts that the paper would not drop."""

    def task(seed: int, time_scale: float) -> TuningTask:
        windows = Windows(shapes=("herd",), draw=seed, time_scale=time_scale)
        return TuningTask(windows=windows, policy=PAPER, fleet=ONE_REGION, seed=seed, search=SEARCH)

    runs = yield [task(seed, scale) for scale in SEARCH_SCALES for seed in seeds]
    verdicts = []
    for scale in SEARCH_SCALES:
        found = [runs[task(seed, scale)] for seed in seeds]
        shares = [(one.tail.max_share or 0.0, one.whole.max_share or 0.0) for one in found]
        moved = sum(one.accepted for one in found)
        after, before = (fmean(part) for part in zip(*shares, strict=True))
        weights = "; ".join(shown_weights(one.weights) for one in found)
        text = f"herd, {load_text(scale)}: {PAPER} searched by the twin / start"
        notes = (f"moved in {moved} of {len(found)}: {weights}", f"largest share {after:.2f} after {before:.2f}")
        ratios = part_ratio([(one.tail, one.whole) for one in found], ttft), ratio_of(shares)
        for figure, ratio, note in zip(("p95 TTFT", "largest share"), ratios, notes, strict=True):
            verdicts.append(ClaimVerdict.of_ratio(TUNER, (f"{text}, {figure}",), ratio, note=note))
    return verdicts


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    verdicts = runner.verdicts(tuner(grid.seeds), title=TUNER) if TUNER in groups else []
    rows, tables = [verdict.as_json() for verdict in verdicts], sections(verdicts, TUNER_HEADER, TITLES)
    if set(groups) == {TUNER}:
        return SystemReport(sections=tables, end=f"{len(grid.seeds)} seeds, all simulated.", rows=rows)
    found = target_report(all_targets(), groups, grid, runner, TITLES, MEANS)
    return replace(found, sections=[*found.sections, *tables], rows=[*found.rows, *rows])
