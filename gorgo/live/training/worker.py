"""A process that trains models: a round holds its process for seconds, and in this one nothing else waits for it.

Theory of operation. First come the settings. Then each message is some outcomes, and each gets one reply, with a model
if a round was due. The buffers are here alone; another process begins with the outcomes that the proxy still has.

A busy neighbour costs the event loop caches and memory bandwidth, whatever its priority. So the process computes for a
slice and then pauses for three: a quarter of the requests meet it, and a round takes four times as long.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterator
from time import perf_counter, sleep

from gorgo.learning.model_file import dumps, loads
from gorgo.learning.trainer import Trainer
from gorgo.live.helper_worker import Work, run_worker
from gorgo.live.training.messages import Outcomes, Reply, Settings

#: Data of this process: numpy's libraries, and ten times the largest buffers.
MAX_MEMORY_BYTES = 2 << 30
#: Processor time between two pauses, and a pause, s.
SLICE_S, PAUSE_S = 0.01, 0.03


def training(settings: Settings) -> Work:
    """Return what trains on the outcomes of one message."""
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
    """Train until the standard input ends."""
    pace()
    run_worker(training, frames=1, max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
