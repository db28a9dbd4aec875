"""What is sent in one run, and what of it was served well.

Owns the cut: every load is offered for the same time, so that figures per second compare; a load that is three times as
high has three times as many requests of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.results import E2E_S, TTFT_MS
from gorgo.lab.sim.records import SimRecord
from gorgo.lab.traces import TraceRequest, scheduled_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A load.

    Parameters
    ----------
    load:
        Multiple of capacity.
    time_scale:
        Of the trace's time stamps.
    requests:
        Those whose time comes within the run.
    lasts_s:
        How long requests are sent.
    """

    load: float
    time_scale: float
    requests: Sequence[TraceRequest]
    lasts_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of an offer; shares are of all requests offered.

    Parameters
    ----------
    good, per_s:
        With the first token within 2 s and the last within 10 s: their share, and how many per second of the offer.
    rejected:
        Turned away, or failed.
    ttft_ms_p95:
        Of those that got a first token; None without any.
    """

    offered: int
    good: float
    per_s: float
    rejected: float
    ttft_ms_p95: float | None


def cut(requests: Sequence[TraceRequest], *, load: float, capacity: float, lasts_s: float) -> Offer:
    """The first `lasts_s` seconds of a trace at `load` times the load of time scale `capacity`.

    Example
    -------
    >>> trace = [TraceRequest(number, float(number), 1, 1) for number in range(100)]
    >>> offer = cut(trace, load=2.0, capacity=1.0, lasts_s=10.0)
    >>> offer.time_scale, len(offer.requests)
    (0.5, 20)
    """
    time_scale = capacity / load
    kept = [request for request in requests if scheduled_s(request, time_scale) < lasts_s]
    return Offer(load=load, time_scale=time_scale, requests=kept, lasts_s=lasts_s)


def covers(requests: Sequence[TraceRequest], offer: Offer) -> bool:
    """Whether the trace is long enough for `offer`."""
    return len(offer.requests) < len(requests)


def is_good(record: ReplayRecord | SimRecord) -> bool:
    """Whether it was served well."""
    if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
        return False
    return record.ttft_ms <= TTFT_MS and record.e2e_s <= E2E_S


def served(records: Iterable[ReplayRecord | SimRecord], *, offered: int, lasts_s: float) -> Served:
    """`records` are those that ended in time to be looked at; who is missing was not served well."""
    seen = list(records)
    good = sum(map(is_good, seen))
    ttfts = sorted(record.ttft_ms for record in seen if record.ttft_ms is not None)
    return Served(
        offered=offered,
        good=good / offered,
        per_s=good / lasts_s,
        rejected=sum(record.error is not None for record in seen) / offered,
        ttft_ms_p95=ttfts[min(len(ttfts) - 1, int(0.95 * len(ttfts)))] if ttfts else None,
    )
