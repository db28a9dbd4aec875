"""Samples from the proxy, page by page: each once, in order, with the number of lost ones.

`tuner.objective.SampleCursor` decides by the same numbers which samples are new, so a repeated page changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gorgo.errors import TunerError
from tuner.objective import TunerSample
from tuner.proxy_client import SampleBatch

#: At a thousand samples each, more than a proxy stores; the rest comes with the next poll.
MAX_PAGES = 100


class SampleSource(Protocol):
    """The part of `ProxyClient` that this module uses."""

    async def samples(self, after: int) -> SampleBatch: ...


@dataclass(frozen=True, slots=True)
class SampleBatchResult:
    """New samples of one run of the proxy; `lost` counts those that it no longer had.

    At the first contact with a run nothing is lost: nothing of it has been measured yet. `unreadable` has the errors of
    invalid rows, which count as missing too. `reason` is why another `boot_id` begins, other than a restart.
    """

    boot_id: str
    samples: tuple[TunerSample, ...]
    lost: int = 0
    unreadable: tuple[str, ...] = ()
    reason: str = ""


async def read_new(source: SampleSource, boot_id: str | None, after: int) -> list[SampleBatchResult]:
    """Return all samples after the cursor; two results if the proxy has restarted.

    Raises what `source` raises; the cursor has not moved then, so nothing is lost.
    """
    pager = _Pager(boot_id, after, resumed=boot_id is not None)
    pagers = [pager]
    for _ in range(MAX_PAGES):
        batch = await source.samples(pager.after)
        if pager.boot_id not in (None, batch.boot_id):  # the cursor was of an earlier run
            pager = _Pager(batch.boot_id, 0, resumed=False)
            pagers.append(pager)
        elif not pager.add(batch):
            break
    return [one.delivery() for one in pagers if one.boot_id is not None]


class _Pager:
    """The pages of one run."""

    def __init__(self, boot_id: str | None, after: int, *, resumed: bool) -> None:
        self.boot_id, self.after, self._resumed = boot_id, after, resumed
        self._samples: list[TunerSample] = []
        self._unreadable: list[str] = []
        self._lost = 0

    def add(self, batch: SampleBatch) -> bool:
        """Add a page; return whether there are more."""
        self.boot_id = batch.boot_id
        before = self.after
        for row in batch.samples:
            seq = int(row["seq"])
            if seq <= self.after:
                continue
            if self._resumed:
                self._lost += seq - self.after - 1
            self.after = seq
            try:
                self._samples.append(TunerSample.from_json(row))
            except TunerError as error:
                self._unreadable.append(str(error))
        return before < self.after < batch.last_seq

    def delivery(self) -> SampleBatchResult:
        assert self.boot_id is not None, "a run has answered"
        return SampleBatchResult(self.boot_id, tuple(self._samples), self._lost, tuple(self._unreadable))
