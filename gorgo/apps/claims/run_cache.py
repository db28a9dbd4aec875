"""Results of simulated runs, one file each: an interrupted check resumes, and an unchanged run is not repeated.

Owns the folder OUT/runs and the keys of its files. A key is a digest of all that a run's figures depend on: its
settings, the file of its trace or shape, and the source code that decides and simulates. Of the policies only the
run's own counts, and what policies share: work on one policy leaves the stored runs of the others valid.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

import gorgo
from gorgo.apps.datasets import datasets, shapes
from gorgo.apps.simulate import ORACLE
from gorgo.apps.simulate.run import policy_of
from gorgo.config.atomic import write_atomically
from gorgo.errors import ReportError
from gorgo.policies.registry import POLICIES

Run = TypeVar("Run")

_ROOT = Path(gorgo.__file__).parent
#: Packages that a run's figures depend on; `_policy_files` adds the policies.
_CODE = ("core", "engines", "learning", "sim", "apps/datasets", "apps/replay", "apps/simulate", "apps/traces")


class RunCache(Generic[Run]):
    """Runs by key, in memory and, with a folder, on disk; `kind` is their dataclass."""

    def __init__(self, folder: Path | None, kind: type[Run]) -> None:
        self._folder = folder
        self._adapter = TypeAdapter(kind)
        self._runs: dict[str, Run] = {}

    def find(self, key: str) -> Run | None:
        """Return a stored run; raise `ReportError` for a damaged file."""
        if key not in self._runs and self._folder is not None:
            path = self._folder / f"{key}.json"
            if path.exists():
                self._runs[key] = self._read(path)
        return self._runs.get(key)

    def store(self, key: str, run: Run) -> None:
        """Keep the run; files of other keys are left alone."""
        self._runs[key] = run
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            row: dict[str, Any] = asdict(run)  # type: ignore[call-overload]
            write_atomically(self._folder / f"{key}.json", json.dumps(row).encode() + b"\n")

    def _read(self, path: Path) -> Run:
        try:
            return self._adapter.validate_python(json.loads(path.read_bytes()))
        except (ValidationError, ValueError, RecursionError) as error:
            raise ReportError(f"{path}: damaged; remove it, and the run is repeated ({error})") from error


def run_key(policy: str, traces: Sequence[str], settings: Sequence[object], *, code: Sequence[Path] = ()) -> str:
    """Return 32 hexadecimal digits: the same for the same run by the same code.

    Parameters
    ----------
    policy, traces:
        By name.
    settings:
        Values whose `repr` is the whole of them.
    code:
        Files and folders beside those of every simulated run.
    """
    parts = (
        policy,
        *map(repr, settings),
        *(part for trace in traces for part in (Path(trace).name, _trace_digest(trace))),
        _code_digest(policy, tuple(code)),
    )
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]


@lru_cache(maxsize=64)
def _trace_digest(trace: str) -> str:
    """Of the file behind the name; an unknown name fails when the run loads it."""
    known = shapes() | {one.name: one.path for one in datasets()}
    path = Path(trace) if Path(trace).exists() else known.get(trace)
    return "" if path is None else _digest([path])


@lru_cache(maxsize=64)
def _code_digest(policy: str, code: tuple[Path, ...]) -> str:
    folders = [*(_ROOT / name for name in _CODE), *code]
    shared = [path for one in folders for path in (sorted(one.rglob("*.py")) if one.is_dir() else [one])]
    return _digest([*shared, *_policy_files(policy)])


def _policy_files(policy: str) -> Iterator[Path]:
    """Files that policies share, and the policy's own; the oracle is part of the simulator."""
    files = {name: _source(kind) for name, kind in POLICIES.items()}
    folder = _ROOT / "policies"
    others = {*files.values(), folder / "registry.py"}
    yield from (path for path in sorted(folder.glob("*.py")) if path not in others)
    if policy != ORACLE:
        yield files.get(policy) or _source(type(policy_of(policy)))


def _source(kind: type) -> Path:
    """Return the source of a class, also of a compiled one: a run by compiled modules is the same run."""
    file = Path(sys.modules[kind.__module__].__file__ or "")
    return file if file.suffix == ".py" else file.with_name(f"{file.name.partition('.')[0]}.py")


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode(errors="surrogateescape") + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
