"""Bounds of the picker's connections, and why each is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gorgo.config.model import LimitsConfig

#: A message beside the body that it carries: heads of 64 KiB, attributes and metadata.
ENVELOPE_BYTES = 256 * 1024
#: Calls of one exchange at a time: the decision, the first token.
CALLS_PER_EXCHANGE = 2
#: Envoy's workers, each with streams of the access log and of health checks.
OTHER_CALLS = 256
#: A connection without any frame for so long is asked for a sign of life, s.
KEEPALIVE_S = 30.0
#: Without an answer after so long it is closed, and its calls have ended, s.
KEEPALIVE_ANSWER_S = 10.0
#: Connections at a time; each of Envoy's workers has a few.
MAX_CONNECTIONS = 1024
#: Time for the ends of calls to reach Envoy, s.
CLOSE_S = 1.0
#: From an opened connection to its settings, s; and of a TLS handshake.
HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds of one server.

    Parameters
    ----------
    message_bytes:
        Of one message: a whole body in Envoy's buffered mode.
    calls:
        Open at once on one connection; Envoy opens another connection for more.
    """

    message_bytes: int
    calls: int

    @classmethod
    def of(cls, limits: LimitsConfig) -> Self:
        """Return the bounds for a configuration: an exchange per client connection that `gorgo serve` would accept."""
        return cls(limits.max_body_bytes + ENVELOPE_BYTES, CALLS_PER_EXCHANGE * limits.max_connections + OTHER_CALLS)
