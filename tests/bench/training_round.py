"""Time of one round of training with full buffers, and of a prediction of 64 replicas, by kind of model.

With one thread of BLAS as the commands have it (`OPENBLAS_NUM_THREADS=1`). The FIFO and the replay buffer have 5,000
rows each; boosted trees train on as many rows, and on a full window of the stratified store.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import COLUMNS, TrainingRows
from gorgo.learning import trees
from gorgo.learning.trainer import RING_ROWS, STRATA, Trainer, fit
from tests.learning.outcomes import training_rows

#: As many features as Lodestar has.
FEATURES = 21
KINDS = ("mlp", "residual", "linear", "rls", "trees")
REPLICAS, PREDICTIONS = 64, 500


def run() -> None:
    """Print seconds of wall clock and of processor time per round, and microseconds per prediction."""
    print(f"{'model':<9}  {'rows':>7}  {'round s':>8}  {'of CPU':>7}  {'predict us':>10}  {'p99':>7}")
    for kind in KINDS:
        spec = TrainingSpec(kind, _rows(1).names)  # type: ignore[arg-type]
        trainer = Trainer(replace(spec, epochs=1, judged=False), seed=0)
        for seq in range(0, 15_000, 1000):
            trainer.add(_rows(1000, seq))
            trainer.train()
        # Both buffers are full, and a thousand rows wait for the replay buffer.
        trainer.add(_rows(1000, 15_000))
        trainer.spec = replace(spec, judged=False)
        _print(kind, trainer.train)
    if trees.available():
        spec = TrainingSpec("trees", _rows(1).names)
        window = _rows(STRATA * RING_ROWS)
        _print("trees", lambda: fit(window, spec, seed=0, version=1))


def _print(kind: str, train: Callable[[], Model | None]) -> None:
    wall, processor = time.perf_counter(), _processor_s()
    model = train()
    assert model is not None, "not judged"
    wall, processor = time.perf_counter() - wall, _processor_s() - processor
    table = _rows(REPLICAS, 99).features
    spent = []
    for _ in range(PREDICTIONS):
        start = time.perf_counter()
        model.ttft_s(table)
        spent.append(time.perf_counter() - start)
    p50, p99 = np.percentile(spent, [50, 99]) * 1e6
    samples = model.samples
    found = model.kind if model.kind == kind else f"{kind}: {model.kind}"
    print(f"{found:<9}  {samples:>7,}  {wall:>8.2f}  {processor:>7.2f}  {p50:>10.0f}  {p99:>7.0f}")


def _rows(count: int, seq: int = 0) -> TrainingRows:
    """Rows of a known function, with features of chance beside its own."""
    rows = training_rows(count, seed=seq, first_seq=seq, noise=0.1)
    others = FEATURES - len(rows.names)
    chance = np.random.default_rng(seq).random((count, others), dtype=np.float32)
    names = (*(f"other_{number}" for number in range(others)), *rows.names)
    columns = {name: getattr(rows, name) for name in COLUMNS} | {"features": np.hstack([chance, rows.features])}
    return replace(rows, names=names, **columns)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
