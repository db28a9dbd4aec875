"""`kv_events` of a replica: where the events of its KV cache come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WrapValidator

from gorgo.config.values import KvEndpoint, auto_or, strict


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Where the KV cache events of a replica come from; without an endpoint, where its engine says."""

    #: Of the events, and of the replays of missed ones, if the engine offers any.
    endpoint: KvEndpoint | None = None
    replay: KvEndpoint | None = None
    #: Prefix of the topics to receive; by default that of the engine, or any.
    topic: Annotated[str, Field(max_length=256)] | None = None
    #: `bind` if the engine connects to the proxy.
    mode: Literal["connect", "bind"] = "connect"


def _reachable(events: KvEventsConfig) -> KvEventsConfig:
    if events.endpoint is None and events.mode == "bind":
        raise ValueError("an endpoint beside mode: bind")
    if events.endpoint is None and events.replay is not None:
        raise ValueError("an endpoint beside replay")
    if events.mode == "connect" and events.endpoint is not None and "//*" in events.endpoint:
        raise ValueError("an endpoint with the engine's host, or mode: bind")
    if events.replay is not None and "//*" in events.replay:
        raise ValueError("a replay with the engine's host")
    return events


#: `auto` is as the engine announces them.
KvEvents = Annotated[KvEventsConfig, AfterValidator(_reachable), WrapValidator(auto_or({}))]
