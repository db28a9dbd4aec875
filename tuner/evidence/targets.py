"""The statements of the evidence: which runs each needs, and what is to be read off them.

Owns the experiments. A statement is a figure with its interval, the bound that it has to keep, and whether it does.
Every comparison pairs runs of the same windows and the same network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

from gorgo.apps.demo.options import DEFAULT_POLICIES as PUBLISHED
from gorgo.apps.simulate.compare import Ratio, ratio_of
from tuner.evidence.kept import AnyTask
from tuner.evidence.task import Found, Part, Task
from tuner.evidence.twin_task import TwinTask
from tuner.evidence.windows import Windows

TUNING, HELD_OUT = "art-chat-apr5", (("art-chat-apr6", 2.0), ("art-chat-apr7", 3.0))
OURS, PAPER = "gorgo-ms", "gorgo"
BASELINES = tuple(name for name in PUBLISHED if name not in (PAPER, "random"))
#: 672 samples: a window of 128, then 17 hops of 32.
PROTOCOL: dict[str, Any] = {"mode": "paper", "max_generations": 17}
#: The same for as long as there is traffic, which is what a sidecar does.
PAPER_ALL_ALONG: dict[str, Any] = {"mode": "paper", "max_generations": 10_000}
SWITCHBACK: dict[str, Any] = {"mode": "switchback"}
LOADS = (3.0, 2.0, 1.25, 1.0)
#: Requests after which a bad start must be gone.
LEFT_AFTER = 10_000
#: Weights that nobody should start from, the box that allows them, and whether preferences move.
BAD_STARTS: Mapping[str, tuple[tuple[tuple[str, float], ...], tuple[tuple[str, float, float], ...], bool]] = {
    OURS: ((("lambda", 0.02),), (("lambda", 0.01, 1.0),), True),
    PAPER: ((("w_rtt", 2.0), ("w_queue", 0.05)), (), False),
}
#: As near to the 0 of the paper as a log space comes: a queue of 200,000 tokens weighs as much as 1 ms of round trip.
HACKED = (("w_rtt", 0.23), ("w_queue", 1e-6))
HACKED_BOX = (("w_queue", 1e-7, 0.5),)

Runs = Mapping[AnyTask, Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One row of the table.

    Parameters
    ----------
    group:
        Of which experiment.
    text:
        What is stated.
    value:
        The figure; None where no run gave it.
    low, high:
        Its 95 % interval, where there is one.
    at_most, at_least:
        The bound that it has to keep; with neither the row is there to compare with.
    note:
        What else the runs showed.
    """

    group: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None for a row without a bound."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None:
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """Tasks first, then what follows of them: a second lot may depend on what the first has found."""

    name: str
    first: Callable[[Sequence[int]], Sequence[AnyTask]]
    judge: Callable[[Sequence[int], Runs], list[Statement]]
    then: Callable[[Sequence[int], Runs], Sequence[AnyTask]] | None = None


def campaign(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a task has them."""
    return tuple(sorted(options.items()))


# -- the paper's protocol: tune on one window, freeze, meet two others


def _tuning(policy: str, seed: int) -> Task:
    return Task(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, campaign=campaign(PROTOCOL))


def _held_out(shape: str, load: float, policy: str, seed: int, weights: Mapping[str, float] | None = None) -> Task:
    windows = Windows(shapes=(shape,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted((weights or {}).items())))


def _protocol_first(seeds: Sequence[int]) -> list[Task]:
    tuned = [_tuning(policy, seed) for policy in (PAPER, OURS) for seed in seeds]
    plain = (*BASELINES, PAPER, OURS)
    return tuned + [_held_out(*where, policy, seed) for where in HELD_OUT for policy in plain for seed in seeds]


def _frozen(where: tuple[str, float], policy: str, seed: int, runs: Runs) -> Task:
    return _held_out(*where, policy, seed, runs[_tuning(policy, seed)].weights)


def _protocol_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [_frozen(where, policy, seed, runs) for where in HELD_OUT for policy in (PAPER, OURS) for seed in seeds]


def _protocol_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for where in HELD_OUT:
        best = min(
            BASELINES, key=lambda name: median(runs[_held_out(*where, name, seed)].whole.ttft_ms_p95 for seed in seeds)
        )
        for policy, bound in ((PAPER, 0.96), (OURS, 0.90)):
            pairs = [
                (runs[_frozen(where, policy, seed, runs)].whole, runs[_held_out(*where, best, seed)].whole)
                for seed in seeds
            ]
            plain = [
                runs[_frozen(where, policy, seed, runs)].whole.ttft_ms_p95
                / runs[_held_out(*where, policy, seed)].whole.ttft_ms_p95
                for seed in seeds
            ]
            e2e = _ratio(pairs, _e2e)
            yield _statement(
                "protocol",
                f"{where[0]} x{where[1]:g}: frozen {policy} / {best}, p95 TTFT, median",
                _ratio(pairs, _ttft),
                value=median(_ttft(ours) / _ttft(theirs) for ours, theirs in pairs),
                at_most=bound,
                note=f"p95 E2E {e2e.value:.3f}; against its own defaults {_geometric(plain):.3f}" if e2e else "",
            )


# -- first, do no harm


def _harm_task(policy: str, load: float, seed: int, options: Mapping[str, Any] | None) -> Task:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=load)
    return Task(windows=windows, policy=policy, seed=seed, campaign=None if options is None else campaign(options))


def _harm_first(seeds: Sequence[int]) -> list[Task]:
    return [
        _harm_task(policy, load, seed, options)
        for policy in (PAPER, OURS)
        for load in LOADS
        for options in (None, SWITCHBACK, PAPER_ALL_ALONG)
        for seed in seeds
    ]


def _harm_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy in (PAPER, OURS):
        for options, bounds in ((SWITCHBACK, (1.01, 1.02)), (PAPER_ALL_ALONG, (None, None))):
            for name, figure, bound in (("p95 TTFT", _ttft, bounds[0]), ("p95 E2E", _e2e, bounds[1])):
                by_seed = [
                    (
                        _geometric([figure(runs[_harm_task(policy, load, s, options)].whole) for load in LOADS]),
                        _geometric([figure(runs[_harm_task(policy, load, s, None)].whole) for load in LOADS]),
                    )
                    for s in seeds
                ]
                tuned = [runs[_harm_task(policy, load, s, options)] for load in LOADS for s in seeds]
                yield _statement(
                    "no harm",
                    f"{policy}, {options['mode']}: the whole run / fixed defaults, {name}",
                    ratio_of(by_seed),
                    at_most=bound,
                    note=f"{sum(t.accepted for t in tuned)} accepted in {len(tuned)} runs",
                )


# -- from a bad start


def _bad_task(policy: str, seed: int, options: Mapping[str, Any] | None, *, bad: bool) -> Task:
    weights, box, asked = BAD_STARTS[policy]
    return Task(
        windows=Windows(shapes=(TUNING,) * 3, draw=seed, time_scale=1.0),
        policy=policy,
        weights=weights if bad else (),
        box=box,
        asked=asked,
        seed=seed,
        campaign=None if options is None else campaign(options),
        after=LEFT_AFTER,
    )


def _bad_first(seeds: Sequence[int]) -> list[Task]:
    return [
        task
        for policy in BAD_STARTS
        for seed in _half(seeds)
        for task in (
            _bad_task(policy, seed, None, bad=False),
            _bad_task(policy, seed, None, bad=True),
            _bad_task(policy, seed, SWITCHBACK, bad=True),
        )
    ]


def _bad_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy, (weights, _, _) in BAD_STARTS.items():
        words = ", ".join(f"{name} {value:g}" for name, value in weights)
        for options, bound in ((None, None), (SWITCHBACK, 1.05)):
            pairs = [
                (
                    runs[_bad_task(policy, seed, options, bad=True)].tail,
                    runs[_bad_task(policy, seed, None, bad=False)].tail,
                )
                for seed in _half(seeds)
            ]
            tuned = "left alone" if options is None else "tuned by switchback"
            ends = [runs[_bad_task(policy, seed, options, bad=True)].weights for seed in _half(seeds)]
            left = sum(any(end[name] != value for name, value in weights) for end in ends)
            yield _statement(
                "bad start",
                f"{policy} from {words}, {tuned} / defaults, p95 E2E after {LEFT_AFTER:,} requests",
                _ratio(pairs, _e2e),
                at_most=bound,
                note=f"p95 TTFT {r.value:.3f}; left in {left} of {len(ends)} runs"
                if (r := _ratio(pairs, _ttft))
                else "",
            )


# -- the twin: search one recorded window, meet the next

#: A load at which weights matter, below the one at which the fleet saturates.
TWIN_LOAD = 1.25
NEXT = "art-chat-apr6"
#: Windows of the next day on which one search's find is checked.
NEXT_WINDOWS = 3


def _search_task(policy: str, seed: int) -> TwinTask:
    windows = Windows(shapes=(TUNING,), draw=seed, time_scale=TWIN_LOAD)
    return TwinTask(windows=windows, policy=policy, candidates=16, seeds=2, held_out_seeds=6, seed=seed)


def _next_task(policy: str, seed: int, number: int, weights: Mapping[str, float]) -> Task:
    windows = Windows(shapes=(NEXT,), draw=seed + 100 * number, time_scale=TWIN_LOAD)
    return Task(windows=windows, policy=policy, seed=seed, weights=tuple(sorted(weights.items())))


def _next_first(seeds: Sequence[int]) -> list[AnyTask]:
    return [_search_task(policy, seed) for policy in (PAPER, OURS) for seed in _fifth(seeds)]


def _next_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [
        _next_task(policy, seed, number, weights)
        for policy in (PAPER, OURS)
        for seed in _fifth(seeds)
        for number in range(NEXT_WINDOWS)
        for weights in ({}, runs[_search_task(policy, seed)].weights)
    ]


def _next_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for policy in (PAPER, OURS):
        searches = [(seed, runs[_search_task(policy, seed)]) for seed in _fifth(seeds)]
        pairs = [
            (
                runs[_next_task(policy, seed, number, found.weights)].whole,
                runs[_next_task(policy, seed, number, {})].whole,
            )
            for seed, found in searches
            for number in range(NEXT_WINDOWS)
        ]
        moved = sum(found.accepted for _, found in searches)
        said = "; ".join(found.reasons[-1] for _, found in searches)
        for name, figure in (("p95 TTFT", _ttft), ("p95 E2E", _e2e)):
            yield _statement(
                "next window",
                f"{policy}, twin on one window: the next day's, found / defaults, {name}",
                _ratio(pairs, figure),
                at_most=1.0 if figure is _ttft else None,
                note=f"moved in {moved} of {len(searches)}: {said}" if figure is _ttft else "",
            )


# -- reward hacking

GUARD_OFF: dict[str, Any] = PROTOCOL | {"guard": False}
GUARD_ON: dict[str, Any] = PROTOCOL | {"guard": True}


def _hack_task(seed: int, options: Mapping[str, Any] | None, *, hacked: bool = True) -> Task:
    return Task(
        windows=Windows(shapes=(TUNING,), draw=seed, time_scale=HACK_LOAD),
        policy=PAPER,
        weights=HACKED if hacked else (),
        box=HACKED_BOX,
        seed=seed,
        campaign=None if options is None else campaign(options),
    )


#: At a third of the load one replica still copes with all of it; at half it answers several times slower.
HACK_LOAD = 2.0


def _hack_first(seeds: Sequence[int]) -> list[Task]:
    many = _twice(seeds)
    return [_hack_task(seed, options) for seed in many for options in (GUARD_OFF, GUARD_ON, SWITCHBACK)] + [
        _hack_task(seed, None, hacked=False) for seed in many
    ]


def _hack_end(seed: int, end: Mapping[str, float]) -> Task:
    return replace(_hack_task(seed, None), weights=tuple(sorted(end.items())))


def _hack_then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [
        _hack_end(seed, runs[_hack_task(seed, options)].weights)
        for seed in _twice(seeds)
        for options in (GUARD_OFF, GUARD_ON, SWITCHBACK)
    ]


def _hack_judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    many = _twice(seeds)
    for name, options in (("guard off", GUARD_OFF), ("guard on", GUARD_ON), ("switchback", SWITCHBACK)):
        ends = [runs[_hack_end(seed, runs[_hack_task(seed, options)].weights)].whole for seed in many]
        plain = [runs[_hack_task(seed, None, hacked=False)].whole for seed in many]
        ratios = [_e2e(end) / _e2e(base) for end, base in zip(ends, plain, strict=True)]
        shares = [end.max_share for end in ends]
        off = options is GUARD_OFF
        yield Statement(
            group="reward hacking",
            text=f"{name}: largest share of one replica where it ends, {'median' if off else 'highest'}",
            value=median(shares) if off else max(shares),
            at_least=0.9 if off else None,
            at_most=None if off else 0.8,
        )
        yield Statement(
            group="reward hacking",
            text=f"{name}: p95 E2E where it ends / defaults, {'median' if off else 'highest'} of {len(many)} seeds",
            value=median(ratios) if off else max(ratios),
            at_least=2.0 if off else None,
            at_most=None if off else 1.5,
        )


def _half(seeds: Sequence[int]) -> Sequence[int]:
    """Long runs: half of the seeds, two at least."""
    return seeds[: max(2, len(seeds) // 2)]


def _fifth(seeds: Sequence[int]) -> Sequence[int]:
    """A search is some forty runs: a fifth of the seeds."""
    return seeds[: max(1, len(seeds) // 5)]


def _twice(seeds: Sequence[int]) -> list[int]:
    """20 seeds where others have 10."""
    return [*seeds, *(seed + 500 for seed in seeds)]


EXPERIMENTS = (
    Experiment("protocol", _protocol_first, lambda s, r: list(_protocol_judge(s, r)), _protocol_then),
    Experiment("no harm", _harm_first, lambda s, r: list(_harm_judge(s, r))),
    Experiment("bad start", _bad_first, lambda s, r: list(_bad_judge(s, r))),
    Experiment("next window", _next_first, lambda s, r: list(_next_judge(s, r)), _next_then),
    Experiment("reward hacking", _hack_first, lambda s, r: list(_hack_judge(s, r)), _hack_then),
)


# -- arithmetic


def _ttft(part: Part) -> float:
    return part.ttft_ms_p95


def _e2e(part: Part) -> float:
    return part.e2e_s_p95


def _ratio(pairs: Sequence[tuple[Part, Part]], figure: Callable[[Part], float]) -> Ratio | None:
    return ratio_of([(figure(one), figure(other)) for one, other in pairs])


def _geometric(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def _statement(
    group: str,
    text: str,
    ratio: Ratio | None,
    *,
    value: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Statement:
    if ratio is None:
        return Statement(group=group, text=text, value=None, at_most=at_most, note=note)
    shown = ratio.value if value is None else value
    return Statement(group=group, text=text, value=shown, low=ratio.low, high=ratio.high, at_most=at_most, note=note)
