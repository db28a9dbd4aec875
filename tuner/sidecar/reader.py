"""Samples from the proxy, page by page: each once, in order, and what was lost on the way.

Owns the paging. `tuner.objective.SampleCursor` decides which samples are new or missing, by the same numbers, so that a
repeated page or a killed process changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gorgo.errors import TunerError
from tuner.objective import TunerSample
from tuner.proxy_client import SampleBatch

#: At a thousand each, more than a proxy keeps; what is still behind then comes with the next look.
MAX_PAGES = 100


class SampleSource(Protocol):
    """`ProxyClient`, as far as this module uses it."""

    async def samples(self, after: int) -> SampleBatch: ...


@dataclass(frozen=True, slots=True)
class SampleBatchResult:
    """What one run of the proxy had to tell. `lost`: how many samples it no longer held.

    At the first contact with a run nothing is lost: nothing of it has been measured yet.
    `unreadable` is what was wrong with rows that are no samples; they are missing, as lost ones are.
    """

    boot_id: str
    samples: tuple[TunerSample, ...]
    lost: int = 0
    unreadable: tuple[str, ...] = ()


async def read_new(source: SampleSource, boot_id: str | None, after: int) -> list[SampleBatchResult]:
    """Everything after the cursor; more than one delivery where the proxy turns out to be another run.

    Raises what `source` raises; nothing is lost then, because the cursor has not moved.
    """
    pager = _Pager(boot_id, after, resumed=boot_id is not None)
    pagers = [pager]
    for _ in range(MAX_PAGES):
        batch = await source.samples(pager.after)
        if pager.boot_id not in (None, batch.boot_id):  # asked with a cursor of the run before
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
        """Whether there is more to ask for."""
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
