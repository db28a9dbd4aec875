"""Engine models by scheduler: their common interface, construction and prediction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeVar

from gorgo.lab.sim.engine.kv_cache import KvObserver
from gorgo.lab.sim.engine.model import EngineModel
from gorgo.lab.sim.engine.prediction import ArrivingRequest, PredictedFirstToken, predict, predict_vllm
from gorgo.lab.sim.engine.profiles import EngineProfile
from gorgo.lab.sim.engine.request import EngineRequest, RequestT, Step, Totals
from gorgo.lab.sim.engine.vllm import VllmModel

ObservedT = TypeVar("ObservedT", bound=EngineRequest, covariant=True)


class Pool(Protocol):
    """The KV pool of an engine as observers see it."""

    evicted_tokens_total: int

    @property
    def event_tokens(self) -> int:
        """Tokens of a block as an observer sees them."""

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def free_tokens(self) -> int: ...

    @property
    def evictable_tokens(self) -> int: ...

    def report_to(self, observer: KvObserver) -> None:
        """Report each change of an empty pool from now on."""


class RunningRequests(Protocol[ObservedT]):
    """The running requests of an engine as observers see them."""

    def __len__(self) -> int: ...

    @property
    def decoding(self) -> Collection[ObservedT]: ...


class Engine(Protocol[RequestT]):
    """One engine model; `model.EngineModel` documents the interface."""

    profile: EngineProfile
    totals: Totals
    slowdown: float

    @property
    def cache(self) -> Pool: ...

    @property
    def batch(self) -> RunningRequests[RequestT]: ...

    @property
    def running(self) -> int: ...

    @property
    def queued(self) -> int: ...

    @property
    def waiting(self) -> Collection[RequestT]: ...

    @property
    def step(self) -> Step[RequestT] | None: ...

    @property
    def waiting_tokens(self) -> int: ...

    @property
    def next_arrival_s(self) -> float | None: ...

    @property
    def used_tokens(self) -> int: ...

    @property
    def idle(self) -> bool: ...

    def submit(self, request: RequestT, *, now: float) -> None: ...

    def abort(self, request: RequestT) -> bool: ...

    def flush(self) -> bool: ...

    def start_step(self, *, now: float, ahead: bool = False) -> Step[RequestT] | None: ...

    def split_run(self, *, now: float) -> tuple[int, Step[RequestT] | None]: ...

    def finish_step(self, step: Step[RequestT]) -> list[RequestT]: ...

    def check(self) -> None: ...


class CacheReporter(Protocol):
    """Reporter of the caches of one replica's engines, which follow one another."""

    def attach(self, model: Engine[Any]) -> None:
        """Report an engine that has not started yet."""

    def started(self) -> None:
        """Report that it is back after a death."""


def make_engine(profile: EngineProfile, *, item_bytes: int = 4, item_tokens: int = 1) -> Engine[RequestT]:
    """Make the engine model that `profile.scheduler` names.

    Example
    -------
    >>> from gorgo.lab.sim.engine.profiles import find_profile
    >>> from gorgo.lab.sim.engine.request import EngineRequest
    >>> engine: Engine[EngineRequest] = make_engine(find_profile("1xH100-Llama-3.1-8B-vLLM"))
    >>> type(engine).__name__
    'VllmModel'
    """
    if profile.scheduler == "vllm":
        return VllmModel(profile, item_bytes=item_bytes, item_tokens=item_tokens)
    return EngineModel(profile, item_bytes=item_bytes, item_tokens=item_tokens)


def predict_first_token(
    model: Engine[Any], in_transit: Sequence[tuple[float, EngineRequest]], arrival: ArrivingRequest, *, now: float
) -> PredictedFirstToken:
    """Predict the first token of `arrival` on an engine of any kind; see `predict`."""
    if isinstance(model, VllmModel):
        return predict_vllm(model, in_transit, arrival, now=now)
    assert isinstance(model, EngineModel), "there are two kinds"
    return predict(model, in_transit, arrival, now=now)
