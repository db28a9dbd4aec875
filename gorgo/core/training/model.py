"""The interface of a trained model, which predicts times of a table of candidates, and the settings of its training.

Owns `Model` and `TrainingSpec`. Leaves the kinds of models to `gorgo.learning.models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gorgo.core.record import record


class Model(Protocol):
    """One immutable result of a training: parameters, statistics of its samples, version."""

    @property
    def version(self) -> int:
        """The number of the round, from 1."""

    @property
    def kind(self) -> str:
        """As in `TrainingSpec`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of a table."""

    @property
    def low(self) -> NDArray[np.float32]:
        """Least value of each feature in the training."""

    @property
    def high(self) -> NDArray[np.float32]:
        """Greatest value of each feature in the training."""

    @property
    def samples(self) -> int:
        """Samples of the training."""

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the predicted time from dispatch to first token of each row, s."""

    def tpot_s(self, table: NDArray[np.float32]) -> NDArray[np.float64] | None:
        """Return the predicted time per output token of each row, s; `None` if the model has none."""

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return the parameters for a file: arrays by name, and what goes into its JSON header."""


def model_digest(model: Model) -> str:
    """Return 32 hexadecimal digits: the same for models of the same parameters, in whichever process."""
    arrays, parts = model.arrays()
    digest = blake2b(json.dumps([model.kind, model.version, model.names, dict(parts)]).encode(), digest_size=16)
    for name, array in sorted({**arrays, "low": model.low, "high": model.high}.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# The settings of a training: kind of model, buffers, rounds.


ModelKind = Literal["mlp", "linear", "trees", "rls", "residual"]
ReplayRule = Literal["coreset", "random", "none", "all"]
StoreKind = Literal["fifo", "stratified"]
TargetKind = Literal["seconds", "log"]


@record
class TrainingSpec:
    """How a policy's model is trained. Defaults are those of the Lodestar paper.

    Parameters
    ----------
    kind:
        `mlp` is the network of Lodestar, `linear` its ablation, `trees` boosted trees, `rls` recursive least squares,
        `residual` the error of a prediction by priors.
    names:
        Features in the order of a row's columns.
    round_samples:
        New samples that start a round.
    round_growth:
        Share of the stored samples that has to be new as well: with it the training of a sample has a bounded cost,
        however many are stored.
    first_samples:
        Samples before the first round.
    fifo, replay:
        Newest samples stored, and older ones that `replay_rule` admits.
    replay_rule:
        `coreset` admits by diversity of gradients; `random` by chance; `none` trains on new samples alone, `all` on
        every one.
    epochs:
        Passes over the samples of a round.
    target_cap_s:
        A longer time to first token counts as this one, s.
    target:
        `seconds` as in the papers, or their logarithm: errors then count as shares of a time. Of kinds `mlp` and
        `trees`.
    store:
        `fifo`, or `stratified` by load (rings per class of queue, KV usage and prefix).
    fit_s:
        Time of a round in a simulation, s of virtual time.
    judged:
        Whether a round's model is adopted only if it predicts the newest held-out rows as well as the one in use.
    """

    kind: ModelKind
    names: tuple[str, ...]
    round_samples: int = 1000
    round_growth: float = 0.0
    first_samples: int = 1000
    fifo: int = 5000
    replay: int = 5000
    replay_rule: ReplayRule = "coreset"
    epochs: int = 20
    target_cap_s: float = 60.0
    target: TargetKind = "seconds"
    store: StoreKind = "fifo"
    fit_s: float = 2.0
    judged: bool = True
