"""The table that a policy sees: numpy columns over the eligible replicas, one row each.

Theory of operation: the fleet state keeps its columns for ever and updates cells in place. `Candidates` holds a
reference to them and the slots that passed the filter. When every replica is eligible a column is the kept array
itself; otherwise it is gathered once, on first use. A policy reads and never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gorgo.core.columns import Columns, Floats


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
        The fleet's kept columns.
    matched_tokens:
        Per slot: prompt tokens of this request that the prefix index believes cached there.
    prompt_tokens:
        Prompt length of this request.
    whole:
        True when the rows are all slots in order, so that columns need no gathering.
    now:
        When the decision is made, for columns that hold times.
    """

    slots: NDArray[np.intp]
    names: Sequence[str]
    columns: Columns
    matched_tokens: Floats
    prompt_tokens: int
    whole: bool
    now: float = 0.0
    _gathered: dict[str, Floats] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.slots)

    def _column(self, name: str) -> Floats:
        kept: Floats = getattr(self.columns, name)
        if self.whole:
            return kept
        if name not in self._gathered:
            self._gathered[name] = kept[self.slots]
        return self._gathered[name]

    @property
    def rtt_s(self) -> Floats:
        return self._column("rtt_s")

    @property
    def in_flight_requests(self) -> Floats:
        return self._column("in_flight_requests")

    @property
    def in_flight_tokens(self) -> Floats:
        return self._column("in_flight_tokens")

    @property
    def queued_prefill_tokens(self) -> Floats:
        return self._column("queued_prefill_tokens")

    @property
    def running_requests(self) -> Floats:
        return self._column("running_requests")

    @property
    def queued_requests(self) -> Floats:
        return self._column("queued_requests")

    @property
    def used_tokens(self) -> Floats:
        return self._column("used_tokens")

    @property
    def kv_capacity_tokens(self) -> Floats:
        return self._column("kv_capacity_tokens")

    @property
    def max_running_requests(self) -> Floats:
        return self._column("max_running_requests")

    @property
    def free_at_s(self) -> Floats:
        return self._column("free_at_s")

    @property
    def due_s(self) -> Floats:
        return self._column("due_s")

    @property
    def waiting_prefill_s(self) -> Floats:
        return self._column("waiting_prefill_s")

    @property
    def slowdown(self) -> Floats:
        return self._column("slowdown")

    @property
    def prefill_base_s(self) -> Floats:
        return self._column("prefill_base_s")

    @property
    def prefill_token_s(self) -> Floats:
        return self._column("prefill_token_s")

    @property
    def prefill_kappa_s(self) -> Floats:
        return self._column("prefill_kappa_s")

    @property
    def congestion_bytes(self) -> Floats:
        return self._column("congestion_bytes")

    @property
    def receive_bytes(self) -> Floats:
        return self._column("receive_bytes")

    @property
    def sent_s(self) -> Floats:
        return self._column("sent_s")

    @property
    def connect_trips(self) -> Floats:
        return self._column("connect_trips")

    @property
    def salt(self) -> NDArray[np.uint64]:
        return self.columns.salt if self.whole else self.columns.salt[self.slots]

    @property
    def cached_tokens(self) -> Floats:
        """Prompt tokens of this request believed cached, per row."""
        return self.matched_tokens if self.whole else self.matched_tokens[self.slots]

    @property
    def uncached_tokens(self) -> Floats:
        """Prompt tokens of this request to prefill, per row (U_i, DESIGN 3.1)."""
        return self.prompt_tokens - self.cached_tokens
