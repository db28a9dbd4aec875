"""One measurement of the evidence: a policy on some windows, with a tuner beside it or none.

Owns the record of a task, its result as JSON, and how the one becomes the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from time import thread_time
from typing import Any

import numpy as np

from gorgo.apps.simulate import SimJob, run_once
from gorgo.core.router import Router
from gorgo.sim.records import SimRecord
from tuner.campaign.options import CampaignOptions
from tuner.evidence.key import key_of
from tuner.evidence.windows import Windows, paper_fleet
from tuner.offline.simulated_campaign import simulate_campaign


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
    later:
        Weights that are put when this many requests have arrived; None: none.
    """

    windows: Windows
    policy: str
    weights: tuple[tuple[str, float], ...] = ()
    seed: int = 0
    campaign: tuple[tuple[str, Any], ...] | None = None
    asked: bool = False
    box: tuple[tuple[str, float, float], ...] = ()
    after: int = 0
    later: tuple[int, tuple[tuple[str, float], ...]] | None = None

    @property
    def key(self) -> str:
        """The same for the same run by code that behaves alike, and no others."""
        mode = None if self.campaign is None else dict(self.campaign).get("mode", CampaignOptions().mode)
        return key_of(self, policy=self.policy, shapes=self.windows.shapes, tuner=mode)


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
        run = run_once(job, controllers=_put_later(task))
        whole, tail = _parts(run.requests or (), task.after)
        return Found(whole=whole, tail=tail, weights=run.row.weights or {}, cpu_s=thread_time() - begun_s)
    tuned = simulate_campaign(
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


class _PutOnce:
    """A controller of a simulation that puts weights at one time."""

    def __init__(self, at_s: float, weights: Mapping[str, float]) -> None:
        self._next_s: float | None = at_s
        self._weights = weights

    @property
    def next_s(self) -> float | None:
        """When; None once it is done."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:
        """Puts them."""
        specs = router.policy.weight_specs
        router.set_weights(router.weights.changed(specs, self._weights, allow_out_of_range=True), now=now)
        self._next_s = None


def _put_later(task: Task) -> Sequence[_PutOnce]:
    if task.later is None:
        return ()
    index, weights = task.later
    return (_PutOnce(task.windows.feed()[index].arrival_s * task.windows.time_scale, dict(weights)),)


def _parts(records: Sequence[SimRecord], after: int) -> tuple[Part, Part]:
    return Part.of(records), Part.of(records[after:])


def _p95(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.quantile(known, 0.95)) if known else float("nan")
