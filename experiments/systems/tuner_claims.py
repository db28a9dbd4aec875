"""This project's claims about its tuner, each as an experiment: the runs that it asks for, then its verdicts.

Every comparison pairs runs of the same windows and the same network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import nan
from statistics import fmean, median
from typing import Any, NamedTuple, TypeAlias

from experiments.reports import Grid, SystemReport
from experiments.runner import Experiment, Runner, Runs
from experiments.tables import HEADER_END, ClaimVerdict, sections
from experiments.tuning import STRIDE, Search, TuningTask, Windows
from experiments.windows import PROTOCOL
from gorgo.lab.results import load_text
from gorgo.lab.simulate.compare import Ratio, geometric_mean, ratio_of
from gorgo.lab.simulate.job import STEADY
from gorgo.policies.registry import BASELINES
from tuner.offline.search import RunScore

NAME, TITLE = "tuner", "this project's claims about its tuner"
HEADER = ("statement", *HEADER_END, "note")
#: Shape of the window that is tuned on.
TUNING = "art-chat-apr5"
OURS, PAPER = "gorgo-ms", "gorgo"
Options: TypeAlias = tuple[tuple[str, Any], ...]
Weights: TypeAlias = Mapping[str, float]
PartFigure: TypeAlias = Callable[[RunScore], float]
Pairs: TypeAlias = Sequence[tuple[RunScore, RunScore]]
#: Of p95 TTFT and p95 E2E.
Bounds: TypeAlias = tuple[float | None, float | None]
_NO_WEIGHTS: Weights = {}
#: The published protocol for as long as there is traffic.
PAPER_ALL_ALONG: Options = (("max_generations", 10_000), ("mode", "paper"))
SWITCHBACK: Options = (("mode", "switchback"),)


def half(seeds: Sequence[int]) -> Sequence[int]:
    """Return half of the seeds, at least two: for long runs."""
    return seeds[: max(2, len(seeds) // 2)]


def fifth(seeds: Sequence[int]) -> Sequence[int]:
    """Return a fifth of the seeds: a search is some forty runs."""
    return seeds[: max(1, len(seeds) // 5)]


def ttft(part: RunScore) -> float:
    return nan if part.ttft_ms_p95 is None else part.ttft_ms_p95


def e2e(part: RunScore) -> float:
    return nan if part.e2e_s_p95 is None else part.e2e_s_p95


P95 = (("p95 TTFT", ttft), ("p95 E2E", e2e))


def part_ratio(pairs: Pairs, figure: PartFigure) -> Ratio | None:
    return ratio_of([(figure(one), figure(other)) for one, other in pairs])


def verdict_on_parts(group: str, text: str, pairs: Pairs, figure: PartFigure, **more: Any) -> ClaimVerdict:
    return ClaimVerdict.of_ratio(group, (text,), part_ratio(pairs, figure), **more)


def p95_verdicts(
    group: str, text: str, pairs: Pairs, bounds: Bounds = (None, None), note: str = ""
) -> Iterator[ClaimVerdict]:
    """Yield p95 TTFT and p95 E2E of the first of each pair over the second."""
    for (name, figure), bound in zip(P95, bounds, strict=True):
        yield verdict_on_parts(group, f"{text}, {name}", pairs, figure, at_most=bound, note=note)


def on_window(
    shape: str, draw: int, policy: str, *, load: float = 1.0, weights: Weights | None = None, **more: Any
) -> TuningTask:
    """Return a task on one window; its seed is the draw's unless said otherwise. `load` is a time scale."""
    windows = Windows(shapes=(shape,), draw=draw, time_scale=load, limit=more.pop("limit", None))
    named = tuple(sorted((weights or {}).items()))
    return TuningTask(windows=windows, policy=policy, weights=named, **{"seed": draw} | more)


def frozen(task: TuningTask, weights: Weights) -> TuningTask:
    return replace(task, weights=tuple(sorted(weights.items())))


# -- the paper's protocol: tune on one window, freeze, serve two others at other loads

#: Shapes and time scales of the windows that were not tuned on.
HELD_OUT = (("art-chat-apr6", 2.0), ("art-chat-apr7", 3.0))
#: Bound on a frozen set's p95 TTFT over the best baseline's.
BOUNDS = {PAPER: 0.96, OURS: 0.90}


def protocol(seeds: Sequence[int]) -> Experiment:
    """Tune by the published protocol and in the default mode, and serve the held-out windows with what each found."""
    tuned = {
        (policy, options): [on_window(TUNING, seed, policy, campaign=options) for seed in seeds]
        for policy, options in product(BOUNDS, (PROTOCOL, SWITCHBACK))
    }
    plain = {
        (on, policy): [on_window(on[0], seed, policy, load=on[1]) for seed in seeds]
        for on, policy in product(HELD_OUT, (*BASELINES, *BOUNDS))
    }
    runs = yield [task for some in (*tuned.values(), *plain.values()) for task in some]
    served = {
        (on, *named): [frozen(one, runs[task].weights) for one, task in zip(plain[on, named[0]], tasks, strict=True)]
        for on, (named, tasks) in product(HELD_OUT, tuned.items())
    }
    runs = yield [task for tasks in served.values() for task in tasks]
    verdicts = []
    for (on, policy, options), tasks in served.items():
        own = {name: [runs[task].whole for task in plain[on, name]] for name in (*BASELINES, policy)}
        best = min(BASELINES, key=lambda name: median(map(ttft, own[name])))
        found = [runs[task].whole for task in tasks]
        pairs = list(zip(found, own[best], strict=True))
        whole, defaults = part_ratio(pairs, e2e), part_ratio(list(zip(found, own[policy], strict=True)), ttft)
        summary = ""
        if whole and defaults:
            summary = f"p95 E2E {whole.value:.3f}; p95 TTFT to own defaults {defaults.value:.3f}; "
        accepted = sum(runs[task].accepted for task in tuned[policy, options])
        words = f"{on[0]}, {load_text(on[1])}: {policy} tuned in mode {dict(options)['mode']}, frozen"
        text = f"{words} / {best}, median p95 TTFT"
        middle = median(ttft(ours) / ttft(theirs) for ours, theirs in pairs)
        bound = {"at_most": BOUNDS[policy], "note": f"{summary}{accepted} accepted in {len(seeds)} runs"}
        verdicts.append(verdict_on_parts("protocol", text, pairs, ttft, value=middle, **bound))
    return verdicts


# -- what clients get of a whole run with a tuner beside it, candidates included

LOADS = (3.0, 2.0, 1.25, 1.0)
#: Bounds on p95 TTFT and p95 E2E by mode.
NO_HARM: Mapping[Options, Bounds] = {SWITCHBACK: (1.01, 1.02), PAPER_ALL_ALONG: (None, None)}


def no_harm(seeds: Sequence[int]) -> Experiment:
    """Compare each mode at each load with fixed defaults; a seed's figure is the geometric mean over the loads."""

    def task(policy: str, load: float, seed: int, options: Options | None) -> TuningTask:
        return on_window(TUNING, seed, policy, load=load, campaign=options)

    policies = (PAPER, OURS)
    runs = yield [task(*each) for each in product(policies, LOADS, seeds, (None, *NO_HARM))]
    verdicts = []
    for policy, (options, bounds) in product(policies, NO_HARM.items()):
        tuned, fixed = (
            [[runs[task(policy, load, seed, mode)] for load in LOADS] for seed in seeds] for mode in (options, None)
        )
        accepted = sum(run.accepted for of_seed in tuned for run in of_seed)
        note = f"{accepted} accepted in {len(LOADS) * len(seeds)} runs"
        for (name, figure), bound in zip(P95, bounds, strict=True):
            means = [
                [geometric_mean([figure(run.whole) for run in loads]) for loads in some] for some in (tuned, fixed)
            ]
            text = f"{policy}, {dict(options)['mode']}: the whole run / fixed defaults, {name}"
            ratio = ratio_of(list(zip(*means, strict=True)))
            verdicts.append(ClaimVerdict.of_ratio("no harm", (text,), ratio, at_most=bound, note=note))
    return verdicts


# -- bad start weights: whether a campaign leaves them

#: Requests after which a bad start must be left.
LEFT_AFTER = 10_000


class BadStart(NamedTuple):
    """Start weights, the box that allows them, and whether preferences move."""

    weights: tuple[tuple[str, float], ...]
    box: tuple[tuple[str, float, float], ...]
    tune_lambda: bool

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.weights)


BAD_STARTS: Mapping[str, BadStart] = {
    OURS: BadStart((("lambda", 0.02),), (("lambda", 0.01, 1.0),), tune_lambda=True),
    PAPER: BadStart((("w_rtt", 2.0), ("w_queue", 0.05)), (), tune_lambda=False),
}


def bad_start(seeds: Sequence[int]) -> Experiment:
    """Compare the bad start, left alone and tuned, with the defaults."""
    few = half(seeds)
    changes: dict[str, dict[str, Any]] = {
        "defaults": {"weights": ()}, "left alone": {}, "tuned by switchback": {"campaign": SWITCHBACK},
    }  # fmt: skip

    def task(policy: str, seed: int, words: str) -> TuningTask:
        windows = Windows(shapes=(TUNING,) * 3, draw=seed, time_scale=1.0)
        start = BAD_STARTS[policy]._asdict() | changes[words]
        return TuningTask(windows=windows, policy=policy, seed=seed, after=LEFT_AFTER, **start)

    runs = yield [task(*each) for each in product(BAD_STARTS, few, changes)]
    verdicts = []
    for policy, start in BAD_STARTS.items():
        defaults = [runs[task(policy, seed, "defaults")].tail for seed in few]
        for words, bound in (("left alone", None), ("tuned by switchback", 1.05)):
            found = [runs[task(policy, seed, words)] for seed in few]
            left = sum(any(one.weights[name] != value for name, value in start.weights) for one in found)
            pairs = list(zip([one.tail for one in found], defaults, strict=True))
            first_tokens = part_ratio(pairs, ttft)
            note = f"p95 TTFT {first_tokens.value:.3f}; left in {left} of {len(few)} runs" if first_tokens else ""
            text = f"{policy} from {start}, {words} / defaults, p95 E2E after {LEFT_AFTER:,} requests"
            verdicts.append(verdict_on_parts("bad start", text, pairs, e2e, at_most=bound, note=note))
    return verdicts


# -- fleets and traffic on which the published weights are wrong: what tuning wins there, and what it costs meanwhile

#: A set that is worse than the defaults by more misses its target: one per cent, either way.
NO_WORSE = 1.01
FLEET_SEARCH = Search(candidates=16, seeds=1, held_out_seeds=3)
GRID: Mapping[str, Mapping[str, Sequence[float]]] = {
    PAPER: {"w_rtt": (0.5, 5.0, 20.0, 80.0), "w_queue": (0.03, 0.1, 0.5, 2.0)},
    OURS: {"m_rtt": (0.5, 1.0, 2.0), "m_queue": (0.5, 1.0, 2.0)},
}
LIVE_SEEDS = 3
#: Draws of the held-out windows are far from those of the recorded ones.
LATER_DRAWS = 500_000
#: Requests of a held-out or recorded window, and those before its figures begin.
REQUESTS, WARM_UP = 3_000, 500


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet and its traffic; fields without a word are as in `TuningTask` and `Windows`."""

    fleet: str
    shape: str
    time_scale: float  #: One to four requests a second.
    windows: int  #: Of the live campaign: one and a half to five hours.
    scenario: str = STEADY
    policy: str = PAPER
    gain: float | None = None  #: Upper bound of tuned over default p95 TTFT; None where the defaults are good.
    campaign: Options = SWITCHBACK
    optimizer: str | None = None

    @property
    def label(self) -> str:
        fleet = self.fleet if self.scenario == STEADY else f"{self.fleet} under {self.scenario}"
        return f"{fleet}, {self.shape}, time scale {self.time_scale:g}: {self.policy}"

    def task(self, windows: Windows, seed: int, **more: Any) -> TuningTask:
        place: dict[str, Any] = {"policy": self.policy, "fleet": self.fleet, "scenario": self.scenario, "seed": seed}
        return TuningTask(windows=windows, **place, **more)

    def traffic(self, draw: int, *, windows: int = 1, limit: int | None = None) -> Windows:
        return Windows(shapes=(self.shape,) * windows, draw=draw, time_scale=self.time_scale, limit=limit)

    def live(self, seed: int, *, tuned: bool = False) -> TuningTask:
        """Return some hours of traffic, with a campaign or without."""
        more = {"campaign": self.campaign, "optimizer": self.optimizer} if tuned else {}
        return self.task(self.traffic(seed, windows=self.windows), seed, **more)

    def search(self, seed: int) -> TuningTask:
        return self.task(self.traffic(seed, limit=REQUESTS), seed, search=FLEET_SEARCH)

    def held_out(self, seed: int, weights: Weights) -> TuningTask:
        """Return a window drawn anew, served with these weights."""
        windows = self.traffic(LATER_DRAWS + STRIDE * seed, limit=REQUESTS)
        return frozen(self.task(windows, seed, after=WARM_UP), weights)


#: The target is of these, where tuning wins most or the default mode once did harm.
SETTINGS = (
    Setting("small-model", "short-chat", 3.0, 2, gain=0.90),
    Setting("mixed-gpus-x3", "art-chat-apr6", 1.06, 7, gain=0.90),
    Setting("dense-70b-x2", "short-chat", 3.0, 6, gain=0.90),
    Setting("h100", "short-chat", 3.0, 2),
)
#: Random steps alone. Without rests a candidate has half of the time, and with blocks of a minute a comparison takes
#: half of it: less traffic needs to be simulated. The noise of unlike GPUs needs blocks of the default length, and
#: twice the replicas of `mixed-gpus`: there, at time scale 3, a block's p95 varies by a factor of 1.5 by chance.
NO_RESTS: Options = (("mode", "switchback"), ("rest_blocks", 0.0))
SHORT_BLOCKS: Options = (("block_s", 60.0), ("discard_s", 20.0), *NO_RESTS)
STEPS = (
    Setting("small-model", "short-chat", 3.0, 2, gain=0.90, campaign=SHORT_BLOCKS),
    Setting("dense-70b-x2", "short-chat", 3.0, 2, gain=0.90, campaign=SHORT_BLOCKS),
    Setting("mixed-gpus-x2", "art-chat-apr6", 1.06, 8, gain=0.90, campaign=NO_RESTS),
)
FURTHER = (
    Setting("dense-70b", "short-chat", 3.0, 4),
    Setting("small-model", "wildchat-like", 3.0, 2, gain=0.90),
    Setting("mixed-gpus-x2", "art-chat-apr6", 1.06, 8, gain=0.90),
    Setting("mixed-gpus", "rag", 2.0, 3),
    Setting("fast-links", "art-chat-apr6", 2.0, 3),
    Setting("small-model", "short-chat", 3.0, 2, policy=OURS),
    Setting("mixed-gpus-x2", "art-chat-apr6", 1.0, 4, policy=OURS),
    Setting("dense-70b-x2", "short-chat", 3.0, 2, policy=OURS),
    Setting("h100", "short-chat", 3.0, 2, policy=OURS),
    Setting("mixed-gpus", "rag", 2.0, 3, policy=OURS, scenario="priors-fast"),
    Setting("mixed-gpus", "rag", 2.0, 3, policy=OURS, scenario="priors-slow"),
)


def fleets(seeds: Sequence[int]) -> Experiment:
    """Tune live, freeze, serve held-out windows; three seeds at most, because a run is hours of traffic."""
    return _live("fleets", SETTINGS, seeds[:LIVE_SEEDS])


def further(seeds: Sequence[int]) -> Experiment:
    """The same on the other fleets, with a fifth of the seeds."""
    return _live("further fleets", FURTHER, fifth(seeds))


def steps(seeds: Sequence[int], *, optimizer: str = "es") -> Experiment:
    """Tune live by the random steps of one optimizer, freeze, serve held-out windows."""
    settings = [replace(one, optimizer=optimizer) for one in STEPS]
    return _live(f"steps of {optimizer}", settings, seeds, meanwhile=False)


def _live(group: str, settings: Sequence[Setting], few: Sequence[int], *, meanwhile: bool = True) -> Experiment:
    """Tune live, freeze, serve held-out windows; `meanwhile` compares the traffic of the campaign, too."""
    modes = (False, True) if meanwhile else (True,)
    runs = yield [one.live(seed, tuned=tuned) for one in settings for seed in few for tuned in modes]
    found = {one: [runs[one.live(seed, tuned=True)] for seed in few] for one in settings}
    runs = yield [
        one.held_out(seed, weights)
        for one, tuned in found.items()
        for seed, run in zip(few, tuned, strict=True)
        for weights in (_NO_WEIGHTS, run.weights)
    ]
    verdicts: list[ClaimVerdict] = []
    for one, tuned in found.items():
        sets, shown = [run.weights for run in tuned], [shown_weights(run.weights) for run in tuned]
        if not meanwhile:
            shown = [f"{run.accepted} of {run.generations - 1}: {text}" for run, text in zip(tuned, shown, strict=True)]
        words = "tuned live" + ("" if meanwhile else f" by {one.optimizer}")
        verdicts += _fleet_verdicts(group, one, few, runs, sets, words, "; ".join(shown))
        if meanwhile:
            pairs = [(run.whole, runs[one.live(seed)].whole) for run, seed in zip(tuned, few, strict=True)]
            accepted = [f"{run.first_accepted_s / 3600:.1f} h" for run in tuned if run.first_accepted_s is not None]
            note = f"first accepted after {', '.join(accepted) or 'never'}"
            verdicts += p95_verdicts(group, f"{one.label}, while it was tuned / defaults", pairs, note=note)
    return verdicts


# -- a log of decisions as the first filter: the blocks that it saves, and what exploring would cost

#: When the campaign begins: three quarters of an hour of the log are of its start.
LOG_S = 2700.0
#: The probes of two weights, each up and down by a quarter and an eighth of its box.
PROBES: Options = (("max_generations", 8), ("mode", "switchback"))
FILTERED = (
    Setting("small-model", "short-chat", 3.0, 6, campaign=PROBES),
    Setting("dense-70b-x2", "short-chat", 3.0, 6, campaign=PROBES),
    Setting("mixed-gpus-x2", "art-chat-apr6", 1.06, 6, campaign=PROBES),
)
#: Of live blocks, and of the p95 over the same windows.
BLOCKS, NO_MORE = 1 / 3, 1.0
#: Shares of requests by chance, and the weights that win on `small-model`.
EXPLORED, WON = (0.005, 0.02, 0.05), {"w_rtt": 3.98}


def log_filter(seeds: Sequence[int]) -> Experiment:
    """Tune the probes live with and without a log as the first filter, over the same windows."""
    few, group = seeds[:LIVE_SEEDS], "log as filter"

    def task(one: Setting, seed: int, *, filtered: bool) -> TuningTask:
        return replace(one.live(seed, tuned=True), begin_s=LOG_S, filtered=filtered)

    def explored(seed: int, share: float) -> TuningTask:
        return replace(frozen(FILTERED[0].live(seed), WON), windows=FILTERED[0].traffic(seed), explore=share)

    runs = yield [
        *(task(one, seed, filtered=filtered) for one in FILTERED for seed in few for filtered in (False, True)),
        *(explored(seed, share) for seed in few for share in (0.0, *EXPLORED)),
    ]
    verdicts: list[ClaimVerdict] = []
    for one in FILTERED:
        pairs = [tuple(runs[task(one, seed, filtered=filtered)] for filtered in (True, False)) for seed in few]
        note = "; ".join(f"{2 * ours.candidate_blocks} of {2 * theirs.candidate_blocks}" for ours, theirs in pairs)
        sets = "; ".join(f"{shown_weights(ours.weights)} / {shown_weights(theirs.weights)}" for ours, theirs in pairs)
        blocks = ratio_of([(float(ours.candidate_blocks), float(theirs.candidate_blocks)) for ours, theirs in pairs])
        text = f"{one.label}, with a log / without, live blocks"
        verdicts.append(ClaimVerdict.of_ratio(group, (text,), blocks, at_most=BLOCKS, note=note))
        tails = [(ours.tail, theirs.tail) for ours, theirs in pairs]
        verdicts += p95_verdicts(group, f"{one.label}, with a log / without", tails, (NO_MORE, NO_MORE), sets)
    for share in EXPLORED:
        wholes = [(runs[explored(seed, share)].whole, runs[explored(seed, 0.0)].whole) for seed in few]
        text = f"{FILTERED[0].label} with {shown_weights(WON)}, {share:.1%} by chance / none, p95 TTFT"
        verdicts.append(verdict_on_parts(group, text, wholes, ttft))
    return verdicts


def fleets_by_twin(seeds: Sequence[int]) -> Experiment:
    """Search one recorded window, freeze, serve held-out windows; the best of the grid beside it."""
    few, group = fifth(seeds), "fleets by twin"
    runs = yield [
        *(one.search(seed) for one in SETTINGS for seed in few),
        *(one.held_out(seed, weights) for one in SETTINGS for seed in few for weights in (*grid(one.policy), {})),
    ]
    found = {one: [runs[one.search(seed)].weights for seed in few] for one in SETTINGS}
    runs = yield [one.held_out(*pair) for one, sets in found.items() for pair in zip(few, sets, strict=True)]
    verdicts: list[ClaimVerdict] = []
    for one, sets in found.items():
        tails = {_key(each): [runs[one.held_out(seed, each)].tail for seed in few] for each in (*grid(one.policy), {})}
        best, shown = best_of_grid(one.policy, tails), "; ".join(map(shown_weights, sets))
        verdicts += _fleet_verdicts(group, one, few, runs, sets, "found by the twin", shown)
        beside = [best] * len(few), "best of the grid", shown_weights(best)
        verdicts += _fleet_verdicts(group, one, few, runs, *beside, bounded=False)
    return verdicts


def grid(policy: str) -> Iterator[Weights]:
    names = GRID[policy]
    yield from (dict(zip(names, values, strict=True)) for values in product(*names.values()))


def _key(weights: Weights) -> tuple[tuple[str, float], ...]:
    return tuple(weights.items())


def best_of_grid(
    policy: str, tails: Mapping[tuple[tuple[str, float], ...], Sequence[RunScore]], *, margin: float = 1.0
) -> Weights:
    """Return the weights of the lowest mean p95 TTFT whose mean p95 E2E is within the margin of the defaults'.

    `tails` are the figures of each seed by weights; those of no weights are the defaults'.
    """
    plain, least = fmean(map(e2e, tails[()])), fmean(map(ttft, tails[()]))
    best: Weights = {}
    for weights in grid(policy):
        own = tails[_key(weights)]
        if fmean(map(e2e, own)) <= margin * plain and fmean(map(ttft, own)) < least:
            best, least = weights, fmean(map(ttft, own))
    return best


def _fleet_verdicts(
    group: str, one: Setting, seeds: Sequence[int], runs: Runs, found: Sequence[Weights], words: str, note: str, *,
    bounded: bool = True,
) -> Iterator[ClaimVerdict]:  # fmt: skip
    """Yield p95 TTFT and p95 E2E of frozen weights over those of the defaults."""
    pairs = [
        (runs[one.held_out(seed, weights)].tail, runs[one.held_out(seed, {})].tail)
        for seed, weights in zip(seeds, found, strict=True)
    ]
    bounds = (NO_WORSE if one.gain is None else one.gain, NO_WORSE) if bounded else (None, None)
    yield from p95_verdicts(group, f"{one.label}, {words} / defaults", pairs, bounds, note)


def shown_weights(weights: Weights) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in weights.items()) or "the defaults"


# -- the optimizers on the same budget: the held-out gain of a search that may run so many candidates

ALGORITHMS = ("es-probes", "es", "cma", "random")
#: As many as the points of the grid.
BUDGET = Search(candidates=16, seeds=1, held_out_seeds=2)
#: Of p95 E2E, as the search's own.
MARGIN = 1.01
#: Draws of the windows on which the grid's choice is measured.
FRESH = 700_000
#: Where the defaults lose most without a change of the share of one replica.
ALGORITHMS_ON, ALGORITHM_REQUESTS = Setting("mixed-gpus", "art-chat-apr6", 3.0, 1), 2_400
_DEFAULTS: Weights = {"w_queue": 0.1, "w_rtt": 0.5}


def algorithms(seeds: Sequence[int]) -> Experiment:
    """Search the same windows with each optimizer, from the same start; the grid on the same number of candidates."""
    on = ALGORITHMS_ON

    def search(name: str, seed: int) -> TuningTask:
        return on.task(on.traffic(seed, limit=ALGORITHM_REQUESTS), seed, search=replace(BUDGET, optimizer=name))

    def fixed(draw: int, weights: Weights) -> TuningTask:
        return frozen(on.task(on.traffic(draw, limit=ALGORITHM_REQUESTS * 2 // 3), draw), weights)

    runs = yield [
        *(search(name, seed) for name in ALGORITHMS for seed in seeds),
        *(fixed(seed, weights) for weights in grid(PAPER) for seed in seeds),
    ]
    best = {}
    for seed in seeds:
        tails = {_key(each): [runs[fixed(seed, each)].tail] for each in grid(PAPER)}
        best[seed] = best_of_grid(PAPER, {**tails, (): [runs[fixed(seed, _DEFAULTS)].tail]}, margin=MARGIN)
    runs = yield [fixed(FRESH + seed, weights) for seed in seeds for weights in (best[seed], {})]
    results = {}
    for name in ALGORITHMS:
        found = [runs[search(name, seed)] for seed in seeds]
        results[name] = [(run.tail, run.whole) for run in found], sum(run.accepted for run in found)
    pairs = [(runs[fixed(FRESH + seed, best[seed])].tail, runs[fixed(FRESH + seed, {})].tail) for seed in seeds]
    results["grid"] = pairs, sum(map(bool, best.values()))
    verdicts = []
    for name, (pairs, moved) in results.items():
        ends = part_ratio(pairs, e2e)
        note = f"p95 E2E {ends.value:.3f}; moved in {moved} of {len(seeds)}" if ends else ""
        text = f"{on.fleet}, {on.shape}: {PAPER} searched by {name}, {BUDGET.candidates} candidates / start, p95 TTFT"
        verdicts.append(verdict_on_parts("algorithms", text, pairs, ttft, note=note))
    return verdicts


#: By group, in the order of the table; each is given the seeds.
EXPERIMENTS: dict[str, Callable[[Sequence[int]], Experiment]] = {
    "protocol": protocol,
    "no harm": no_harm,
    "bad start": bad_start,
    "fleets": fleets,
    "steps of es": steps,
    "steps of cma": partial(steps, optimizer="cma"),
    "further fleets": further,
    "log as filter": log_filter,
    "fleets by twin": fleets_by_twin,
    "algorithms": algorithms,
}
GROUPS = tuple(EXPERIMENTS)


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    verdicts = [
        verdict
        for group, experiment in EXPERIMENTS.items()
        if group in groups
        for verdict in runner.verdicts(experiment(grid.seeds), title=group)
    ]
    return SystemReport(
        sections=sections(verdicts, HEADER),
        end=f"{len(grid.seeds)} seeds, all simulated.",
        rows=[verdict.as_json() for verdict in verdicts],
    )
