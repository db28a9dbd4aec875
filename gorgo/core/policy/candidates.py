"""The table that a policy sees: numpy columns over the eligible replicas, one row each.

Theory of operation: the fleet state keeps its columns for ever and updates cells in place. `Candidates` holds a
reference to them and the slots that passed the filter. When every replica is eligible a column is the fleet's array
itself; otherwise it is gathered once, on first use. A policy reads and never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns, Floats


@dataclass(slots=True)
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
    _gathered: dict[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def _gather(self, name: str) -> Floats:
        found = self._gathered.get(name)
        if found is None:
            column: Floats = getattr(self.columns, name)
            found = self._gathered[name] = column[self.slots]
        return found

    @property
    def rtt_s(self) -> Floats:
        return self.columns.rtt_s if self.is_all else self._gather("rtt_s")

    @property
    def in_flight_requests(self) -> Floats:
        return self.columns.in_flight_requests if self.is_all else self._gather("in_flight_requests")

    @property
    def in_flight_tokens(self) -> Floats:
        return self.columns.in_flight_tokens if self.is_all else self._gather("in_flight_tokens")

    @property
    def queued_prefill_tokens(self) -> Floats:
        return self.columns.queued_prefill_tokens if self.is_all else self._gather("queued_prefill_tokens")

    @property
    def running_requests(self) -> Floats:
        return self.columns.running_requests if self.is_all else self._gather("running_requests")

    @property
    def queued_requests(self) -> Floats:
        return self.columns.queued_requests if self.is_all else self._gather("queued_requests")

    @property
    def used_tokens(self) -> Floats:
        return self.columns.used_tokens if self.is_all else self._gather("used_tokens")

    @property
    def kv_capacity_tokens(self) -> Floats:
        return self.columns.kv_capacity_tokens if self.is_all else self._gather("kv_capacity_tokens")

    @property
    def max_running_requests(self) -> Floats:
        return self.columns.max_running_requests if self.is_all else self._gather("max_running_requests")

    @property
    def drained_at_s(self) -> Floats:
        return self.columns.drained_at_s if self.is_all else self._gather("drained_at_s")

    @property
    def head_due_s(self) -> Floats:
        return self.columns.head_due_s if self.is_all else self._gather("head_due_s")

    @property
    def waiting_prefill_s(self) -> Floats:
        return self.columns.waiting_prefill_s if self.is_all else self._gather("waiting_prefill_s")

    @property
    def slowdown(self) -> Floats:
        return self.columns.slowdown if self.is_all else self._gather("slowdown")

    @property
    def prefill_base_s(self) -> Floats:
        return self.columns.prefill_base_s if self.is_all else self._gather("prefill_base_s")

    @property
    def prefill_token_s(self) -> Floats:
        return self.columns.prefill_token_s if self.is_all else self._gather("prefill_token_s")

    @property
    def prefill_kappa_s(self) -> Floats:
        return self.columns.prefill_kappa_s if self.is_all else self._gather("prefill_kappa_s")

    @property
    def cwnd_bytes(self) -> Floats:
        return self.columns.cwnd_bytes if self.is_all else self._gather("cwnd_bytes")

    @property
    def rwnd_bytes(self) -> Floats:
        return self.columns.rwnd_bytes if self.is_all else self._gather("rwnd_bytes")

    @property
    def sent_s(self) -> Floats:
        return self.columns.sent_s if self.is_all else self._gather("sent_s")

    @property
    def connect_round_trips(self) -> Floats:
        return self.columns.connect_round_trips if self.is_all else self._gather("connect_round_trips")

    @property
    def pace_bytes(self) -> Floats:
        return self.columns.pace_bytes if self.is_all else self._gather("pace_bytes")

    @property
    def burst_bytes(self) -> Floats:
        return self.columns.burst_bytes if self.is_all else self._gather("burst_bytes")

    @property
    def salt(self) -> NDArray[np.uint64]:
        return self.columns.salt if self.is_all else self.columns.salt[self.slots]

    @property
    def cached_tokens(self) -> Floats:
        """Estimated cached prompt tokens of this request, per row."""
        if self.is_all:
            return self.matched_tokens
        found = self._gathered.get("cached_tokens")
        if found is None:
            found = self._gathered["cached_tokens"] = self.matched_tokens[self.slots]
        return found

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens of this request to prefill, per row (U_i, docs/policies/gorgo.md)."""
        return self.prompt_tokens - self.cached_tokens
