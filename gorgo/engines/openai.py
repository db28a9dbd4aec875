"""Any other server of the OpenAI API: `/v1/models` for round trips, and no figures of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from gorgo.core.messages.request import EngineSample


class OpenAI:
    """An engine of which only the API is known; the router goes by the load that it sends there itself.

    Example
    -------
    >>> OpenAI().read_metrics("anything 1") == EngineSample()
    True
    """

    name: ClassVar[str] = "openai"
    probe_path: ClassVar[str] = "/v1/models"
    metrics_path: ClassVar[str | None] = None
    loads_path: ClassVar[str | None] = None
    report_flags: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def read_metrics(self, text: str) -> EngineSample:  # noqa: ARG002 - the protocol's signature
        return EngineSample()

    def read_capacity(self, loads: object) -> EngineSample:  # noqa: ARG002 - the protocol's signature
        return EngineSample()
