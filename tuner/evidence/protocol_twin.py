"""The paper's protocol with the twin in the tuner's place: search the first window, freeze, meet the two others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.evidence.kept import AnyTask
from tuner.evidence.protocol import BASELINES, BOUNDS, HELD_OUT, held_out, row_of
from tuner.evidence.statement import OURS, PAPER, SEARCH, TUNING, Experiment, Runs, Statement
from tuner.evidence.task import Task
from tuner.evidence.twin_task import TwinTask
from tuner.evidence.windows import Windows


def _search(policy: str, seed: int) -> TwinTask:
    return TwinTask(windows=Windows(shapes=(TUNING,), draw=seed), policy=policy, seed=seed, **SEARCH)


def _first(seeds: Sequence[int]) -> list[AnyTask]:
    plain = [
        held_out(*where, policy, seed) for where in HELD_OUT for policy in (*BASELINES, PAPER, OURS) for seed in seeds
    ]
    return [_search(policy, seed) for policy in (PAPER, OURS) for seed in seeds] + plain


def _frozen(where: tuple[str, float], policy: str, seed: int, runs: Runs) -> Task:
    return held_out(*where, policy, seed, runs[_search(policy, seed)].weights)


def _then(seeds: Sequence[int], runs: Runs) -> list[Task]:
    return [_frozen(where, policy, seed, runs) for where in HELD_OUT for policy in (PAPER, OURS) for seed in seeds]


def _judge(seeds: Sequence[int], runs: Runs) -> Iterator[Statement]:
    for where in HELD_OUT:
        for policy, bound in BOUNDS.items():
            frozen = [runs[_frozen(where, policy, seed, runs)].whole for seed in seeds]
            moved = sum(runs[_search(policy, seed)].accepted for seed in seeds)
            yield row_of(
                "protocol by twin",
                where,
                policy,
                frozen,
                seeds,
                runs,
                tuned="tuned by the twin",
                at_most=bound,
                note=f"moved in {moved} of {len(seeds)}",
            )


EXPERIMENT = Experiment("protocol by twin", _first, lambda seeds, runs: list(_judge(seeds, runs)), _then)
