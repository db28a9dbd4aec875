"""One training: rows, settings and a seed make a model."""

from __future__ import annotations

import numpy as np

from gorgo.core.training.model import Model
from gorgo.core.training.outcomes import TrainingRows
from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import ConfigError
from gorgo.learning.models import trees
from gorgo.learning.models.linear import fit_linear
from gorgo.learning.models.mlp import fit_mlp
from gorgo.learning.models.residual import fit_residual
from gorgo.learning.models.rls import fit_rls


def fit(rows: TrainingRows, spec: TrainingSpec, seed: int, version: int) -> Model:
    """Return the model of a round.

    Parameters
    ----------
    rows:
        All that the round trains on, with the features of `spec.names`.
    spec:
        Kind and settings. Kind `trees` without LightGBM makes a model of kind `rls`.
    seed, version:
        Chance of the round, and the number that the model gets. The same arguments make the same model.

    Raises `ConfigError` for other features, or without a row.
    """
    if rows.names != spec.names:
        raise ConfigError(f"training: rows of features {', '.join(rows.names)}; expected {', '.join(spec.names)}")
    if not len(rows):
        raise ConfigError("training: no rows; expected at least one")
    rng = np.random.default_rng((seed, version))
    match spec.kind:
        case "mlp":
            return fit_mlp(rows, spec, rng=rng, version=version)
        case "residual":
            return fit_residual(rows, spec, rng=rng, version=version)
        case "linear":
            return fit_linear(rows, spec, version=version)
        case "trees" if trees.available():
            return trees.fit_trees(rows, spec, seed=int(rng.integers(2**31)), version=version)
        case _:
            return fit_rls(rows, spec, version=version)
