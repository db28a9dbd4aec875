"""A process that trains models: a round holds its process for seconds, and in this one nothing else waits for it.

Theory of operation. First come the settings. Then each message is some outcomes, and each gets one reply, with a model
if a round was due. The buffers are here alone; another process begins with the outcomes that the proxy still has.

A busy neighbour costs the event loop caches and memory bandwidth, whatever its priority. So the process computes for a
slice and then pauses for three: a quarter of the requests meet it, and a round takes four times as long.

Without settings it tries model files of others: it loads one and predicts once, and the worst that comes of it is its
own end.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from time import perf_counter, sleep

import numpy as np

from gorgo.errors import GorgoError
from gorgo.learning.model_file import dumps, loads
from gorgo.learning.trainer import Trainer
from gorgo.live.helper_worker import Work, run_worker
from gorgo.live.training.messages import GivenModel, Outcomes, Reply, Settings

#: Data of this process: numpy's libraries, and ten times the largest buffers.
MAX_MEMORY_BYTES = 2 << 30
#: Processor time between two pauses, and a pause, s.
SLICE_S, PAUSE_S = 0.01, 0.03


def prepared(settings: Settings | None) -> Work:
    """Return what trains on the outcomes of one message, or what tries a model."""
    return _tried if settings is None else _training(settings)


def _tried(message: bytes) -> Iterator[str | None]:
    """Yield what is wrong with the predictions of a model; `None` for one that could be used, or is refused anyway."""
    given: GivenModel = pickle.loads(message)
    try:
        model = loads(given.data, given.place, names=given.names)
    except GorgoError:  # the proxy finds the same
        yield None
        return
    table = np.vstack([model.low, model.high, np.zeros_like(model.low), (model.low + model.high) / 2]).astype("f4")
    times = [found for found in (model.ttft_s(table), model.tpot_s(table)) if found is not None]
    sound = all(found.shape == (len(table),) and np.isfinite(found).all() for found in times)
    yield None if sound else "predictions that are no times"


def _training(settings: Settings) -> Work:
    pace()
    spec, given = settings.spec, settings.incumbent
    incumbent = None if given is None else loads(given, "the model in use", names=spec.names)
    trainer = Trainer(spec, settings.seed, incumbent)

    def train(message: bytes) -> Iterator[Reply]:
        outcomes: Outcomes = pickle.loads(message)
        trainer.add(outcomes.rows)
        yield Reply(trainer.report().as_dict()) if outcomes.more else _round(trainer)

    return train


def _round(trainer: Trainer) -> Reply:
    if not trainer.due():
        return Reply(trainer.report().as_dict())
    started = perf_counter()
    model = trainer.train()
    data = None if model is None else dumps(model)
    return Reply(trainer.report().as_dict(), data, is_round=True, seconds=perf_counter() - started)


def pace(pause: Callable[[float], object] = sleep) -> None:
    """Pause after each slice of processor time from here on; a call into a library is not interrupted."""
    signal.signal(signal.SIGVTALRM, lambda _number, _frame: pause(PAUSE_S))
    signal.setitimer(signal.ITIMER_VIRTUAL, SLICE_S, SLICE_S)


def main() -> None:
    """Work until the standard input ends."""
    run_worker(prepared, frames=1, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
