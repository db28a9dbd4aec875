"""What the models of all engines share: the queue, the step under way, the counters, and how a request comes and goes.

Owns arrival and abort, and the views of observers. `model` and `vllm.model` decide admission and the contents of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sized
from typing import Generic, TypeVar

from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import ABORTED, FINISHED, NEW, WAITING, RequestT, Step, Totals

#: The running requests of one kind of engine.
BatchT = TypeVar("BatchT", bound=Sized)


class Scheduler(ABC, Generic[RequestT, BatchT]):
    """One engine without its rules of admission.

    Parameters
    ----------
    profile:
        Costs and limits.
    batch:
        The running requests.
    limits:
        Bounds the size of a request; `profile` if None.
    """

    def __init__(self, profile: EngineProfile, batch: BatchT, *, limits: EngineProfile | None = None) -> None:
        self.profile = profile
        #: The running requests; observers only read them.
        self.batch = batch
        self.totals = Totals()
        #: Every step takes this many times as long: a fault to inject.
        self.slowdown = 1.0
        self._limits = limits or profile
        self._waiting: deque[RequestT] = deque()
        self._stepping: Step[RequestT] | None = None

    @property
    def running(self) -> int:
        return len(self.batch)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Collection[RequestT]:
        """Return the queued requests in order; read-only."""
        return self._waiting

    @property
    def step(self) -> Step[RequestT] | None:
        """The step under way."""
        return self._stepping

    @property
    def waiting_tokens(self) -> int:
        """Return the prompt tokens of queued requests, cached ones included."""
        return sum(request.prompt_tokens for request in self._waiting)

    @property
    def next_arrival_s(self) -> float | None:
        """When the first in line arrived: an idle engine starts then, even if its caller is late."""
        return self._waiting[0].submitted_s if self._waiting else None

    @property
    def idle(self) -> bool:
        return not (self._waiting or self.batch or self._stepping)

    def submit(self, request: RequestT, *, now: float) -> None:
        """Queue a request; raises `BadRequest` if it can never run."""
        assert request.stage is NEW, "a request is submitted once"
        self._limits.check_size(request.prompt_tokens, request.output_tokens)
        request.stage = WAITING
        request.submitted_s = now
        self._waiting.append(request)
        self.totals.requests += 1

    def abort(self, request: RequestT) -> bool:
        """Drop a request in any stage and free all that it holds. False if it had already ended."""
        if request.stage in (NEW, FINISHED, ABORTED):
            return False
        assert self._stepping is None or self._stepping.iterations == 1, "a run is interrupted first"
        if request.stage is WAITING:
            self._waiting.remove(request)
        else:
            self._release(request)
        request.stage = ABORTED
        self.totals.aborted += 1
        return True

    @abstractmethod
    def _release(self, request: RequestT) -> None:
        """Remove a running request and free all that it holds."""
