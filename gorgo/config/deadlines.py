"""The deadlines of an attempt's phases, by the region of its replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gorgo.config.model import Config


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Deadlines of one region's attempts.

    Parameters
    ----------
    connect_s:
        To open a connection: name, TCP and TLS.
    first_token_s:
        Of a stream, from dispatch to its first token.
    response_s:
        Of a response that is no stream, from dispatch to its end: nothing of it is visible before.
    stream_idle_s:
        Longest silence after the first token.
    request_s:
        From the request's first byte at the proxy to the last of its response, waits and other attempts included.
    """

    connect_s: float
    first_token_s: float
    response_s: float
    stream_idle_s: float
    request_s: float


def deadlines_by_region(config: Config) -> Mapping[str, Deadlines]:
    """Return the deadlines of each region: those of `limits`, with the region's own time to a first token.

    >>> from gorgo.config.load import parse_config
    >>> regions = b"[{name: a, limits: {first_token_timeout_s: 9}}, {name: b}]"
    >>> text = b"{proxy: {region: a}, regions: %b, replicas: [{name: r, region: a, url: 'http://127.0.0.1:1'}]}"
    >>> found = deadlines_by_region(parse_config(text % regions))
    >>> found["a"].first_token_s, found["b"].first_token_s
    (9.0, 120.0)
    """
    limits = config.limits
    common = Deadlines(
        connect_s=limits.connect_timeout_s,
        first_token_s=limits.first_token_timeout_s,
        response_s=limits.response_timeout_s,
        stream_idle_s=limits.stream_idle_timeout_s,
        request_s=limits.request_timeout_s,
    )
    own = {region.name: region.limits.first_token_timeout_s for region in config.regions}
    return {name: replace(common, first_token_s=value or common.first_token_s) for name, value in own.items()}
