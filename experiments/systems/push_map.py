"""A cache map that workers fill by pushes, beside every other source of what a router knows of caches.

Loads are those of the simulated fleets: medium load, below the rate at which queues grow without end. The post has no
measurements but one statement: of N workers round robin finds a prefix on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from experiments.comparison import ComparisonTarget, VariantComparison, mean_of
from experiments.fleets import ExperimentFleet
from experiments.pictures import Pictured
from experiments.published import Claim, Published
from experiments.reports import EVENTS as OURS
from experiments.reports import Grid, SystemReport, cached, variant_report
from experiments.runner import Runner, Runs
from experiments.systems.policies import ENGINE_FILTERS, ENGINE_FLEETS, ENGINE_SHAPES
from experiments.traffic import ChatTraffic, ContextTraffic
from gorgo.lab.datasets import own_block_tokens
from gorgo.lab.sim.faults import BadReports, RouterRestart
from gorgo.lab.sim.kv_events import PathFaults
from gorgo.lab.simulate.compare import Ratio

NAME, TITLE = "push-map", "push-based cache map"
ROUND_ROBIN, STICKY, HISTORY, EVENTS, EXACT = (
    "round-robin", "sticky-least-loaded", "history and cached_tokens", "events", "exact caches",
)  # fmt: skip
SOURCES = ("history, unbounded", "history, bounded", HISTORY, "push", EVENTS, EXACT)
REPORTED = (HISTORY, "push", EVENTS)
#: Parts of each KV pool, and replicas of the sweep.
POOLS, REPLICAS = (1.0, 0.25, 1 / 16), (2, 4, 8, 16)
_CHAT = ChatTraffic(name="ART-Chat-like", trace="art-chat-apr5", requests=2400)
#: Questions on contexts of 10k tokens; one pool of an H100 has room for 45.
_CONTEXTS = ContextTraffic(
    name="RAG, 10k tokens", contexts=288, context_tokens=10_000, popularity=0.7, requests=2400, rate_per_s=8.0
)
_H100 = ExperimentFleet(name="8xH100", profile="1xH100-Llama-3.1-8B", replicas=8)
#: Times of the faults, s: reports are lost, then the path is cut, then the router starts again.
LOST_S, CUT_S, RESTART_S = (60.0, 80.0), (110.0, 130.0), 160.0


def comparisons() -> list[VariantComparison]:
    equal = ExperimentFleet(name="8xL40S", profile="1xL40S-Llama-3.1-8B", replicas=8)
    contexts = [
        ContextTraffic(name=name, contexts=count, context_tokens=tokens, requests=1_600, rate_per_s=5.6)
        for name, count, tokens in (("RAG, 128 contexts", 128, 10_000), ("one system prompt", 1, 2_000))
    ]
    return [
        *_sources(),
        *_workloads(),
        _faults(),
        *_replicas(),
        # Its policy, Algorithm 1: on many contexts of equal use, and where each request begins with the same prompt.
        *(cached("sticky", equal, traffic, (ROUND_ROBIN, STICKY, EVENTS)) for traffic in contexts),
    ]  # fmt: skip


def _sources() -> Iterator[VariantComparison]:
    """Sources side by side: events within 2 % of exact caches, and never behind the history."""
    # At their own load the chats would have queues without end on the smallest pools.
    slower, chats = replace(_CHAT, name=f"{_CHAT.name}, 0.4 of its load", load=0.4), ExperimentFleet(name="sglang")
    targets = (
        ComparisonTarget(of=EVENTS, against=EXACT, figure="p95 TTFT", at_most=1.02),
        ComparisonTarget(of=EVENTS, against=EXACT, figure="hit", at_least=0.98),
        ComparisonTarget(of=EVENTS, against=HISTORY, figure="p95 TTFT", at_most=1.0),
        ComparisonTarget(of=EVENTS, against=HISTORY, figure="mean TTFT", at_most=1.0),
    )
    for share, traffic in zip(POOLS, (_CHAT, _CHAT, slower), strict=True):
        yield cached("sources", replace(chats, pool_share=share), traffic, SOURCES, targets=targets)
    for share in POOLS:
        yield cached("sources", replace(_H100, pool_share=share), _CONTEXTS, SOURCES, targets=targets)


def _workloads() -> Iterator[VariantComparison]:
    """Every shape on engines of both kinds: with events never behind the history alone."""
    targets = [ComparisonTarget(of=EVENTS, against=HISTORY, figure=one, at_most=1.0) for one in ("p95 TTFT", "p95 E2E")]
    for fleet, (trace, time_scale) in product(ENGINE_FLEETS, ENGINE_SHAPES.items()):
        traffic = ChatTraffic(
            name=f"{trace}, load {1 / time_scale:.2g}", trace=trace, requests=700, load=1 / time_scale,
            block_tokens=own_block_tokens(trace), filters=ENGINE_FILTERS,
        )  # fmt: skip
        yield cached("workloads", ExperimentFleet(name=fleet), traffic, (HISTORY, EVENTS), targets=targets)


def _faults() -> VariantComparison:
    """Phantom and missed tokens over time, while reports fail and the router restarts."""
    faults = (
        BadReports(None, PathFaults(lost=0.5, doubled=0.1, reordered=0.1), *LOST_S),
        BadReports(None, PathFaults(cut=True), *CUT_S),
        RouterRestart(RESTART_S),
    )
    marks = {LOST_S[0]: "half of the reports lost", CUT_S[0]: "reports cut", RESTART_S: "router restarts"}
    fleet, traffic = replace(_H100, pool_share=0.25), replace(_CONTEXTS, requests=1760)
    return cached("faults", fleet, traffic, REPORTED, faults=faults, audited=True, marks=marks)


def _replicas() -> Iterator[VariantComparison]:
    """As many contexts per replica at each size of the fleet: round robin finds fewer of them the larger it is."""
    for count in REPLICAS:
        traffic = ContextTraffic(
            name=f"RAG, {16 * count} contexts", contexts=16 * count, context_tokens=10_000, requests=200 * count,
            rate_per_s=0.7 * count,
        )  # fmt: skip
        fleet = ExperimentFleet(name=f"{count}xL40S", profile="1xL40S-Llama-3.1-8B", replicas=count)
        yield cached("replicas", fleet, traffic, (ROUND_ROBIN, *REPORTED), x=float(count))


GROUPS = tuple(dict.fromkeys(one.group for one in comparisons()))
_REPLICAS = {"hit": "hit", "p95 TTFT, ms": "p95 TTFT", "bytes of reports a request": "bytes_per_request"}
PICTURES = {
    "replicas": Pictured("lines", _REPLICAS, x_label="replicas"),
    "faults": Pictured("times", {"phantom, of estimated": "phantom", "missed, of cached": "missed", "hit": "hit"}),
}


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    return variant_report(comparisons(), groups, grid, runner, PICTURES)


def claims(grid: Grid) -> list[Claim]:
    """Return what the post says, at each size of a fleet whose caches hold all contexts together and no one alone.

    Round robin finds a prefix on one worker of N, so its share of hits falls to 1/N of the map's.
    """
    found = []
    for one in (each.scaled(grid.scale) for each in _replicas()):
        count = int(one.x)
        column = f"round robin over {count} workers", "share of hits, 1/N"
        claim = Claim(
            system=TITLE, on=one.title, figure=f"hits, {ROUND_ROBIN} / {STICKY}",
            published=Published.of("push map", "text", *column, f"{1 / count:.4g}"),
            tasks=[one.task(name, seed) for seed in grid.seeds for name in (ROUND_ROBIN, STICKY, EVENTS)],
            reproduced=partial(one.ratio, ROUND_ROBIN, STICKY, "hit", grid.seeds),
            ours=partial(one.ratio, ROUND_ROBIN, EVENTS, "hit", grid.seeds), ours_name=OURS,
        )  # fmt: skip
        found.append(claim)
    figure, whole = "phantoms live at most, s", grid.scale == 1
    claim = Claim(
        system=TITLE, on=_faults().title, figure=figure, is_ratio=False,
        published=Published.of("push map", "text on synchronisation", "full set each 5 s", figure, "5"),
        tasks=[_faults().scaled(grid.scale).task("push", seed) for seed in grid.seeds],
        reproduced=partial(_phantoms_s, grid.seeds) if whole else None,
        note="" if whole else "with fewer requests the run ends before the faults do",
    )  # fmt: skip
    return [*found, claim]


def _phantoms_s(seeds: Sequence[int], runs: Runs) -> Ratio | None:
    """Return after how many seconds with a whole path a push map has at most 5 % of phantoms; slices are 5 s."""
    lasted = []
    for run in _faults().runs_of("push", runs, seeds):
        begins = [(one["begins_s"] or 0.0) for one in run.slices if (one["phantom"] or 0.0) > 0.05]
        late = [begin_s + 5.0 for begin_s in begins if CUT_S[1] <= begin_s < RESTART_S]
        lasted.append(max(late, default=CUT_S[1]) - CUT_S[1])
    return mean_of(lasted)
