"""Constants of an engine from measured times: prefill by new and cached tokens, decode by batch and context.

Owns which terms are fitted, and the least squares that fit them. The formulas are those of
`gorgo.lab.sim.engine.profiles`; times are in seconds.

    first token   overhead + chunks * base + new / rate + kappa * new * (cached + new / 2)
    decode step   base + moe * (1 - (1 - k/E)^B) + per_request * B + kv * context_tokens (+ eager above a graph)

With vLLM's scheduler no step is shorter than `base + moe` of a decode step.

`overhead` is what a request costs outside of the engine's steps: the network, HTTP, the tokenizer. Only prompts of
several chunks separate it from `base`; without any it is the round trip of an empty request, and the rest is `base`.
With vLLM's scheduler `base` is then at most the decode step of one request, which has all constant costs of a step too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, inf, sqrt
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from gorgo.errors import CalibrationError

# Least squares with coefficients of at least 0, by relative error.
#
# A cost of an engine is a sum of terms that are never negative, and an error of 5 ms matters for a time of 20 ms and
# not for one of 2 s.
#
# Theory of operation: every subset of the few terms is solved without a constraint. The best solution without a
# negative coefficient is the constrained one, because the optimum is interior to the face that its zeros span (Lawson
# and Hanson 1974, chapter 23).


Matrix = npt.NDArray[np.float64]


def solve(columns: Sequence[Sequence[float]], measured: Sequence[float]) -> tuple[list[float], float]:
    """Return the coefficients, and the root mean square of the relative errors.

    `columns` has one sequence per term, as long as `measured`, which is above 0. A term that is 0 throughout gets the
    coefficient 0.

    Example
    -------
    >>> coefficients, error = solve([[1, 1, 1], [1, 2, 4]], [3.0, 5.0, 9.0])
    >>> [round(value, 6) for value in coefficients], round(error, 6)
    ([1.0, 2.0], 0.0)
    >>> [round(value, 6) for value in solve([[1, 1], [1, 2]], [2.0, 1.0])[0]]  # a falling line is none
    [1.2, 0.0]
    """
    target = np.asarray(measured, dtype=np.float64)
    terms = np.asarray(columns, dtype=np.float64).T / target[:, None]
    ones = np.ones(len(target))
    usable = [column for column in range(terms.shape[1]) if terms[:, column].any()]
    best, least = np.zeros(terms.shape[1]), 1.0
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            coefficients = _positive(terms[:, list(chosen)], ones)
            if coefficients is None:
                continue
            error = float(np.sqrt(np.mean((terms[:, list(chosen)] @ coefficients - 1.0) ** 2)))
            if error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = coefficients
    return best.tolist(), least


def _positive(terms: Matrix, ones: Matrix) -> Matrix | None:
    """Return the unconstrained solution; None if it has a negative coefficient or is not unique."""
    # Terms differ by nine orders of magnitude: seconds, tokens, tokens squared.
    scale = np.sqrt((terms**2).sum(axis=0))
    solution, _, rank, _ = np.linalg.lstsq(terms / scale, ones, rcond=1e-10)
    if rank < terms.shape[1] or (solution < 0).any():
        return None
    return np.asarray(solution / scale, dtype=np.float64)


#: Sizes of a prefill step that engines use by default: SGLang by GPU memory, vLLM's token budgets, llama.cpp's batch.
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
#: Experts per token and experts of common models; the first is a dense one.
EXPERTS = ((1, 1), (8, 256), (8, 128), (4, 128), (6, 64), (2, 8))
#: A mixture of experts has one constant more, so it must explain clearly more.
_MOE_GAIN = 0.8
#: A smaller chunk separates one constant more, and errors of a few per cent fit any: it must explain clearly more.
_CHUNK_GAIN = 0.6
#: Sizes with a smaller error explain the points alike.
_SAME = 1e-4
#: Batches above a CUDA graph have one constant more and a threshold among all batches: much more must be explained.
_EAGER_GAIN = 0.5
#: A smaller error, and a smaller jump as a share of a step, are noise of the measurement.
_EXACT, _LEAST_JUMP = 0.005, 0.05
#: Batches on either side of a jump, and largest number of thresholds: a log has every batch.
_BESIDE_JUMP, _MOST_THRESHOLDS = 2, 64
#: The rate is that of whole requests, so a step at the floor may have somewhat more tokens.
_BESIDE_FLOOR = 1.2
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
    #: No step is shorter.
    floor_s: float = 0.0

    def ttft_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the fitted time to a first token."""
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        steps = ceil(new_tokens / self.chunk_tokens)
        total_s = self.overhead_s + steps * self.base_s + new_tokens / self.tokens_per_s + self.kappa_s * attended
        last = _last_step(new_tokens, self.chunk_tokens)
        last_s = self.base_s + last / self.tokens_per_s + self.kappa_s * last * (cached_tokens + new_tokens - last / 2)
        return total_s + max(0.0, self.floor_s - last_s)


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
    #: A larger batch takes `eager_s` longer; None without such a jump.
    graph_max_batch: int | None = None
    eager_s: float = 0.0


def fit_prefill(
    points: Sequence[PrefillPoint],
    *,
    round_trip_s: float,
    chunk_tokens: int | None = None,
    floor_s: float = 0.0,
    most_base_s: float = inf,
) -> PrefillFit:
    """Return the constants that explain `points` best.

    `round_trip_s` is the time of an empty request; `chunk_tokens` the engine's own report, else the size is fitted.
    `floor_s` is the read of all weights, which bounds a step of few tokens where one step has prefill and decode.
    `most_base_s` bounds the constant part of a step where no prompt had several.
    Raises `CalibrationError` for too few points, and where time does not grow with tokens.
    """
    if len(points) < _LEAST_POINTS:
        raise CalibrationError(f"prefill: {len(points)} measured times; expected at least {_LEAST_POINTS}")
    longest = max(point.new_tokens for point in points)
    sizes = [chunk_tokens] if chunk_tokens else [*(size for size in CHUNKS if size < longest), max(longest, CHUNKS[-1])]
    fits = [_prefill(points, size, round_trip_s, floor_s, separable=size < longest) for size in sizes]
    least = min(error for _, error in fits)
    best = [fit for fit, error in fits if error <= max(_SAME, least / _CHUNK_GAIN)][-1]
    if best is None:
        raise CalibrationError("prefill: the time to a first token does not grow with the prompt")
    excess_s = max(0.0, best.base_s - most_base_s) if best.chunk_tokens >= longest else 0.0
    return replace(best, base_s=best.base_s - excess_s, overhead_s=best.overhead_s + excess_s)


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """Return the constants that explain `points` best. Raises `CalibrationError` for too few points."""
    if len(points) < _LEAST_POINTS:
        raise CalibrationError(f"decode: {len(points)} measured batches; expected at least {_LEAST_POINTS}")
    smooth, error = _fit_experts(points, None)
    if error <= _EXACT:
        return smooth
    jumps = [_fit_experts(points, threshold) for threshold in _thresholds(points)]
    best, least = min(jumps, key=lambda pair: pair[1], default=(smooth, error))
    below = [point.step_s for point in points if point.batch == best.graph_max_batch]
    is_jump = bool(below) and best.eager_s >= _LEAST_JUMP * median(below)
    return best if is_jump and least <= _EAGER_GAIN * error else smooth


def _thresholds(points: Sequence[DecodePoint]) -> list[int]:
    """Return the batches that may be the largest one with a CUDA graph."""
    batches = sorted({point.batch for point in points})
    inner = batches[_BESIDE_JUMP - 1 : -_BESIDE_JUMP]
    return inner[:: ceil(len(inner) / _MOST_THRESHOLDS)] if inner else []


def _fit_experts(points: Sequence[DecodePoint], threshold: int | None) -> tuple[DecodeFit, float]:
    """Return the best fit of all numbers of experts, dense unless experts explain clearly more, and its error."""
    best, least = _decode(points, *EXPERTS[0], threshold)
    for active, experts in EXPERTS[1:]:
        fit, error = _decode(points, active, experts, threshold)
        if error < least * (_MOE_GAIN if best.moe_s == 0 else 1.0):
            best, least = fit, error
    return best, least


def _decode(points: Sequence[DecodePoint], active: int, experts: int, threshold: int | None) -> tuple[DecodeFit, float]:
    touched = [0.0 if experts == 1 else 1 - (1 - active / experts) ** point.batch for point in points]
    columns = [
        [1.0] * len(points),
        touched,
        [float(point.batch) for point in points],
        [float(point.context_tokens) for point in points],
        [float(threshold is not None and point.batch > threshold) for point in points],
    ]
    measured = [point.step_s for point in points]
    constants, error = solve(columns, measured)
    base_s, moe_s, per_request_s, kv_s, eager_s = constants
    predicted = [
        sum(constant * term for constant, term in zip(constants, terms, strict=True))
        for terms in zip(*columns, strict=True)
    ]
    if moe_s == 0:
        active = experts = 1
    errors, graph = _error(predicted, measured), threshold if eager_s > 0 else None
    return DecodeFit(base_s, moe_s, active, experts, per_request_s, kv_s, errors, graph, eager_s), error


def _prefill(
    points: Sequence[PrefillPoint], chunk_tokens: int, round_trip_s: float, floor_s: float, *, separable: bool
) -> tuple[PrefillFit | None, float]:
    """Return the fit for one size of a chunk, None if time does not grow with tokens, and its error."""
    everything, points = points, _above_floor(points, chunk_tokens, floor_s)
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
    none = FitError(0.0, 0.0, len(everything))
    fit = PrefillFit(overhead_s + outside_s, base_s, 1 / per_token_s, kappa_s, chunk_tokens, none, floor_s)
    predicted = [fit.ttft_s(point.new_tokens, point.cached_tokens) for point in everything]
    measured = [point.ttft_s for point in everything]
    if floor_s:
        # Every size of a chunk is judged by all points.
        error = sqrt(fmean((one / other - 1) ** 2 for one, other in zip(predicted, measured, strict=True)))
    return replace(fit, error=_error(predicted, measured)), error


def _above_floor(points: Sequence[PrefillPoint], chunk_tokens: int, floor_s: float) -> Sequence[PrefillPoint]:
    """Return the points without a step as short as the floor; all of them if too few are left."""
    rate = max(point.new_tokens / point.ttft_s for point in points)
    least = _BESIDE_FLOOR * floor_s * rate
    above = [point for point in points if _last_step(point.new_tokens, chunk_tokens) >= least]
    return above if len(above) > _LEAST_POINTS else points


def _last_step(new_tokens: int, chunk_tokens: int) -> int:
    return new_tokens - (ceil(new_tokens / chunk_tokens) - 1) * chunk_tokens


def _error(predicted: Sequence[float], measured: Sequence[float]) -> FitError:
    errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
    return FitError(median(errors), max(errors), len(errors))
