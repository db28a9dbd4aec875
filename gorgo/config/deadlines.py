"""How long an attempt may take in each of its phases, by the region that it goes to.

Owns what a region inherits. What happens when a deadline has passed is the proxy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gorgo.config.model import Config, LimitsConfig, RegionLimitsConfig


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Of one region's attempts.

    Parameters
    ----------
    connect_s:
        To open a connection: name, TCP and TLS.
    first_content_s:
        Of a stream, from dispatch to its first content.
    whole_answer_s:
        Of an answer in one piece, from dispatch to its end: before that nothing of it can be seen.
    between_chunks_s:
        Longest silence after the first content.
    total_s:
        From the request's first byte at the proxy to its answer's last, waits and other attempts included.
    """

    connect_s: float
    first_token_s: float
    response_s: float
    stream_idle_s: float
    request_s: float


def deadlines_by_region(config: Config) -> Mapping[str, Deadlines]:
    """For each region of the file: its own where it has any, else those of `limits`.

    >>> from gorgo.config.load import parse_config
    >>> text = b"{proxy: {region: a}, regions: [{name: a, limits: {request_timeout_s: 9}}, {name: b}], replicas: [%b]}"
    >>> found = deadlines_by_region(parse_config(text % b"{name: r, region: a, url: 'http://127.0.0.1:1'}"))
    >>> found["a"].request_s, found["b"].request_s
    (9.0, 3600.0)
    """
    return {region.name: _deadlines(config.limits, region.limits) for region in config.regions}


def _deadlines(limits: LimitsConfig, own: RegionLimitsConfig) -> Deadlines:
    return Deadlines(
        connect_s=own.connect_timeout_s or limits.connect_timeout_s,
        first_token_s=own.first_token_timeout_s or limits.first_token_timeout_s,
        response_s=own.response_timeout_s or limits.response_timeout_s,
        stream_idle_s=own.stream_idle_timeout_s or limits.stream_idle_timeout_s,
        request_s=own.request_timeout_s or limits.request_timeout_s,
    )
