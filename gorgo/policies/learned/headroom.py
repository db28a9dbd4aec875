"""Headroom: the time left to the objectives of a request, and scores by it.

Theory of operation. Headroom is objective minus prediction, for the first token and per output token. Of the replicas
that meet both objectives the one with the least headroom wins: idle ones stay free for requests that need them. Where
none meets both, the one that misses by the least wins. An objective that is not set is 0, so that the least predicted
times win.

References
----------
llm-d-router, `slo-headroom-tier-filter` and the latency scorer with the strategy `least`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gorgo.core.arrays import Floats, Mask, Rows

#: Score of the best; one out of the scored group has 0.
MOST = 101
#: A range of headroom below this is none, s.
_NO_RANGE_S = 1e-9


class Headroom(NamedTuple):
    """Of every candidate, s."""

    ttft_s: Floats
    tpot_s: Floats

    @property
    def is_met(self) -> Mask:
        """Which candidates meet both objectives."""
        met: Mask = (self.ttft_s >= 0.0) & (self.tpot_s >= 0.0)
        return met


class Tier(NamedTuple):
    """Rows of one tier, and whether chance chose the worse one."""

    rows: Rows
    is_explored: bool


def headroom_of(
    ttft_s: Floats, tpot_s: Floats | None, *, slo_ttft_s: float | None, slo_tpot_s: float | None, strictest_s: Floats
) -> Headroom:
    """Return the headroom of each candidate.

    Parameters
    ----------
    ttft_s, tpot_s:
        Predictions. Without one of the time per token that objective counts as met by all, with nothing to spare.
    slo_ttft_s, slo_tpot_s:
        Objectives of the request.
    strictest_s:
        The strictest objective per output token of the requests in flight on each candidate, NaN without one: a new
        request slows theirs.
    """
    first_s = (slo_ttft_s or 0.0) - ttft_s
    if tpot_s is None:
        return Headroom(first_s, np.zeros(len(ttft_s)))
    return Headroom(first_s, np.fmin(slo_tpot_s or 0.0, strictest_s) - tpot_s)


def tier(rows: Rows, headroom: Headroom, *, explores: bool) -> Tier:
    """Return the rows that meet both objectives, all if none or each does; if `explores`, the others."""
    met = headroom.is_met[rows]
    if met.all() or not met.any():
        return Tier(rows, False)
    return Tier(rows[~met if explores else met], explores)


def scores(rows: Rows, headroom: Headroom, in_flight: Floats, *, ttft_share: float) -> NDArray[np.int64]:
    """Return the score of each of `rows`, 1 to 101 in the group that is compared and 0 out of it.

    The group is the rows that meet both objectives; else the idle ones; else the first of these with a row: those that
    miss only the objective per token, those that miss only that of the first token, those that miss both.
    """
    first, token = headroom.ttft_s[rows], headroom.tpot_s[rows]
    group = _group(first < 0.0, token < 0.0, in_flight[rows] == 0.0)
    distance = _distance(np.abs(first[group]), np.abs(token[group]), ttft_share)
    found = np.zeros(len(rows), dtype=np.int64)
    found[group] = ((1.0 - distance) * (MOST - 1) + 1e-9).astype(np.int64) + 1
    return found


def _group(late: Mask, slow: Mask, idle: Mask) -> Rows:
    groups = [~late & ~slow, idle, ~late & slow, late & ~slow, late & slow]
    return next(np.flatnonzero(group) for group in groups if group.any())


def _distance(first: Floats, token: Floats, ttft_share: float) -> Floats:
    """Return the weighted mean of both headrooms, each as 0 (least of the group) to 1 (most)."""
    first_range, token_range = np.ptp(first), np.ptp(token)
    if first_range <= _NO_RANGE_S and token_range <= _NO_RANGE_S:
        return np.full(len(first), 0.5)
    # A headroom that is the same everywhere leaves its weight to the other.
    share = 0.0 if first_range <= _NO_RANGE_S else 1.0 if token_range <= _NO_RANGE_S else ttft_share
    total = np.zeros(len(first))
    if share > 0.0:
        total += share * (first - first.min()) / first_range
    if share < 1.0:
        total += (1.0 - share) * (token - token.min()) / token_range
    return total
