"""This project's own claims about its policies, as a list of targets.

The workloads:

- ART-Chat-like windows of three days (a seed has one of the days), drawn by seed, with the paper's filters;
- the first 7,000 requests of Mooncake's conversation trace, where its file is there;
- a WildChat-like window, at a load at which nothing queues;
- every shape on two kinds of scheduler, with full and partial hits, at a load that keeps the fleet busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from time import monotonic

from experiments.comparison import MEASURES
from experiments.grid import Grid, SystemReport
from experiments.runner import Runner, Runs
from experiments.tables import TableSection, number, sections
from experiments.windows import LEARNED, SHORT_SIGHTED, PolicyTask, RatioTarget, Workload, targets_of
from gorgo.lab.results import ResultRow
from gorgo.lab.simulate import ORACLE
from gorgo.lab.simulate.job import STEADY
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import ALL_READINGS, BASELINES, OURS, PAPER, RANDOM

NAME, TITLE = "policies", "this project's claims about its policies"
#: By group of targets.
TITLES = {
    "baselines": "Against the best of the paper's four baselines",
    "published": "Against the published policy",
    "oracle": "Against the same rule with full knowledge (`oracle`)",
    "rivals": "Against the best of four other routers' rules",
    "scenarios": "When something goes wrong or is different",
    "wildchat": "Short prompts, little reuse, no queues",
    "priors": "Told the wrong speed, 3x either way, against itself told the right one",
    "paper": "The published claim: p95 TTFT over the best baseline on held-out windows",
    "learned": "The same with the weights that the authors learned (w_rtt 0.276, w_queue 0.5), frozen",
    "engines": "Every shape on two schedulers, with full and partial hits: against the better of all others",
    "partial-hits": "Engines that find part of each cached prefix, against the published policy",
    "tail": "Short prompts at the trace's own load: the tail that the stall of others costs",
    "residual": "`gorgo-residual`, which learns within the run, against `gorgo-ms`",
    "two-terms": "`gorgo-ms` against itself without `room` and `shared`, on this traffic and beyond capacity",
    "two-terms-hits": "The same on engines that find part of each cached prefix",
    "two-terms-shapes": "The same on every shape and two schedulers",
}
GROUPS = tuple(TITLES)
TTFT, E2E = "p95 TTFT", "p95 E2E"
HEADER = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
MEANS_HEADER = ("on", "policy", "TTFT p50 ms", "p95", "E2E p50 s", "p95", "hit %")
#: Measure, form and factor of the columns behind on and policy.
MEANS: Sequence[tuple[str, str, float]] = (
    ("p50 TTFT", ".0f", 1), ("p95 TTFT", ".0f", 1), ("p50 E2E", ".2f", 1), ("p95 E2E", ".2f", 1), ("hit", ".1f", 100)
)  # fmt: skip
#: The paper drops longer prompts and caps answers; its model reaches the cap with nearly every answer.
FILTERS = TraceFilters(max_input=24_000, max_output=128, min_output=128)
ART_CHAT = Workload(name="ART-Chat-like", traces=("art-chat-apr5", "art-chat-apr6", "art-chat-apr7"), filters=FILTERS)
ART_CHAT_LOADS = (3.0, 2.0, 1.25, 1.0)
#: Its clock is 3 s coarse: requests of one stamp are scattered over that.
CONVERSATION_FILTERS = TraceFilters(max_input=24_000, max_output=128, limit=7_000, spread_s=3.0)
CONVERSATION_LOADS = (3.0, 2.0, 1.25)
#: Rules of other routers, and the strongest reading of one of the paper's; how far behind the best of them at most.
RIVALS, OF_RIVALS = ("mooncake", "prefix-cache-in-flight", "lmetric", "dualmap"), 1.03
#: For scenarios and wrong priors: half load leaves capacity to route around a fault.
SCENARIOS_AT, SCENARIOS = ART_CHAT.at(2.0), ("slow-replica", "rtt-shift", "mixed-fleet", "six-replicas")
#: Ten minutes at a third of the load: prefills take a tenth of each engine's time, so that only the round trip counts.
WILDCHAT = Workload(
    name="WildChat-like",
    traces=("wildchat-like",),
    filters=TraceFilters(max_input=24_000, max_output=128, limit=7_000),
    time_scale=3.0,
)
#: Engines that find part of each prefix.
PARTIAL_HITS, PARTIAL_HITS_LOADS = ("partial-hits-30", "partial-hits-60", "checkpoints-1024"), (3.0, 2.0, 1.0)
PARTIAL_HITS_SEEDS = 3
#: `gorgo-ms` with a learned residual, at most so far behind it; five seeds of everything that something is claimed on.
RESIDUAL, RESIDUAL_AT_MOST, RESIDUAL_SEEDS = "gorgo-residual", 1.02, 5
#: `gorgo-ms` is at most so far behind itself without the two terms that look ahead; and loads beyond capacity.
TWO_TERMS_AT_MOST, TWO_TERMS_SEEDS, BEYOND = 1.02, 5, (1 / 1.1, 1 / 1.3)
#: The paper's held-out windows and loads.
HELD_OUT = (
    Workload(name="April 6 like", traces=("art-chat-apr6",), filters=FILTERS, time_scale=2.0),
    Workload(name="April 7 like", traces=("art-chat-apr7",), filters=FILTERS, time_scale=3.0),
)
#: Published p95 TTFT of `gorgo` over the best baseline of table 2, by window: 1584/1798 ms and 1417/1522 ms.
PUBLISHED_RATIOS = {"April 6 like": 0.881, "April 7 like": 0.931}
#: Of the group `engines`: prompts as in the other groups, answers as the shape draws them; so many requests are three
#: to seven minutes. With three seeds half of the intervals are wider than what is claimed.
ENGINE_FILTERS, ENGINE_SEEDS = TraceFilters(max_input=24_000, limit=2_000), 10
#: Time scale of each shape, also for engines that find 60 % of each prefix.
ENGINE_SHAPES = {
    "art-chat-apr6": 1.5, "wildchat-like": 1.0, "toolagent-like": 2.0, "synthetic-like": 1.25, "rag": 1.0,
    "short-chat": 1.0, "groups": 1.0, "sharing": 1.0,
}  # fmt: skip
#: Named fleets of the two schedulers, and how much of a prefix engines find.
ENGINE_FLEETS, ENGINE_SCENARIOS = ("sglang", "vllm"), (STEADY, "partial-hits-60")
#: `gorgo-ms` is at most so far behind the better of the published policy and the best baseline.
ENGINES_AT_MOST = 1.03


def engine_workloads() -> Iterator[Workload]:
    """Yield every shape on every fleet, with full and with partial hits."""
    for name, time_scale in ENGINE_SHAPES.items():
        shape = Workload(name=name, traces=(name,), filters=ENGINE_FILTERS, time_scale=time_scale, seeds=ENGINE_SEEDS)
        for fleet in ENGINE_FLEETS:
            yield from (shape.on(fleet).under(scenario) for scenario in ENGINE_SCENARIOS)


def all_targets(conversation: str | None) -> list[RatioTarget]:
    """Return every target in the order of the table; those of the conversation trace only with its file."""
    low, high = ([ART_CHAT.at(load) for load in loads] for loads in (ART_CHAT_LOADS[:2], ART_CHAT_LOADS[2:]))
    workloads = [*low, *high, *_conversation(conversation)]
    scenarios = [SCENARIOS_AT.under(name) for name in SCENARIOS]
    partial = [replace(ART_CHAT, seeds=PARTIAL_HITS_SEEDS).at(load).under(name)
               for name in PARTIAL_HITS for load in PARTIAL_HITS_LOADS]  # fmt: skip
    tail = replace(WILDCHAT, seeds=PARTIAL_HITS_SEEDS).at(1.0)
    of_engines = [(figure, ENGINES_AT_MOST) for figure in (TTFT, E2E)]
    return [
        *targets_of("baselines", low, ALL_READINGS, (TTFT, 0.90)),
        *targets_of("baselines", high, ALL_READINGS, (TTFT, 0.80)),
        *targets_of("baselines", low, ALL_READINGS, (E2E, 1.0)),
        *targets_of("baselines", high, ALL_READINGS, (E2E, 0.90)),
        *_published(workloads),
        *targets_of("oracle", workloads, (ORACLE,), (TTFT, 1.03), (E2E, 1.03)),
        *targets_of("rivals", workloads, RIVALS, (TTFT, OF_RIVALS), (E2E, OF_RIVALS)),
        *targets_of("scenarios", scenarios, (ORACLE,), (TTFT, 1.06), (E2E, 1.06)),
        *targets_of("scenarios", scenarios[:1], (PAPER,), (E2E, 1.05)),
        *targets_of("wildchat", (WILDCHAT,), (RANDOM,), (TTFT, 0.85)),
        *_priors(),
        *_held_out("paper", PAPER, BASELINES, PUBLISHED_RATIOS),
        *_held_out("learned", LEARNED, BASELINES, PUBLISHED_RATIOS),
        *_held_out("learned", LEARNED, (PAPER,), dict.fromkeys(PUBLISHED_RATIOS, 1.0)),
        *targets_of("engines", engine_workloads(), (PAPER, *ALL_READINGS), *of_engines),
        *targets_of("partial-hits", partial, (PAPER,), (TTFT, 0.97), (E2E, 1.0)),
        *targets_of("tail", [tail], (PAPER,), ("p99 TTFT", 1.0), (E2E, 1.0)),
        *_residual(workloads, scenarios),
        *_two_terms(workloads, scenarios),
    ]


def _conversation(file: str | None) -> Iterable[Workload]:
    if file is None:
        return ()
    trace = Workload(name="conversation trace", traces=(file,), filters=CONVERSATION_FILTERS)
    return [trace.at(load) for load in CONVERSATION_LOADS]


def _published(workloads: Sequence[Workload]) -> Iterator[RatioTarget]:
    """Yield a target per load and one of their geometric mean; p95 TTFT of each load need only be lower."""
    for figure, each, mean in ((TTFT, 1.0, 0.90), ("p50 TTFT", 0.85, 0.85), ("p50 E2E", 1.03, 1.03)):
        yield from targets_of("published", workloads, (PAPER,), (figure, each))
        yield RatioTarget("published", OURS, workloads, (PAPER,), figure, mean)


def _priors() -> Iterator[RatioTarget]:
    for scenario in ("priors-fast", "priors-slow"):
        for found in targets_of("priors", (SCENARIOS_AT.under(scenario),), (OURS,), (TTFT, 1.05)):
            yield replace(found, others_on=(SCENARIOS_AT,))


def _held_out(group: str, policy: str, others: Sequence[str], bounds: Mapping[str, float]) -> Iterator[RatioTarget]:
    """Yield p95 TTFT of each of the paper's held-out windows, with its own bound."""
    for window in HELD_OUT:
        yield from targets_of(group, [window], others, (TTFT, bounds[window.name]), policy=policy)


def _residual(workloads: Sequence[Workload], scenarios: Sequence[Workload]) -> Iterator[RatioTarget]:
    priors = [SCENARIOS_AT.under(name) for name in ("priors-fast", "priors-slow")]
    partial = [ART_CHAT.at(2.0).under(name) for name in PARTIAL_HITS]
    bounds = [(figure, RESIDUAL_AT_MOST) for figure in (TTFT, E2E)]
    for workload in (*workloads, *scenarios, *priors, *partial, WILDCHAT, *HELD_OUT, *engine_workloads()):
        few = (replace(workload, seeds=RESIDUAL_SEEDS),)
        yield from targets_of("residual", few, (OURS,), *bounds, policy=RESIDUAL)


def _two_terms(workloads: Sequence[Workload], scenarios: Sequence[Workload]) -> Iterator[RatioTarget]:
    """Yield a target per workload and figure: the terms may cost nothing where no session herds."""
    groups: Mapping[str, Iterable[Workload]] = {
        "two-terms": (*workloads, *(ART_CHAT.at(load) for load in BEYOND), *scenarios, WILDCHAT),
        "two-terms-hits": (ART_CHAT.at(load).under(name) for name in PARTIAL_HITS for load in PARTIAL_HITS_LOADS),
        "two-terms-shapes": engine_workloads(),
    }
    bounds = [(figure, TWO_TERMS_AT_MOST) for figure in ("mean TTFT", TTFT, "p99 TTFT", E2E)]
    for group, found in groups.items():
        for workload in found:
            few = (replace(workload, seeds=min(workload.seeds or TWO_TERMS_SEEDS, TWO_TERMS_SEEDS)),)
            yield from targets_of(group, few, (SHORT_SIGHTED,), *bounds)


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Run what the targets of the groups need, and return them by group, then means of every policy."""
    chosen = [one for one in all_targets(grid.trace) if one.group in groups]
    targets = [one.first(grid.first_requests).queued(grid.queue) for one in chosen]
    return report_on(targets, grid.seeds, runner)


def report_on(
    targets: Sequence[RatioTarget],
    seeds: Sequence[int],
    runner: Runner,
    *,
    titles: Mapping[str, str] = TITLES,
    means: tuple[Sequence[str], Sequence[tuple[str, str, float]]] = (MEANS_HEADER, MEANS),
) -> SystemReport:
    """Run what targets need and return their tables; `means` are the header and the columns of the last one."""
    begun_s, made = monotonic(), runner.made
    tasks = list(dict.fromkeys(task for target in targets for task in target.tasks(seeds)))
    # Runs that share a trace follow one another: each process keeps the feed that it used last.
    runs = runner.runs(sorted(tasks, key=lambda one: (one.trace, one.seed, one.workload.time_scale)), title=TITLE)
    verdicts = [target.verdict(runs, seeds) for target in targets]
    unique = {task.key(): runs[task] for task in tasks}
    failing = sorted({task.policy for task in tasks if runs[task].row.errors})
    met, cpu_s = sum(bool(one.met) for one in verdicts), sum(run.cpu_s for run in unique.values())
    end = (
        f"{met} of {len(verdicts)} targets met, all simulated; {len(unique)} runs, {cpu_s:.0f} s of processor time; "
        f"{runner.made - made} of them were made now, in {monotonic() - begun_s:.0f} s."
    )
    return SystemReport(
        sections=[*sections(verdicts, HEADER, titles), TableSection("", means[0], mean_cells(tasks, runs, means[1]))],
        end=end + (f" Requests failed under {', '.join(failing)}." if failing else ""),
        rows=[verdict.as_json() for verdict in verdicts],
    )


def mean_cells(
    tasks: Sequence[PolicyTask], runs: Runs, columns: Sequence[tuple[str, str, float]] = MEANS
) -> list[tuple[str, ...]]:
    """Return means over seeds of every policy, workload by workload."""
    by_workload: dict[tuple[Workload, str], list[ResultRow]] = {}
    for task in tasks:
        by_workload.setdefault((task.workload, task.policy), []).append(runs[task].row)
    rows = {(workload.label, policy): found for (workload, policy), found in by_workload.items()}
    labels = list(dict.fromkeys(label for label, _ in rows))
    ordered = sorted(rows, key=lambda place: (labels.index(place[0]), place[1]))
    return [
        (*place, *(number(_seed_mean(rows[place], name), form, factor) for name, form, factor in columns))
        for place in ordered
    ]


def _seed_mean(rows: Sequence[ResultRow], measure: str) -> float | None:
    """Return the mean of each seed's figure; the replica with the largest share is another one in each."""
    values = [value for row in rows if (value := MEASURES[measure](row)) is not None]
    return fmean(values) if values else None
