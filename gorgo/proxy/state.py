"""What serves HTTP in a running proxy, above what routes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from gorgo.config.model import Config
from gorgo.live.state import LiveState
from gorgo.proxy.uploads import UploadCounter


@dataclass(slots=True, kw_only=True)
class RunningProxy(LiveState):
    """The running proxy."""

    #: Headers that pass in both directions beside those that always do; replaced by a reload.
    passed_headers: frozenset[bytes]
    uploads: UploadCounter

    @classmethod
    def serving(cls, live: LiveState) -> Self:
        """Return the proxy that serves HTTP with the parts of `live`, which nothing else uses from then on."""
        return cls(
            **{part.name: getattr(live, part.name) for part in fields(live)},
            passed_headers=_passed_headers(live.config),
            uploads=UploadCounter(live.router),
        )

    def apply_config(self, config: Config) -> None:
        self.passed_headers = _passed_headers(config)


def _passed_headers(config: Config) -> frozenset[bytes]:
    return frozenset(name.encode() for name in config.proxy.pass_headers)
