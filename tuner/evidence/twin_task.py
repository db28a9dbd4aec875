"""One search of the twin as a measurement: a recorded window in, weights out.

Owns the record of such a task and how it is run; its result has the form of `task`'s, so that both are kept alike:
`whole` are the start's held-out figures, `tail` those of what was taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import thread_time

from gorgo.apps.simulate import SimJob
from tuner.evidence.key import key_of
from tuner.evidence.task import Found, Part
from tuner.evidence.windows import Windows, paper_fleet
from tuner.offline.search import SearchOptions, Trial, search_weights
from tuner.offline.verdict import decide


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinTask:
    """What to search on.

    Parameters
    ----------
    windows, policy, seed:
        As in `Task`.
    candidates, seeds, held_out_seeds:
        As in `SearchOptions`.
    weights, box, asked:
        As in `Task`: where the search starts, and in what box.
    """

    windows: Windows
    policy: str
    candidates: int
    seeds: int
    held_out_seeds: int
    seed: int = 0
    weights: tuple[tuple[str, float], ...] = ()
    box: tuple[tuple[str, float, float], ...] = ()
    asked: bool = False

    @property
    def key(self) -> str:
        """As `Task.key`."""
        return key_of(self, policy=self.policy, shapes=self.windows.shapes, tuner="twin")


def run_twin_task(task: TwinTask) -> Found:
    """Here and now, run after run."""
    begun_s = thread_time()
    job = SimJob(
        trace=" + ".join(task.windows.shapes),
        feed=task.windows.feed(),
        policy=task.policy,
        weights=dict(task.weights) or None,
        fleet=paper_fleet(),
        time_scale=task.windows.time_scale,
    )
    options = SearchOptions(
        candidates=task.candidates,
        seeds=task.seeds,
        held_out_seeds=task.held_out_seeds,
        seed=task.seed,
        asked=task.asked,
        box={name: (low, high) for name, low, high in task.box},
    )
    search = search_weights(job, options)
    result = decide(job, search, options)
    return Found(
        whole=_part(result.before),
        tail=_part(result.after),
        weights=result.weights,
        generations=len(search.rows),
        accepted=int(result.moved),
        reasons=(result.reason,),
        cpu_s=thread_time() - begun_s,
    )


def _part(tried: Trial) -> Part:
    return Part(
        n=sum(score.n for score in tried.scores),
        errors=tried.errors,
        ttft_ms_p95=tried.ttft_ms or float("nan"),
        e2e_s_p95=tried.e2e_s or float("nan"),
        max_share=tried.max_share,
    )
