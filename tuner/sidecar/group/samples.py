"""Samples of several proxies as one sequence: each once, by the tuner's clock, under the group's number.

Owns the cursors, by boot id and number of each proxy. Clocks of hosts differ by seconds: every proxy says its own time
with its samples, and arrivals are converted by the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gorgo.errors import ProxyRefused
from tuner.objective import TunerSample
from tuner.proxy_client import SampleBatch
from tuner.sidecar.group.agreement import Agreement
from tuner.sidecar.reader import SampleBatchResult, SampleSource


@dataclass(frozen=True, slots=True)
class MemberSamples:
    """New samples of one proxy, and what its clock lacks to the tuner's, s."""

    results: list[SampleBatchResult]
    behind_s: float


class DatedSource(SampleSource):
    """Reads samples of one proxy and compares the clocks.

    Parameters
    ----------
    url, source:
        The proxy.
    clock:
        The tuner's, s.
    """

    def __init__(self, url: str, source: SampleSource, clock: Callable[[], float]) -> None:
        self._url, self._source, self._now = url, source, clock
        self.behind_s = 0.0

    async def samples(self, after: int) -> SampleBatch:
        began_s = self._now()
        batch = await self._source.samples(after)
        if batch.now_s is None:
            raise ProxyRefused(f"{self._url}/admin/samples: no now_s in the answer; a group needs newer proxies")
        self.behind_s = (began_s + self._now()) / 2 - batch.now_s  # half of the round trip is its error
        return batch


class MergedSamples:
    """The cursors of a group, and the numbers of its merged samples."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._cursors: dict[str, tuple[str | None, int]] = dict.fromkeys(agreement.names, (None, 0))
        self._last_seq = 0

    def cursor(self, name: str) -> tuple[str | None, int]:
        """Return boot id and last number of a proxy."""
        return self._cursors[name]

    def merge_new(self, found: Mapping[str, MemberSamples]) -> SampleBatchResult:
        """Return the new samples of all proxies, in the order in which they ended.

        Raises `ProxyRefused` if two addresses are one proxy: each of its samples would count twice.
        """
        boots = {name: self._boot(name, one) for name, one in found.items()}
        self._refuse_one_proxy_twice(boots)
        for name, boot in boots.items():
            if self._cursors[name][0] not in (None, boot):
                self._agreement.changed(name, None)
                self._agreement.begin_epoch(f"{name} has restarted")
        samples: list[TunerSample] = []
        lost, unreadable = 0, list[str]()
        for name, one in found.items():
            for result in one.results:
                lost += result.lost
                unreadable += [f"{name}: {message}" for message in result.unreadable]
            samples += self._new(name, one)
        samples.sort(key=lambda sample: sample.arrived_s + sample.e2e_s)
        self._last_seq += lost + len(unreadable)  # the campaign finds the gap
        numbered = []
        for sample in samples:
            self._last_seq += 1
            numbered.append(replace(sample, seq=self._last_seq))
        boot_id = f"group {self._agreement.epoch}"
        return SampleBatchResult(boot_id, tuple(numbered), lost, tuple(unreadable), self._agreement.reason)

    def _boot(self, name: str, one: MemberSamples) -> str | None:
        return one.results[-1].boot_id if one.results else self._cursors[name][0]

    def _refuse_one_proxy_twice(self, boots: Mapping[str, str | None]) -> None:
        names = dict[str | None, str]()
        for name, boot in boots.items():
            if boot is not None and (other := names.setdefault(boot, name)) != name:
                raise ProxyRefused(f"{other} and {name} are one proxy; expected the admin address of each, once")

    def _new(self, name: str, one: MemberSamples) -> list[TunerSample]:
        """Return the samples of weights that the group agreed on, and advance the cursor past all."""
        counted = []
        for result in one.results:
            boot, last = self._cursors[name]
            last = last if boot == result.boot_id else 0
            for sample in result.samples:
                if sample.seq <= last:
                    continue
                last = sample.seq
                number = self._agreement.number_of(name, sample.weights_version)
                if number is not None:
                    arrived_s = sample.arrived_s + one.behind_s
                    counted.append(replace(sample, weights_version=number, arrived_s=arrived_s))
            self._cursors[name] = (result.boot_id, last)
        return counted
