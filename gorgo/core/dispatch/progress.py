"""What replicas prefill and decode, counted for policies that learn; other policies do not pay for it.

Owns four columns: uncached prompt tokens before a first token, requests after it, the sum of the times of their first
tokens, and the learned time per output token. They are NaN while nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import fsum, nan

from gorgo.core.fleet.columns import Columns
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.token_gap import TokenGap

_COUNTED = ("uncached_prefill_tokens", "decoding_requests", "first_tokens_s")
#: Of a sum of times, the rounding of all changes since it was 0.
_DRIFT = 1e-9


class ProgressCounts:
    """The counts of all replicas, from 0.

    Parameters
    ----------
    columns:
        The fleet's.
    replicas:
        All members.
    """

    __slots__ = ("_columns",)

    def __init__(self, columns: Columns, replicas: Iterable[Replica]) -> None:
        self._columns = columns
        self.add_replicas(replicas)

    def add_replicas(self, replicas: Iterable[Replica]) -> None:
        """Count new replicas from 0."""
        for replica in replicas:
            replica.token_gap = TokenGap()
            self._write(replica, 0.0)

    def stop(self, replicas: Iterable[Replica]) -> None:
        """Count no longer; the columns are unknown."""
        for replica in replicas:
            replica.token_gap = None
            self._write(replica, nan)

    def on_dispatched(self, replica: Replica, uncached_tokens: int) -> None:
        if replica.slot >= 0:
            self._columns.uncached_prefill_tokens[replica.slot] += uncached_tokens

    def on_first_token(self, replica: Replica, uncached_tokens: int, *, now: float) -> float:
        """Return the mark of the answer (`core.latency.token_gap`)."""
        gap, slot, columns = replica.token_gap, replica.slot, self._columns
        if slot < 0 or gap is None:
            return 0.0
        mark = gap.begin(now=now)
        columns.uncached_prefill_tokens[slot] -= uncached_tokens
        columns.decoding_requests[slot] = gap.decoding
        columns.first_tokens_s[slot] += now
        return mark

    def on_end(self, replica: Replica, uncached_tokens: int, first_token_s: float | None, *, now: float) -> None:
        gap, slot, columns = replica.token_gap, replica.slot, self._columns
        if slot < 0 or gap is None:
            return
        if first_token_s is None:
            columns.uncached_prefill_tokens[slot] -= uncached_tokens
            return
        gap.end(now=now)
        columns.decoding_requests[slot] = gap.decoding
        # Exactly 0 without one, so that rounding does not add up.
        columns.first_tokens_s[slot] = columns.first_tokens_s.item(slot) - first_token_s if gap.decoding else 0.0

    def check(self, replica: Replica, uncached_tokens: Sequence[int], first_tokens_s: Sequence[float]) -> None:
        """Assert the counts of a replica by its attempts without a first token, and the times of those with one."""
        name, slot, columns = replica.spec.name, replica.slot, self._columns
        assert columns.uncached_prefill_tokens[slot] == sum(uncached_tokens), f"{name}: uncached tokens"
        assert columns.decoding_requests[slot] == len(first_tokens_s), f"{name}: requests after their first token"
        total_s = fsum(first_tokens_s)
        drift_s = abs(columns.first_tokens_s[slot] - total_s)
        assert drift_s <= _DRIFT * max(1.0, total_s), f"{name}: times of first tokens"

    def _write(self, replica: Replica, value: float) -> None:
        if replica.slot >= 0:
            for name in _COUNTED:
                getattr(self._columns, name)[replica.slot] = value
            self._columns.token_gap_s[replica.slot] = nan
