"""The table that a policy sees: numpy columns over the eligible replicas, one row each.

Theory of operation: the fleet state keeps its columns for ever and updates cells in place. `Candidates` holds a
reference to them and the slots that passed the filter. When every replica is eligible a column is the fleet's array
itself; otherwise it is gathered once, on first use. A policy reads and never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from operator import attrgetter
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns
from gorgo.core.latency.decode import SHARE
from gorgo.core.numeric import Floats
from gorgo.core.record import mutable_record

#: Shortest time per output token, s: less than any engine's.
LEAST_GAP_S = 1e-6


class _EligibleColumns:
    """The fleet's columns over the eligible rows alone, each gathered on first use."""

    def __init__(self, columns: Columns, slots: NDArray[np.intp]) -> None:
        self._columns, self._slots = columns, slots

    def __getattr__(self, name: str) -> Floats:
        column: Floats = getattr(self._columns, name)[self._slots]
        setattr(self, name, column)
        return column


def _column(name: str) -> Floats:
    """Return a property that reads a column of the eligible rows."""
    return cast(Floats, property(attrgetter(f"table.{name}")))


@mutable_record
class Candidates:
    """Eligible replicas as columns.

    Parameters
    ----------
    slots:
        Slot of each row, ascending.
    names:
        Name of each row.
    columns:
        The fleet's columns.
    matched_tokens:
        Per slot: prompt tokens of this request that are cached there by the prefix index.
    prompt_tokens:
        Prompt length of this request.
    is_all:
        True when the rows are all slots in order, so that columns need no gathering.
    now:
        When the decision is made, for columns that hold times.
    """

    slots: NDArray[np.intp]
    names: Sequence[str]
    columns: Columns
    matched_tokens: Floats
    prompt_tokens: int
    is_all: bool
    now: float = 0.0
    #: The columns of the rows.
    table: Columns = field(init=False)
    _cached: Floats | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.table = self.columns if self.is_all else cast(Columns, _EligibleColumns(self.columns, self.slots))

    def __len__(self) -> int:
        return len(self.slots)

    rtt_s = _column("rtt_s")
    in_flight_requests = _column("in_flight_requests")
    in_flight_tokens = _column("in_flight_tokens")
    queued_prefill_tokens = _column("queued_prefill_tokens")
    uncached_prefill_tokens = _column("uncached_prefill_tokens")
    decoding_requests = _column("decoding_requests")
    first_tokens_s = _column("first_tokens_s")
    token_gap_s = _column("token_gap_s")
    answer_tokens = _column("answer_tokens")
    running_requests = _column("running_requests")
    queued_requests = _column("queued_requests")
    used_tokens = _column("used_tokens")
    sampled_s = _column("sampled_s")
    kv_capacity_tokens = _column("kv_capacity_tokens")
    max_running_requests = _column("max_running_requests")
    drained_at_s = _column("drained_at_s")
    head_due_s = _column("head_due_s")
    waiting_prefill_s = _column("waiting_prefill_s")
    shared_s = _column("shared_s")
    head_shared_s = _column("head_shared_s")
    head_began_s = _column("head_began_s")
    prefill_share = _column("prefill_share")
    prefill_share_s = _column("prefill_share_s")
    slowdown = _column("slowdown")
    prefill_base_s = _column("prefill_base_s")
    prefill_token_s = _column("prefill_token_s")
    prefill_kappa_s = _column("prefill_kappa_s")
    cwnd_bytes = _column("cwnd_bytes")
    rwnd_bytes = _column("rwnd_bytes")
    sent_s = _column("sent_s")
    connect_round_trips = _column("connect_round_trips")
    pace_bytes = _column("pace_bytes")
    burst_bytes = _column("burst_bytes")
    slo_tpot_s = _column("slo_tpot_s")
    accelerator = _column("accelerator")

    @property
    def salt(self) -> NDArray[np.uint64]:
        return self.columns.salt if self.is_all else self.columns.salt[self.slots]

    @property
    def cached_tokens(self) -> Floats:
        """Estimated cached prompt tokens of this request, per row."""
        if self.is_all:
            return self.matched_tokens
        if self._cached is None:
            self._cached = self.matched_tokens[self.slots]
        return self._cached

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens of this request to prefill, per row (U_i, docs/policies/gorgo.md)."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def prefilling_requests(self) -> Floats:
        """Requests in flight before their first token, per row."""
        return self.in_flight_requests - self.decoding_requests

    @property
    def decode_tokens(self) -> Floats:
        """Estimated output tokens of the requests that decode, per row; NaN where the gap is unknown and some do.

        Each request has its first token and one more per learned gap since, which is longer the more decode.
        """
        decoding = self.decoding_requests
        since_s = np.maximum(decoding * self.now - self.first_tokens_s, 0.0)
        gap_s = np.maximum(self.token_gap_s, LEAST_GAP_S) * (1.0 + SHARE * decoding)
        return np.where(decoding == 0.0, 0.0, decoding + since_s / gap_s)

    @property
    def kv_usage(self) -> Floats:
        """Share of the KV pool in use, per row; NaN where unknown."""
        return self.used_tokens / np.maximum(self.kv_capacity_tokens, 1.0)

    @property
    def scrape_age_s(self) -> Floats:
        """Age of the scraped columns, per row; NaN where unknown."""
        return self.now - self.sampled_s
