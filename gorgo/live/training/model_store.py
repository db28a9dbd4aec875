"""Files of the models of one proxy: one per policy beside the state file, and the one that the configuration names.

Beside each model are the newest outcomes, with which a training goes on after a restart. Owns which file counts first.
Leaves their form to `gorgo.learning.model_file`. Every call blocks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from gorgo.config.atomic import write_atomically
from gorgo.core.training.learning import Learner
from gorgo.core.training.outcomes import TrainingRows
from gorgo.errors import GorgoError
from gorgo.learning.model_file import dump_outcomes, load_outcomes
from gorgo.live.logs import log


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model and the time of its last change, seconds since the epoch."""

    path: Path
    changed_s: float


class ModelStore:
    """The files of one proxy.

    Parameters
    ----------
    state_path:
        The state file; without one no model is written.
    """

    def __init__(self, state_path: Path | None) -> None:
        self._state_path = state_path

    def path(self, policy: str) -> Path | None:
        """Return the file of a policy's model beside the state file.

        >>> str(ModelStore(Path("/var/lib/gorgo/state.json")).path("lodestar"))
        '/var/lib/gorgo/state.json.lodestar.npz'
        """
        state = self._state_path
        return None if state is None else state.with_name(f"{state.name}.{policy}.npz")

    def outcomes_path(self, policy: str) -> Path | None:
        """Return the file of a policy's outcomes beside the state file.

        >>> str(ModelStore(Path("/var/lib/gorgo/state.json")).outcomes_path("lodestar"))
        '/var/lib/gorgo/state.json.lodestar.outcomes.npz'
        """
        state = self._state_path
        return None if state is None else state.with_name(f"{state.name}.{policy}.outcomes.npz")

    def files(self, policy: str, configured: Path | None, *, own: bool = True) -> list[StoredFile]:
        """Return the files that a policy's model may be in, newest first: its own, and the configured one.

        One that cannot be looked at is logged. With `own=False` it is the configured one alone.
        """
        paths = [path for path in (self.path(policy) if own else None, configured) if path is not None]
        times = {path: _changed_s(path, required=path is configured) for path in paths}
        found = [StoredFile(path, changed_s) for path, changed_s in times.items() if changed_s is not None]
        return sorted(found, key=lambda file: file.changed_s, reverse=True)

    def save(self, policy: str, data: bytes) -> Path | None:
        """Write the bytes of a model file durably; return the file, `None` without one. Raises `OSError`."""
        path = self.path(policy)
        if path is not None:
            write_atomically(path, data)
        return path

    def load_outcomes(self, learner: Learner) -> TrainingRows | None:
        """Return the outcomes that a former process left; `None` without a file that can be used, which is logged."""
        path = self.outcomes_path(learner.name)
        if path is None or not path.exists():
            return None
        try:
            return load_outcomes(path, names=learner.feature_names)
        except (GorgoError, OSError) as error:
            log("outcomes_not_loaded", level=logging.ERROR, file=str(path), policy=learner.name, reason=str(error))
            return None

    def save_outcomes(self, policy: str, rows: TrainingRows) -> None:
        """Write outcomes durably, if there is a state file. Raises `OSError`."""
        path = self.outcomes_path(policy)
        if path is not None:
            write_atomically(path, dump_outcomes(rows))


def _changed_s(path: Path, *, required: bool) -> float | None:
    """Return when the file was last changed; `None` without one, which is logged if it is `required`."""
    try:
        return path.stat().st_mtime
    except OSError as error:
        if required or not isinstance(error, FileNotFoundError):
            log("model_not_loaded", level=logging.ERROR, file=str(path), reason=error.strerror or str(error))
        return None
