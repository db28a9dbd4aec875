"""Finished requests as samples, in a bounded ring that a reader follows by sequence number.

Owns the record and the ring behind `GET /admin/samples`. Every request that was dispatched leaves exactly one sample,
when its last attempt ends. A reader detects a gap when `first_seq` is past its request, and a restart when the
`boot_id` differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field
from itertools import islice
from typing import Any

from gorgo.core.record import record


@record
class Sample:
    """One finished request as the proxy knows it; `None` is unknown. Milliseconds here, because this is the JSON edge.

    A client's own record of a request is `sim.records.ClientRecord`, which counts from the time in the trace.

    `status` is the HTTP status for the client: 499 when it disconnected, 502 when the stream broke after content.
    `policy`, `weights_version`, `estimated_cached_tokens`, `rtt_ms`, the prediction, `terms` (of the replica's cost, in
    the policy's unit) and the shadow's score are those of the last dispatch. `best_cached_tokens` is
    the estimate of the candidate with most of the prompt. `ttft_parts_ms` (`core.latency.ttft`) adds up to `ttft_ms`.
    `client` is the name of the client's key.
    """

    seq: int
    request_id: str
    finished_s: float
    replica: str
    region: str
    policy: str
    weights_version: int
    input_tokens: int
    cached_tokens: int | None
    estimated_cached_tokens: int
    output_tokens: int | None
    rtt_ms: float | None
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    e2e_s: float
    itl_ms_p95: float | None
    status: int
    retries: int
    hedged: bool
    terms: Mapping[str, float] = field(default_factory=dict)
    shadow_policy: str | None = None
    shadow_rank: int | None = None
    shadow_cost: float | None = None
    shadow_predicted_ttft_ms: float | None = None
    best_cached_tokens: int | None = None
    ttft_parts_ms: Mapping[str, float] | None = None
    client: str | None = None
    model: str | None = None


class SampleRing:
    """The newest samples, numbered from 1 without gaps.

    Parameters
    ----------
    boot_id:
        Names this run of the proxy; sequence numbers mean nothing across two of them.
    capacity:
        Samples stored; a reader that lags misses older ones.
    """

    def __init__(self, boot_id: str, capacity: int) -> None:
        self.boot_id = boot_id
        self.capacity = capacity
        self.last_seq = 0
        self._samples: deque[Sample] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    @property
    def first_seq(self) -> int:
        """The oldest retained number; the next one if the ring is empty."""
        return self.last_seq + 1 - len(self._samples)

    @property
    def next_seq(self) -> int:
        return self.last_seq + 1

    def newest(self, limit: int) -> list[Sample]:
        """Return the last samples, newest first."""
        return list(islice(reversed(self._samples), limit))

    def append(self, sample: Sample) -> None:
        assert sample.seq == self.next_seq, "samples are numbered without gaps"
        self.last_seq = sample.seq
        self._samples.append(sample)

    def for_request(self, request_id: str) -> Sample | None:
        """Return the newest retained sample of a request."""
        return next((sample for sample in reversed(self._samples) if sample.request_id == request_id), None)

    def after(self, seq: int, limit: int = 1000) -> dict[str, Any]:
        """Return the JSON form: samples numbered above `seq`, oldest first, at most `limit`."""
        start = max(0, seq + 1 - self.first_seq)
        chosen = islice(self._samples, start, start + max(0, limit))
        return {
            "boot_id": self.boot_id,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "samples": [asdict(sample) for sample in chosen],
        }
