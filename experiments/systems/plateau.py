"""Whether the defaults of `gorgo-ms` stand on a plateau: `lambda`, `delta` and `eta` changed, one by one and together.

The defaults were chosen on windows that are ART-Chat-like, WildChat-like or of Mooncake's conversations, on the GORGO
paper's three replicas. The workloads here are none of these: other prompts, answers and engines, on six replicas each,
at loads at which requests wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.reports import Grid, SystemReport, target_report
from experiments.runner import Runner
from experiments.windows import CHANGED, RatioTarget, Workload
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import OURS

NAME, TITLE = "plateau", "whether the defaults of gorgo-ms are good where they were not chosen"
TITLES: Mapping[str, str] = {
    "plateau": "`gorgo-ms` with its defaults over itself with other weights: means over six held-out workloads"
}
GROUPS = tuple(TITLES)
#: Shape, time scale and fleet.
HELD_OUT: Sequence[tuple[str, float, str]] = (
    ("toolagent-like", 1.0, "mixed-gpus-x2"), ("short-chat", 0.5, "mixed-gpus-x2"),
    ("rag", 0.5, "dense-70b-x2"), ("groups", 0.5, "dense-70b-x2"),
    ("toolagent-like", 1.0, "6x1xH100"), ("rag", 0.5, "6x1xH100"),
)  # fmt: skip
#: As in this project's other claims; so many requests are two to ten minutes.
WORKLOADS = [
    Workload(name=shape, traces=(shape,), filters=TraceFilters(max_input=24_000, limit=1_000), time_scale=time_scale,
             fleet=fleet)
    for shape, time_scale, fleet in HELD_OUT
]  # fmt: skip
MEASURED = ("mean TTFT", "p95 TTFT", "p95 E2E")
#: No change of the weights is better than the defaults by more.
AT_MOST = 1.03


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Return a target per change and figure, over the workloads."""
    targets = [RatioTarget("plateau", OURS, WORKLOADS, (label,), figure, AT_MOST)
               for label in CHANGED for figure in MEASURED]  # fmt: skip
    return target_report(targets, groups, grid, runner, TITLES)
