"""The interface of engine dialects: paths to probe and scrape, and readers of the answers.

Owns the protocol. Readers are plain functions over text; the proxy makes the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

from gorgo.core.messages.request import EngineSample


@runtime_checkable
class EngineDialect(Protocol):
    """One kind of engine.

    `probe_path` is answered at once, without touching the scheduler: its round trip is the network's. `metrics_path`
    and `loads_path` are `None` where the engine has no such route. Both readers return the values that they
    find and `None` for the rest; they never raise for an unexpected text, because the next version of an engine will
    differ.

    `report_flags` has the engine's flag for each report that is off by default: `cached_tokens`, `metrics`.
    """

    name: ClassVar[str]
    probe_path: ClassVar[str]
    metrics_path: ClassVar[str | None]
    loads_path: ClassVar[str | None]
    report_flags: ClassVar[Mapping[str, str]]

    def read_metrics(self, text: str) -> EngineSample: ...

    def read_capacity(self, loads: object) -> EngineSample: ...


def merged(first: EngineSample, second: EngineSample) -> EngineSample:
    """`first`, with its gaps filled from `second`."""
    return EngineSample(
        running_requests=_either(first.running_requests, second.running_requests),
        queued_requests=_either(first.queued_requests, second.queued_requests),
        used_tokens=_either(first.used_tokens, second.used_tokens),
        kv_capacity_tokens=_either(first.kv_capacity_tokens, second.kv_capacity_tokens),
        max_running_requests=_either(first.max_running_requests, second.max_running_requests),
        prefill_tokens_total=_either(first.prefill_tokens_total, second.prefill_tokens_total),
        prefill_busy_s_total=_either(first.prefill_busy_s_total, second.prefill_busy_s_total),
        prompt_tokens_total=_either(first.prompt_tokens_total, second.prompt_tokens_total),
    )


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first
