"""Windows of finished requests and their statistics: the measure of a weight set.

Theory of operation: a sample counts for the weights under which it was *routed*, whenever it finished. The objective is
p95 TTFT; a request without a first token has none, and counts as an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gorgo.errors import TunerError
from tuner.saved_fields import SavedFields

#: The paper's window: samples scored for one candidate, and how many more until it is scored again.
WINDOW = 128
HOP = 32
#: HTTP statuses that count against the fleet; 499 only before any content.
OVERLOADED = 429
CLIENT_DISCONNECTED = 499
SERVER_ERROR = 500


@dataclass(frozen=True, slots=True)
class TunerSample:
    """One finished request; `None` is unknown.

    `arrived_s` is by the proxy's clock: only differences mean anything. TTFT and ITL are in milliseconds, as the proxy
    has them.
    """

    seq: int
    arrived_s: float
    replica: str
    weights_version: int
    ttft_ms: float | None
    e2e_s: float
    itl_ms_p95: float | None
    status: int

    @classmethod
    def from_json(cls, sample: Mapping[str, Any]) -> TunerSample:
        """Return a row of `GET /admin/samples`; raises `TunerError` that names the wrong value."""
        try:
            return cls(
                seq=int(sample["seq"]),
                arrived_s=float(sample["finished_s"]) - float(sample["e2e_s"]),
                replica=str(sample["replica"]),
                weights_version=int(sample["weights_version"]),
                ttft_ms=_known(sample["ttft_ms"]),
                e2e_s=float(sample["e2e_s"]),
                itl_ms_p95=_known(sample["itl_ms_p95"]),
                status=int(sample["status"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise TunerError(
                f"sample {sample.get('seq')!r}: {error!r}; is this a gorgo proxy of the same version?"
            ) from None

    @property
    def failed(self) -> bool:
        """Whether the fleet failed the request: a server error, a rejection for load, or a client that gave up."""
        return (
            self.status >= SERVER_ERROR
            or self.status == OVERLOADED
            or (self.status == CLIENT_DISCONNECTED and not self.ttft_ms)
        )


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Statistics of a window; None without a sample.

    `errors` are failed requests, `max_share` the largest share of one replica in all of them.
    """

    n: int
    ttft_ms_p95: float | None
    e2e_s_p95: float | None
    itl_ms_p95: float | None
    errors: int
    max_share: float | None

    @classmethod
    def of(cls, saved: SavedFields) -> WindowStats:
        """Return saved statistics; raise `TunerError` for a wrong one."""
        times = {name: saved.optional(name, least=0) for name in ("ttft_ms_p95", "e2e_s_p95", "itl_ms_p95")}
        n = saved.count("n")
        return cls(
            n=n, errors=saved.count("errors", most=n), max_share=saved.optional("max_share", least=0, most=1), **times
        )

    @property
    def error_share(self) -> float:
        return self.errors / self.n if self.n else 0.0


def window_stats(samples: Iterable[TunerSample]) -> WindowStats:
    """Return the statistics of a window.

    Quantiles are numpy's default, linear between the two nearest ranks: at p95 of 128, the 121st and 122nd. E2E and ITL
    are over requests that did not fail; ITL is the p95 over requests of each one's own p95.
    """
    window = list(samples)
    served = [sample for sample in window if not sample.failed]
    replicas = Counter(sample.replica for sample in window)
    return WindowStats(
        n=len(window),
        ttft_ms_p95=p95(sample.ttft_ms for sample in window),
        e2e_s_p95=p95(sample.e2e_s for sample in served),
        itl_ms_p95=p95(sample.itl_ms_p95 for sample in served),
        errors=len(window) - len(served),
        max_share=max(replicas.values()) / len(window) if window else None,
    )


class RollingWindow:
    """The newest samples, scored at every hop once it is full.

    Example
    -------
    >>> window = RollingWindow(size=4, hop=2)
    >>> sample = TunerSample(1, 0.0, "a", 1, 250.0, 1.0, None, 200)
    >>> [window.add(sample) for _ in range(8)]
    [False, False, False, True, False, True, False, True]
    >>> window.stats().ttft_ms_p95
    250.0
    """

    def __init__(self, size: int = WINDOW, hop: int = HOP) -> None:
        self.size, self.hop = size, hop
        self._samples: deque[TunerSample] = deque(maxlen=size)
        self._until_hop = size

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def full(self) -> bool:
        return len(self._samples) == self.size

    def add(self, sample: TunerSample) -> bool:
        """Add a sample; return whether it completes a hop of a full window."""
        self._samples.append(sample)
        self._until_hop -= 1
        if self._until_hop > 0:
            return False
        self._until_hop = self.hop
        return True

    def stats(self) -> WindowStats:
        return window_stats(self._samples)

    def clear(self) -> None:
        self._samples.clear()
        self._until_hop = self.size

    def share_slower_than(self, ttft_ms: float) -> float:
        """Return the share of requests without a first token by then; 0 for an empty window."""
        slow = sum(1 for sample in self._samples if sample.ttft_ms is None or sample.ttft_ms > ttft_ms)
        return slow / len(self._samples) if self._samples else 0.0


@dataclass(frozen=True, slots=True)
class NewSamples:
    """New samples of a batch; after `restarted` or `gap` earlier samples do not count together with them."""

    samples: tuple[TunerSample, ...]
    restarted: bool
    gap: bool


class SampleCursor:
    """Takes each sample once, by the proxy's boot id and the sample's number, and detects gaps.

    The state is two values, so that a killed tuner resumes after the last sample.
    """

    def __init__(self, boot_id: str | None = None, last_seq: int = 0) -> None:
        self.boot_id = boot_id
        self.last_seq = last_seq

    def read(self, boot_id: str, batch: Sequence[TunerSample]) -> NewSamples:
        """Return samples of `batch` that are new, oldest first; the first contact takes all."""
        restarted = self.boot_id is not None and boot_id != self.boot_id
        first_contact = self.boot_id is None
        if restarted or first_contact:
            self.boot_id, self.last_seq = boot_id, 0
        fresh = {sample.seq: sample for sample in batch if sample.seq > self.last_seq}
        new = [fresh[seq] for seq in sorted(fresh)]
        gap = bool(new) and not first_contact and not restarted and new[-1].seq - self.last_seq > len(new)
        if new:
            self.last_seq = new[-1].seq
        return NewSamples(tuple(new), restarted, gap)


def _known(value: Any) -> float | None:
    return None if value is None else float(value)


def p95(values: Iterable[float | None]) -> float | None:
    """Return the 95th percentile of the known values; `None` if none is known."""
    measured = [value for value in values if value is not None]
    return float(np.quantile(measured, 0.95)) if measured else None
