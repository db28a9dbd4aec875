"""Runs of the tasks that claims need, each once, and the verdicts on them.

Owns the order of a check. An experiment asks for tasks, gets their runs, may ask for more that depend on them, and ends
with its verdicts; the runner takes from the cache what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.progress import shown_progress
from gorgo.apps.simulate.run import parallel

Task = TypeVar("Task")
Run = TypeVar("Run")

#: Yields tasks, receives the runs of all tasks so far, returns the verdicts.
Experiment: TypeAlias = Generator[Sequence[Task], Mapping[Task, Run], list[ClaimVerdict]]


class Runner(Generic[Task, Run]):
    """Runs tasks in parallel, and stores each run as it ends.

    Parameters
    ----------
    run, key_of:
        How a task runs, in any process; its key in the cache. Tasks of the same key are one run.
    cache:
        Of earlier runs.
    n_jobs:
        Runs at a time; -1 is one per core.
    show_progress:
        On stderr.
    """

    def __init__(
        self,
        run: Callable[[Task], Run],
        key_of: Callable[[Task], str],
        cache: RunCache[Run],
        *,
        n_jobs: int = -1,
        show_progress: bool = True,
    ) -> None:
        self._run, self._key_of, self._cache = run, key_of, cache
        self._n_jobs, self._show_progress = n_jobs, show_progress

    def by_key(self, tasks: Iterable[Task]) -> dict[str, Task]:
        """Return the first task of each key, in their order."""
        found: dict[str, Task] = {}
        for task in tasks:
            found.setdefault(self._key_of(task), task)
        return found

    def missing(self, tasks: Iterable[Task]) -> dict[str, Task]:
        """Return the tasks whose runs the cache lacks."""
        return {key: task for key, task in self.by_key(tasks).items() if self._cache.find(key) is None}

    def runs(self, tasks: Sequence[Task], *, title: str) -> dict[Task, Run]:
        """Return each task's run, from the cache or made now."""
        missing = self.missing(tasks)
        shown = self._show_progress and missing
        with shown_progress(title, len(missing)) if shown else nullcontext(None) as advance:
            for key, run in parallel(partial(_keyed, self._run), list(missing.items()), n_jobs=self._n_jobs):
                self._cache.store(key, run)
                if advance is not None:
                    advance()
        found = ((task, self._cache.find(self._key_of(task))) for task in tasks)
        return {task: run for task, run in found if run is not None}

    def verdicts(self, experiment: Experiment[Task, Run], *, title: str) -> list[ClaimVerdict]:
        """Return an experiment's verdicts, having run what it asks for."""
        runs: dict[Task, Run] = {}
        try:
            tasks = next(experiment)
            while True:
                runs |= self.runs(tasks, title=title)
                tasks = experiment.send(runs)
        except StopIteration as end:
            verdicts: list[ClaimVerdict] = end.value
            return verdicts


def _keyed(run: Callable[[Task], Run], item: tuple[str, Task]) -> tuple[str, Run]:
    key, task = item
    return key, run(task)
