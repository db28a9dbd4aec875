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

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Columns:
    """Kept columns, one cell per slot. Unknown (or stale) is NaN; counts made by this proxy are never unknown."""

    #: EWMA of the probe round trip, s. NaN before the first probe.
    rtt_s: Floats
    #: Requests dispatched by this proxy and not ended.
    in_flight_requests: Floats
    #: Prompt tokens of those requests (Q_i, DESIGN 3.1).
    in_flight_tokens: Floats
    #: Prompt tokens of those that still wait for their first token.
    queued_prefill_tokens: Floats
    #: Scraped from the engine: requests running, requests waiting, KV tokens in use. NaN when unknown or stale.
    running_requests: Floats
    queued_requests: Floats
    used_tokens: Floats
    #: Size of the KV pool and of the running batch, from the engine or regions.yaml. NaN when unknown.
    kv_capacity_tokens: Floats
    max_running_requests: Floats
    #: A fixed 64-bit hash of the replica's name, for rendezvous hashing.
    salt: NDArray[np.uint64]


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
    """

    slots: NDArray[np.intp]
    names: Sequence[str]
    columns: Columns
    matched_tokens: Floats
    prompt_tokens: int
    whole: bool
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
