"""Tasks that were done, a file each, so that an interrupted table goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from joblib import Parallel, delayed, parallel_config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gorgo.config.atomic import write_atomically
from gorgo.errors import TunerError
from tuner.evidence.task import Found, Task, run_task
from tuner.evidence.twin_task import TwinTask, run_twin_task

AnyTask = Task | TwinTask


def found_of(tasks: Sequence[AnyTask], *, folder: Path, n_jobs: int, title: str) -> Mapping[AnyTask, Found]:
    """What each task gives; those that were done before are read from `folder`.

    Raises `TunerError` for a file there that is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(tasks))
    found = {task: kept for task in wanted if (kept := _read(folder / f"{task.key}.json")) is not None}
    missing = [task for task in wanted if task not in found]
    if missing:
        found |= _run(missing, folder=folder, n_jobs=n_jobs, title=title)
    return found


def _run(tasks: Sequence[AnyTask], *, folder: Path, n_jobs: int, title: str) -> dict[AnyTask, Found]:
    found: dict[AnyTask, Found] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        Progress(TextColumn(title), *columns, console=Console(stderr=True)) as bar,
        parallel_config(backend="loky", n_jobs=n_jobs),
    ):
        done = bar.add_task(title, total=len(tasks))
        for task, one in Parallel(return_as="generator_unordered")(delayed(_one)(task) for task in tasks):
            write_atomically(folder / f"{task.key}.json", json.dumps(one.as_json()).encode())
            found[task] = one
            bar.advance(done)
    return found


def _one(task: AnyTask) -> tuple[AnyTask, Found]:
    return task, run_task(task) if isinstance(task, Task) else run_twin_task(task)


def _read(path: Path) -> Found | None:
    if not path.exists():
        return None
    try:
        return Found.from_json(json.loads(path.read_bytes()))
    except (ValueError, LookupError, TypeError) as error:
        raise TunerError(f"{path}: damaged ({error!r}); remove it and the run is made again") from error
