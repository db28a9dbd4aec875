"""Figures of a run's requests beside their latencies: time per token, throughput, goodput, error of predictions.

Owns the definitions, for simulated and live records alike, and the bounds of a request served well.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

from gorgo.lab.results import Spread

#: Bounds of a request served well: first token, last token.
TTFT_MS, E2E_S = 2000.0, 10.0


class EndedRequest(Protocol):
    """What the figures need of a record; missing values are None."""

    @property
    def scheduled_s(self) -> float: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def e2e_s(self) -> float | None: ...
    @property
    def output_tokens(self) -> int | None: ...
    @property
    def predicted_ttft_ms(self) -> float | None: ...
    @property
    def error(self) -> str | None: ...


def is_good(record: EndedRequest) -> bool:
    """Return whether a request was served within the bounds."""
    if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
        return False
    return record.ttft_ms <= TTFT_MS and record.e2e_s <= E2E_S


class ServedTally:
    """Sums over records as they end, in bounded memory per request.

    Example
    -------
    >>> from gorgo.lab.replay.summary import ReplayRecord
    >>> tally = ServedTally()
    >>> tally.add(ReplayRecord(id="1", scheduled_s=0.0, sent_s=0.0, input_tokens=9, ttft_ms=100.0, e2e_s=0.5,
    ...     output_tokens=5, predicted_ttft_ms=90.0))
    >>> found = tally.fields()
    >>> found["tpot_ms"].mean, found["e2e_per_token_ms"].mean, found["tokens_per_s"], found["goodput"]
    (100.0, 100.0, 10.0, 1.0)
    >>> round(found["prediction_error_ratio"], 3)
    0.1
    """

    def __init__(self) -> None:
        self._offered = self._good = self._tokens = 0
        self._tpot_ms, self._e2e_per_token_ms, self._error_ratio = array("d"), array("d"), array("d")
        self._begun_s, self._ended_s = float("inf"), float("-inf")

    def add(self, record: EndedRequest) -> None:
        """Count one ended request; a failed one was offered, and has no other part."""
        self._offered += 1
        self._good += is_good(record)
        self._begun_s = min(self._begun_s, record.scheduled_s)
        if record.error is not None or record.ttft_ms is None or record.e2e_s is None:
            return
        self._ended_s = max(self._ended_s, record.scheduled_s + record.e2e_s)
        if record.predicted_ttft_ms is not None and record.ttft_ms > 0:
            self._error_ratio.append(abs(record.predicted_ttft_ms - record.ttft_ms) / record.ttft_ms)
        if record.output_tokens:
            self._tokens += record.output_tokens
            self._e2e_per_token_ms.append(1e3 * record.e2e_s / record.output_tokens)
        if record.output_tokens is not None and record.output_tokens > 1:
            self._tpot_ms.append((1e3 * record.e2e_s - record.ttft_ms) / (record.output_tokens - 1))

    def fields(self) -> dict[str, Any]:
        """Return the fields of a result row."""
        lasted_s = self._ended_s - self._begun_s
        return {
            "tpot_ms": Spread.of(self._tpot_ms),
            "e2e_per_token_ms": Spread.of(self._e2e_per_token_ms),
            "tokens_per_s": self._tokens / lasted_s if self._tokens and lasted_s > 0 else None,
            "goodput": self._good / self._offered if self._offered else None,
            "prediction_error_ratio": Spread.of(self._error_ratio).mean,
        }
