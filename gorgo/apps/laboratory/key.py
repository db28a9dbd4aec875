"""What a run is known by, so that one that was made before is not made again.

Owns the key: everything that a run's figures depend on. That is the job itself with its weights spelt out, the trace's
or the shape's file, and the source code that decides and simulates. Of the policies only the run's own counts, and what
they share: work on one policy leaves the kept runs of the others valid.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import gorgo
from gorgo.apps.datasets import datasets, shapes
from gorgo.apps.simulate import ORACLE, SimJob
from gorgo.apps.simulate.run import policy_of
from gorgo.core.policy.weights import Weights
from gorgo.policies.registry import POLICIES

#: Where the code is that a run's figures depend on; policies are dealt with one by one.
_CODE = ("core", "engines", "sim", "apps/datasets", "apps/replay", "apps/simulate", "apps/traces")


def run_key(job: SimJob) -> str:
    """32 hexadecimal digits: the same for the same run by the same code, and no others.

    Raises `UnknownPolicy` and `WeightsError` as the run would.
    """
    policy = policy_of(job.policy)
    weights = Weights.of(policy.weight_specs, job.weights, version=1, allow_out_of_range=True)
    parts = (
        job.policy,
        repr(sorted(weights.items())),
        repr(job.fleet),
        repr(job.filters),
        repr((job.time_scale, job.seed, job.scenario, job.limits, job.probe_interval_s, job.scrape_interval_s)),
        repr(job.slo_ttft_ms),
        Path(job.trace).name,
        _digest_of_trace(job.trace),
        _digest_of_code(job.policy),
    )
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


@lru_cache(maxsize=64)
def _digest_of_trace(trace: str) -> str:
    """Of the file that the name stands for; loading it says what is wrong with a name that nothing has."""
    known = shapes() | {one.name: one.path for one in datasets()}
    path = Path(trace) if Path(trace).exists() else known.get(trace)
    return "" if path is None else _digest([path])


@lru_cache(maxsize=64)
def _digest_of_code(policy: str) -> str:
    root = Path(gorgo.__file__).parent
    shared = [path for name in _CODE for path in sorted((root / name).rglob("*.py"))]
    return _digest([*shared, *_policy_files(policy)])


def _policy_files(policy: str) -> Iterator[Path]:
    """The file of the policy, and those in its folder that are no policy's: what policies share.

    The registry is a list of names, and the oracle is part of the simulator.
    """
    files = {name: Path(sys.modules[kind.__module__].__file__ or "") for name, kind in POLICIES.items()}
    folder = Path(gorgo.__file__).parent / "policies"
    others = {*files.values(), folder / "registry.py"}
    yield from (path for path in sorted(folder.glob("*.py")) if path not in others)
    if policy != ORACLE:
        yield files.get(policy, Path(sys.modules[type(policy_of(policy)).__module__].__file__ or ""))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode(errors="surrogateescape") + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
