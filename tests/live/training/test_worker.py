"""The process that trains, as a neighbour of the event loop."""

from __future__ import annotations

import signal
import subprocess
import sys
from time import process_time

from gorgo.core.training.model import TrainingSpec
from gorgo.live.helper_worker import frame, pickled
from gorgo.live.training.messages import Outcomes, Settings
from gorgo.live.training.worker import PAUSE_S, SLICE_S, pace
from tests.learning.outcomes import numbered


def test_it_pauses_after_each_slice_of_processor_time() -> None:
    pauses: list[float] = []
    handler = signal.getsignal(signal.SIGVTALRM)
    try:
        pace(pauses.append)
        end_s = process_time() + 100 * SLICE_S  # a kernel counts coarsely, and more so beside other processes
        while len(pauses) < 4 and process_time() < end_s:
            pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, handler)
    assert pauses == [PAUSE_S] * 4


def test_it_ends_in_the_middle_of_a_round_when_its_parent_is_gone() -> None:
    """As after SIGKILL: nothing but the end of its input tells it."""
    spec = TrainingSpec("mlp", ("prompt_tokens",), first_samples=10, epochs=1_000_000)
    round_without_end = frame(pickled(Settings(spec, 0, None))) + frame(pickled(Outcomes(numbered(40), more=False)))
    command = [sys.executable, "-m", "gorgo.live.training.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(round_without_end)
            process.stdin.close()
            assert process.wait(timeout=15) == 0
        finally:
            process.kill()
