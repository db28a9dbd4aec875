"""Runs of tasks: each once, in parallel, and stored in a file each, so that an interrupted grid resumes.

A task names its run by a key: a digest of all that its figures depend on, which are its settings, the file of its trace
or shape, and the source code that decides and simulates. Of the policies only the run's own counts, and what policies
share: work on one policy leaves the stored runs of the others valid. The rows of a system are no part of a key.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

import gorgo.core
import gorgo.engines
import gorgo.lab.datasets
import gorgo.lab.prompt_text
import gorgo.lab.replay
import gorgo.lab.replay_client
import gorgo.lab.sim
import gorgo.lab.simulate
import gorgo.lab.traces
import gorgo.learning
import gorgo.policies
from experiments.tables import ClaimVerdict
from gorgo.config.atomic import write_atomically
from gorgo.errors import GorgoError, ReportError
from gorgo.lab.progress import shown_progress
from gorgo.lab.simulate import BASELINES
from gorgo.lab.simulate.run import parallel, policy_of
from gorgo.policies.registry import POLICIES

Backend = Literal["loky", "dask", "ray"]
BACKENDS: tuple[Backend, ...] = ("loky", "dask", "ray")
#: Packages and modules that every run's figures depend on; `_policy_files` adds the policies.
_CODE = (
    gorgo.core, gorgo.engines, gorgo.learning, gorgo.lab.sim,
    gorgo.lab.datasets, gorgo.lab.prompt_text, gorgo.lab.replay, gorgo.lab.replay_client,
    gorgo.lab.simulate, gorgo.lab.traces,
)  # fmt: skip
_POLICIES = Path(gorgo.policies.__file__ or "").parent


class Task(Protocol):
    """One run to make; hashable, and sent to other processes."""

    kind: ClassVar[type[Any]]  #: The dataclass of what `run` returns.

    def key(self) -> str: ...  # the run's name: tasks of one key are one run
    def run(self) -> Any: ...
    def __hash__(self) -> int: ...


#: The run of each task.
Runs: TypeAlias = Mapping[Any, Any]
#: Yields tasks, receives the runs of all tasks so far, may ask for more that depend on them, and returns its verdicts.
Experiment: TypeAlias = Generator[Sequence[Task], Runs, list[ClaimVerdict]]
OneTask = TypeVar("OneTask", bound=Task)


class Runner:
    """Runs tasks and stores each run as it ends.

    `folder` has the stored runs; None: in memory alone. `n_jobs` run at a time; -1 is one per core. `backend` is
    joblib's: processes of this machine (`loky`), or the workers of a cluster that exists (`dask`, `ray`).
    """

    def __init__(
        self, folder: Path | None, *, n_jobs: int = -1, backend: Backend = "loky", show_progress: bool = True
    ) -> None:
        self._folder, self._n_jobs, self._backend, self._show_progress = folder, n_jobs, backend, show_progress
        self._runs: dict[str, Any] = {}
        #: Runs that were made and not found, in all calls.
        self.made = 0

    def find(self, task: Task) -> Any:
        """Return a stored run, or None; raise `ReportError` for a damaged file."""
        key = task.key()
        if key not in self._runs and self._folder is not None and (path := self._folder / f"{key}.json").exists():
            try:
                self._runs[key] = _adapter(cast(Hashable, task.kind)).validate_python(json.loads(path.read_bytes()))
            except (ValidationError, ValueError, RecursionError) as error:
                raise ReportError(f"{path}: damaged; remove it, and the run is repeated ({error})") from error
        return self._runs.get(key)

    def runs(self, tasks: Sequence[OneTask], *, title: str) -> dict[OneTask, Any]:
        """Return the run of each task, made now where none is stored."""
        missing: dict[str, OneTask] = {}
        for task in tasks:
            if self.find(task) is None:
                missing.setdefault(task.key(), task)
        if missing:
            connect(self._backend)
            made = parallel(_keyed, list(missing.items()), n_jobs=self._n_jobs, backend=self._backend)
            with shown_progress(title, len(missing)) if self._show_progress else nullcontext(None) as advance:
                for key, run in made:
                    self._store(key, run)
                    if advance is not None:
                        advance()
        return {task: self.find(task) for task in tasks}

    def verdicts(self, experiment: Experiment, *, title: str) -> list[ClaimVerdict]:
        runs: dict[Any, Any] = {}
        try:
            tasks = next(experiment)
            while True:
                runs |= self.runs(tasks, title=title)
                tasks = experiment.send(runs)
        except StopIteration as end:
            return cast("list[ClaimVerdict]", end.value)

    def _store(self, key: str, run: Any) -> None:
        self._runs[key], self.made = run, self.made + 1
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / f"{key}.json", json.dumps(asdict(run)).encode() + b"\n")


def connect(backend: Backend) -> None:
    """Register the backend with joblib and connect to its cluster.

    The cluster's address is that of the environment: `DASK_SCHEDULER_ADDRESS` or `RAY_ADDRESS`. Its workers need this
    project's checkout on their path. Raises `GorgoError` without the backend's package or without an address.
    """
    if backend == "loky":
        return
    package, variable = {"dask": ("distributed", "DASK_SCHEDULER_ADDRESS"), "ray": ("ray", "RAY_ADDRESS")}[backend]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise GorgoError(f"--backend {backend} needs the package {package}: pip install {package}") from error
    address = os.environ.get(variable)
    if not address:
        raise GorgoError(f"--backend {backend} needs the address of a cluster in {variable}")
    if backend == "dask":
        module.Client(address)
    else:
        module.init(address=address, ignore_reinit_error=True)
        importlib.import_module("ray.util.joblib").register_ray()


def _keyed(item: tuple[str, Task]) -> tuple[str, Any]:
    key, task = item
    return key, task.run()


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Any]", kind))


def run_key(policy: str, traces: Sequence[str], settings: Sequence[object], *, code: Sequence[Path] = ()) -> str:
    """Return 32 hexadecimal digits: the same for the same run by the same code.

    The `repr` of a setting is the whole of it. `code` are files and folders beside those of every simulated run.
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
    known = gorgo.lab.datasets.shapes() | {one.name: one.path for one in gorgo.lab.datasets.datasets()}
    path = Path(trace) if Path(trace).exists() else known.get(trace)
    return "" if path is None else _digest([path])


@lru_cache(maxsize=64)
def _code_digest(policy: str, code: tuple[Path, ...]) -> str:
    folders = [*map(_source_of, _CODE), *code]
    shared = [path for one in folders for path in (sorted(one.rglob("*.py")) if one.is_dir() else [one])]
    return _digest([*shared, *_policy_files(policy)])


def _source_of(module: ModuleType) -> Path:
    file = Path(module.__file__ or "")
    return file.parent if file.name == "__init__.py" else file


def _policy_files(policy: str) -> Iterator[Path]:
    """Files that policies share, and the policy's own; the baselines are parts of the simulator."""
    files = {name: _source(kind) for name, kind in POLICIES.items()}
    others = {*files.values(), _POLICIES / "registry.py"}
    yield from (path for path in sorted(_POLICIES.glob("*.py")) if path not in others)
    if policy not in BASELINES:
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
