"""The answer to a probe. One rule for the probes of the proxy and for `gorgo check --live`."""

from __future__ import annotations


def is_well(status: int) -> bool:
    """Return whether a probe's answer means that the replica is well.

    Only 2xx: a server that refuses a probe, redirects it or has no such route is no engine that can serve.
    """
    return 200 <= status < 300
