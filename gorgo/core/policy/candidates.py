"""The table that a policy sees: numpy columns over the eligible replicas, one row each.

Theory of operation: the fleet state keeps its columns for ever and updates cells in place. `Candidates` holds a
reference to them and the slots that passed the filter. When every replica is eligible a column is the fleet's array
itself; otherwise it is gathered once, on first use. A policy reads and never writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from gorgo.core.fleet.columns import Columns, Floats


class _Column:
    """A column of the fleet over the eligible rows, gathered once where some replica is not eligible."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._read = attrgetter(name)

    @overload
    def __get__(self, candidates: None, owner: type) -> Self: ...

    @overload
    def __get__(self, candidates: Candidates, owner: type) -> Floats: ...

    def __get__(self, candidates: Candidates | None, owner: type) -> Self | Floats:
        if candidates is None:
            return self
        if candidates.is_all:
            column: Floats = self._read(candidates.columns)
            return column
        found = candidates._gathered.get(self._name)
        if found is None:
            found = candidates._gathered[self._name] = self._read(candidates.columns)[candidates.slots]
        return found


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

    rtt_s = _Column()
    in_flight_requests = _Column()
    in_flight_tokens = _Column()
    queued_prefill_tokens = _Column()
    running_requests = _Column()
    queued_requests = _Column()
    used_tokens = _Column()
    kv_capacity_tokens = _Column()
    max_running_requests = _Column()
    drained_at_s = _Column()
    head_due_s = _Column()
    waiting_prefill_s = _Column()
    slowdown = _Column()
    prefill_base_s = _Column()
    prefill_token_s = _Column()
    prefill_kappa_s = _Column()
    cwnd_bytes = _Column()
    rwnd_bytes = _Column()
    sent_s = _Column()
    connect_round_trips = _Column()
    pace_bytes = _Column()
    burst_bytes = _Column()

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
