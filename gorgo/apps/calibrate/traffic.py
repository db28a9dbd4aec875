"""Points of prefill and decode from the traffic of one replica, as the request log has it.

Owns the choice of requests. Requests in a log influence each other, and a point must be of the engine alone:

- prefill: a request that no other prefill overlapped, in one attempt, with a report of cached tokens;
- decode: the time from the first to the last token by the number of output tokens, without the time in which other
  prompts were computed (an SGLang engine stalls all that decode meanwhile), by the mean batch and its mean context.

Points of similar size are merged into their median: a log has thousands, with the noise of the network in each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import TypeVar

from gorgo.apps.calibrate.fit import DecodePoint, PrefillPoint
from gorgo.apps.request_log_lines import LoggedRequest

#: Bins per doubling of a number of tokens.
BINS = 4
#: A median of fewer is the noise of one request.
LEAST_PER_BIN = 3
#: Shorter answers have too few gaps.
LEAST_OUTPUT = 16
#: Of the time between first and last token that may be other requests' prefill.
MOST_STALLED = 0.5

PointT = TypeVar("PointT", PrefillPoint, DecodePoint)


@dataclass(frozen=True, slots=True)
class _Served:
    """One completed request on the time axis of its replica, s."""

    dispatched_s: float
    first_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int


def traffic_points(requests: Iterable[LoggedRequest], replica: str) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """Return the points of one replica; none if the log has no times."""
    served = sorted(filter(None, (_served(row) for row in requests if row.replica == replica)), key=_dispatched)
    prefills, decodes = [], []
    for place, one in enumerate(served):
        others = _overlapping(served, place)
        if one.cached_tokens is not None and not any(_overlap_s(one, other, _prefill, _prefill) for other in others):
            new = max(1, one.prompt_tokens - one.cached_tokens)
            prefills.append(PrefillPoint(new, one.cached_tokens, one.first_s - one.dispatched_s))
        point = _decode_point(one, others)
        if point is not None:
            decodes.append(point)
    return _merged(prefills, _prefill_bin, _merge_prefill), _merged(decodes, _decode_bin, _merge_decode)


def _served(row: LoggedRequest) -> _Served | None:
    if row.status != 200 or row.attempts != 1 or row.ttft_s is None or row.e2e_s is None or not row.output_tokens:
        return None
    dispatched_s = row.received_s + (row.queued_s or 0.0)
    first_s, ended_s = row.received_s + row.ttft_s, row.received_s + row.e2e_s
    if not dispatched_s < first_s <= ended_s:
        return None
    return _Served(dispatched_s, first_s, ended_s, row.input_tokens, row.cached_tokens, row.output_tokens)


def _dispatched(one: _Served) -> float:
    return one.dispatched_s


def _prefill(one: _Served) -> tuple[float, float]:
    return one.dispatched_s, one.first_s


def _decode(one: _Served) -> tuple[float, float]:
    return one.first_s, one.ended_s


def _overlapping(served: Sequence[_Served], place: int) -> list[_Served]:
    """Return the others whose time overlaps; `served` is in order of dispatch."""
    one = served[place]
    after = place + 1
    while after < len(served) and served[after].dispatched_s < one.ended_s:
        after += 1
    # At most as many before as a batch: who was dispatched earlier and still runs.
    before = [other for other in served[max(0, place - 512) : place] if other.ended_s > one.dispatched_s]
    return [*before, *served[place + 1 : after]]


def _overlap_s(
    one: _Served,
    other: _Served,
    span: Callable[[_Served], tuple[float, float]],
    other_span: Callable[[_Served], tuple[float, float]],
) -> float:
    (start, end), (other_start, other_end) = span(one), other_span(other)
    return max(0.0, min(end, other_end) - max(start, other_start))


def _decode_point(one: _Served, others: Sequence[_Served]) -> DecodePoint | None:
    span_s = one.ended_s - one.first_s
    if one.output_tokens < LEAST_OUTPUT or span_s <= 0:
        return None
    stalled_s = sum(_overlap_s(one, other, _decode, _prefill) for other in others)
    if stalled_s > MOST_STALLED * span_s:
        return None
    batch, context = 1.0, one.prompt_tokens + one.output_tokens / 2
    for other in others:
        share = _overlap_s(one, other, _decode, _decode) / span_s
        batch += share
        context += share * (other.prompt_tokens + other.output_tokens / 2)
    return DecodePoint(round(batch), round(context), (span_s - stalled_s) / (one.output_tokens - 1))


def _prefill_bin(point: PrefillPoint) -> Hashable:
    return round(BINS * log2(point.new_tokens)), round(BINS / 2 * log2(point.cached_tokens + 1024))


def _decode_bin(point: DecodePoint) -> Hashable:
    return point.batch, round(BINS / 2 * log2(max(1, point.context_tokens)))


def _merge_prefill(points: Sequence[PrefillPoint]) -> PrefillPoint:
    return PrefillPoint(
        round(median(point.new_tokens for point in points)),
        round(median(point.cached_tokens for point in points)),
        median(point.ttft_s for point in points),
    )


def _merge_decode(points: Sequence[DecodePoint]) -> DecodePoint:
    return DecodePoint(
        points[0].batch,
        round(median(point.context_tokens for point in points)),
        median(point.step_s for point in points),
    )


def _merged(
    points: Iterable[PointT], bin_of: Callable[[PointT], Hashable], merge: Callable[[Sequence[PointT]], PointT]
) -> list[PointT]:
    bins: dict[Hashable, list[PointT]] = defaultdict(list)
    for point in points:
        bins[bin_of(point)].append(point)
    return [merge(found) for found in bins.values() if len(found) >= LEAST_PER_BIN]
