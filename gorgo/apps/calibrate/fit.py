"""Constants of an engine from measured times: prefill by new and cached tokens, decode by batch and context.

Owns which terms are fitted. The formulas are those of `gorgo.sim.engine.profiles`; times are in seconds.

    first token   overhead + chunks * base + new / rate + kappa * new * (cached + new / 2)
    decode step   base + moe * (1 - (1 - k/E)^B) + per_request * B + kv * context_tokens

`overhead` is what a request costs outside of the engine's steps: the network, HTTP, the tokenizer. Only prompts of
several chunks separate it from `base`; without any it is the round trip of an empty request, and the rest is `base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from gorgo.apps.calibrate.least_squares import solve
from gorgo.errors import CalibrationError

#: Sizes of a prefill step that engines use by default: SGLang by GPU memory, vLLM's token budgets, llama.cpp's batch.
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
#: Experts per token and experts of common models; the first is a dense one.
EXPERTS = ((1, 1), (8, 256), (8, 128), (4, 128), (6, 64), (2, 8))
#: A mixture of experts has one constant more, so it must explain clearly more.
_MOE_GAIN = 0.8
#: Fewer points than constants fit anything.
_LEAST_POINTS = 5


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Time to the first token of a request on an idle engine."""

    new_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Time between two tokens while `batch` requests decode that have `context_tokens` together."""

    batch: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit over its points; 0.02 is 2 %."""

    median: float
    worst: float
    points: int


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Fitted constants of a prefill; `overhead_s` is outside of the engine's steps."""

    overhead_s: float
    base_s: float
    tokens_per_s: float
    kappa_s: float
    chunk_tokens: int
    error: FitError

    def ttft_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the fitted time to a first token."""
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        steps = ceil(new_tokens / self.chunk_tokens)
        return self.overhead_s + steps * self.base_s + new_tokens / self.tokens_per_s + self.kappa_s * attended


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Fitted constants of a decode step."""

    base_s: float
    moe_s: float
    experts_per_token: int
    experts: int
    per_request_s: float
    kv_s: float
    error: FitError


def fit_prefill(points: Sequence[PrefillPoint], *, round_trip_s: float, chunk_tokens: int | None = None) -> PrefillFit:
    """Return the constants that explain `points` best.

    `round_trip_s` is the time of an empty request; `chunk_tokens` the engine's own report, else the size is fitted.
    Raises `CalibrationError` for too few points, and where time does not grow with tokens.
    """
    if len(points) < _LEAST_POINTS:
        raise CalibrationError(f"prefill: {len(points)} measured times; expected at least {_LEAST_POINTS}")
    longest = max(point.new_tokens for point in points)
    sizes = [chunk_tokens] if chunk_tokens else [*(size for size in CHUNKS if size < longest), max(longest, CHUNKS[-1])]
    found = [_prefill(points, size, round_trip_s, separable=size < longest) for size in sizes]
    best = min(found, key=lambda pair: pair[1])[0]
    if best is None:
        raise CalibrationError("prefill: the time to a first token does not grow with the prompt")
    return best


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """Return the constants that explain `points` best. Raises `CalibrationError` for too few points."""
    if len(points) < _LEAST_POINTS:
        raise CalibrationError(f"decode: {len(points)} measured batches; expected at least {_LEAST_POINTS}")
    measured = [point.step_s for point in points]
    best: tuple[DecodeFit, float] | None = None
    for active, experts in EXPERTS:
        touched = [0.0 if experts == 1 else 1 - (1 - active / experts) ** point.batch for point in points]
        columns = [
            [1.0] * len(points),
            touched,
            [float(point.batch) for point in points],
            [float(point.context_tokens) for point in points],
        ]
        (base_s, moe_s, per_request_s, kv_s), error = solve(columns, measured)
        if best is not None and error >= best[1] * (_MOE_GAIN if best[0].moe_s == 0 else 1.0):
            continue
        predicted = [
            base_s + moe_s * share + per_request_s * point.batch + kv_s * point.context_tokens
            for point, share in zip(points, touched, strict=True)
        ]
        if moe_s == 0:
            active = experts = 1
        best = DecodeFit(base_s, moe_s, active, experts, per_request_s, kv_s, _error(predicted, measured)), error
    assert best is not None, "the dense form always has a solution"
    return best[0]


def _prefill(
    points: Sequence[PrefillPoint], chunk_tokens: int, round_trip_s: float, *, separable: bool
) -> tuple[PrefillFit | None, float]:
    """Return the fit for one size of a chunk, None if time does not grow with tokens, and its error."""
    outside_s = 0.0 if separable else min(round_trip_s, 0.9 * min(point.ttft_s for point in points))
    measured = [point.ttft_s - outside_s for point in points]
    columns = [
        [1.0 if separable else 0.0] * len(points),
        [float(ceil(point.new_tokens / chunk_tokens)) for point in points],
        [float(point.new_tokens) for point in points],
        [point.new_tokens * (point.cached_tokens + point.new_tokens / 2) for point in points],
    ]
    (overhead_s, base_s, per_token_s, kappa_s), error = solve(columns, measured)
    if per_token_s <= 0:
        return None, float("inf")
    fit = PrefillFit(
        overhead_s + outside_s, base_s, 1 / per_token_s, kappa_s, chunk_tokens, FitError(0.0, 0.0, len(points))
    )
    predicted = [fit.ttft_s(point.new_tokens, point.cached_tokens) for point in points]
    measured = [point.ttft_s for point in points]
    errors = _error(predicted, measured)
    return PrefillFit(fit.overhead_s, base_s, 1 / per_token_s, kappa_s, chunk_tokens, errors), error


def _error(predicted: Sequence[float], measured: Sequence[float]) -> FitError:
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
    return FitError(median(errors), max(errors), len(errors))
