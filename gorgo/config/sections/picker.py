"""`picker` in regions.yaml: the listener of `gorgo picker` for Envoy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator

from gorgo.config.sections.tls import TlsConfig, paired
from gorgo.config.values import Bind, Positive, strict


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class PickerConfig:
    """The endpoint picker; `gorgo serve` reads none of it. A change needs a restart."""

    bind: Bind = "127.0.0.1:9002"
    tls: Annotated[TlsConfig, AfterValidator(paired)] = field(default_factory=TlsConfig)
    #: Longest time in the queue. Envoy's `message_timeout` is ten seconds more, or Envoy would answer by itself.
    hold_s: Positive = 20.0
