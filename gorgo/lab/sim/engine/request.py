"""The records of the engine models: a request with its lengths, progress and tokens, and the scheduler's iterations.

Owns the records and the arithmetic of runs of decode iterations. Leaves to the models when a request moves from one
stage to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil, sqrt
from typing import Generic, TypeVar

from gorgo.core.record import record
from gorgo.lab.sim.engine.kv_cache import CacheNode


class Stage(Enum):
    """Where a request is in its life."""

    NEW = "new"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


#: The stages as names of their own: in Python 3.11 a member of an Enum takes eight times as long to read.
NEW, WAITING, PREFILLING, DECODING, FINISHED, ABORTED = Stage


class EngineRequest:
    """A request and its progress in one engine. Callers may subclass it.

    Parameters
    ----------
    key:
        The prompt as cache items (four bytes a token in a served engine). A prompt that does not end on an item has
        tokens behind the last one, which are never cached.
    prompt_tokens, output_tokens:
        Lengths; exactly `output_tokens` (at least one) are generated.
    output_key:
        The output as items; may be empty, then the output is never cached.
    """

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "contents",
        "emitted",
        "first_token_s",
        "handle",
        "key",
        "output_key",
        "output_tokens",
        "prefilled_tokens",
        "private_tokens",
        "prompt_tokens",
        "reserved_tokens",
        "stage",
        "submitted_s",
    )

    def __init__(self, key: bytes, *, prompt_tokens: int, output_tokens: int, output_key: bytes = b"") -> None:
        assert min(prompt_tokens, output_tokens) >= 1, "an engine computes and emits at least one token"
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.output_key = output_key
        self.stage = NEW
        self.submitted_s = 0.0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens = 0
        #: Prompt tokens whose KV exists, cached ones included.
        self.prefilled_tokens = 0
        self.emitted = 0
        self.private_tokens = 0
        self.reserved_tokens = 0
        self.handle: CacheNode | None = None
        #: Of an engine with blocks: the content of each full one, computed once.
        self.contents: tuple[int, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.emitted == self.output_tokens


# The scheduler's iterations as records: one step, or many decode iterations at once, and where a run of them is cut.
#
# Theory of operation. Without an arrival, an end or an abort each decode iteration has the same batch and attends to
# one token more per request, so the j-th one takes `first + (j - 1) * growth` seconds and the first j together
#
#     j * first + growth * j * (j - 1) / 2
#
# The iteration at a given time is found by solving that for j. Times are those of stepping one by one up to rounding.


RequestT = TypeVar("RequestT", bound=EngineRequest)


@record
class Step(Generic[RequestT]):
    """One scheduler iteration, or several decode iterations in a row: which requests it serves and when it is over.

    `chunks` are the prompt tokens computed per request in a prefill step, empty in decode iterations; a request that
    decodes in the same step has 0. `first_s` and `growth_s` are how long the first of `iterations` takes and how much
    longer each one takes than the one before. `preempted` lost their KV when the step was formed.
    """

    started_s: float
    ends_s: float
    requests: tuple[RequestT, ...]
    chunks: tuple[int, ...]
    iterations: int = 1
    first_s: float = 0.0
    growth_s: float = 0.0
    preempted: tuple[RequestT, ...] = ()

    def ended_s(self, iterations: int) -> float:
        """When the first so many decode iterations are over."""
        return self.started_s + run_duration_s(self.first_s, self.growth_s, iterations)

    def iteration_at(self, now: float) -> int:
        """Which iteration, from 1, is the first that ends at `now` or later; the last one if none does."""
        since_s = now - self.started_s
        if since_s <= self.first_s:
            return 1
        slope = self.first_s - self.growth_s / 2
        number = ceil(2 * since_s / (slope + sqrt(slope * slope + 2 * self.growth_s * since_s)))
        number = min(max(number, 1), self.iterations)
        # The root is right but for rounding at a boundary.
        while number > 1 and self.ended_s(number - 1) >= now:
            number -= 1
        while number < self.iterations and self.ended_s(number) < now:
            number += 1
        return number


@dataclass(slots=True)
class Totals:
    """Cumulative figures since the start, as an engine's counters tell them."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    prefill_busy_s: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    preemptions: int = 0


def run_duration_s(first_s: float, growth_s: float, iterations: int) -> float:
    """How long so many iterations take of which each is longer by `growth_s` than the one before."""
    return iterations * first_s + growth_s * (iterations * (iterations - 1) // 2)
