"""The settings of a training: kind of model, buffers, rounds."""

from __future__ import annotations

from typing import Literal

from gorgo.core.record import record

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
