"""One measurement of the evidence: a policy on some windows, with a tuner beside it or none.

Owns the record of a task, its result as JSON, and how the one becomes the other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

import gorgo
import tuner
from gorgo.apps.simulate import SimJob, run_once
from gorgo.sim.records import SimRecord
from tuner.campaign.options import CampaignOptions
from tuner.evidence.windows import Windows, paper_fleet
from tuner.offline.rehearsal import tune_in_simulation

#: Code on which a figure depends. Reports, command line and the live proxy's shell do not change one.
_CODE = ("core", "policies", "sim", "apps/datasets", "apps/traces", "apps/simulate")
_TUNER = ("campaign", "offline", "optimizers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to run.

    Parameters
    ----------
    windows:
        Traffic.
    policy, weights:
        Start weights by name; empty is the policy's defaults.
    seed:
        Of the network and of the campaign's chance. The same for what is to be compared.
    campaign:
        Options by name; None: the weights stay as they are.
    asked, box:
        As in `tuned_box`, the box as (name, low, high).
    after:
        Figures of `tail` are over requests from this one on.
    """

    windows: Windows
    policy: str
    weights: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    campaign: tuple[tuple[str, Any], ...] | None = None
    asked: bool = False
    box: tuple[tuple[str, float, float], ...] = ()
    after: int = 0

    @property
    def key(self) -> str:
        """The same for the same run by the same code, and no others."""
        text = f"{self!r}\n{paper_fleet()!r}\n{digest_of_code()}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Figures of some requests of a run."""

    n: int
    errors: int
    ttft_ms_p95: float
    e2e_s_p95: float
    max_share: float

    @classmethod
    def of(cls, records: Sequence[SimRecord]) -> Part:
        good = [record for record in records if record.error is None]
        shares = Counter(record.replica for record in good)
        return cls(
            n=len(records),
            errors=len(records) - len(good),
            ttft_ms_p95=_p95([record.ttft_ms for record in good]),
            e2e_s_p95=_p95([record.e2e_s for record in good]),
            max_share=max(shares.values()) / len(good) if good else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came out: all requests, those from `Task.after` on, and what the tuner did."""

    whole: Part
    tail: Part
    weights: Mapping[str, float]
    generations: int = 0
    accepted: int = 0
    rollbacks: int = 0
    reasons: Sequence[str] = ()
    cpu_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Found:
        parts = {name: Part(**row[name]) for name in ("whole", "tail")}
        return cls(**{**row, **parts, "reasons": tuple(row["reasons"])})


def run_task(task: Task) -> Found:
    """Here and now."""
    begun_s = thread_time()
    job = SimJob(
        trace=" + ".join(task.windows.shapes),
        feed=task.windows.feed(),
        policy=task.policy,
        weights=dict(task.weights) or None,
        fleet=paper_fleet(),
        time_scale=task.windows.time_scale,
        seed=task.seed,
        keep_requests=True,
    )
    if task.campaign is None:
        run = run_once(job)
        whole, tail = _parts(run.requests or (), task.after)
        return Found(whole=whole, tail=tail, weights=run.row.weights or {}, cpu_s=thread_time() - begun_s)
    tuned = tune_in_simulation(
        job,
        CampaignOptions(**dict(task.campaign)),
        seed=task.seed,
        asked=task.asked,
        box={name: (low, high) for name, low, high in task.box},
    )
    whole, tail = _parts(tuned.records, task.after)
    return Found(
        whole=whole,
        tail=tail,
        weights=tuned.weights,
        generations=len(tuned.generations),
        accepted=sum(row.accepted for row in tuned.generations[1:]),
        rollbacks=tuned.rollbacks,
        reasons=tuple(row.reason for row in tuned.generations),
        cpu_s=thread_time() - begun_s,
    )


def _parts(records: Sequence[SimRecord], after: int) -> tuple[Part, Part]:
    return Part.of(records), Part.of(records[after:])


def _p95(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, 0.95)) if known else float("nan")


@cache
def digest_of_code() -> str:
    """Of all code on which a figure depends."""
    ours, theirs = Path(tuner.__file__).parent, Path(gorgo.__file__).parent
    files = [ours / "objective.py", ours / "space.py", Path(__file__), Path(__file__).with_name("windows.py")]
    for root, names in ((theirs, _CODE), (ours, _TUNER)):
        files += [path for name in names for path in sorted((root / name).rglob("*.py"))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
