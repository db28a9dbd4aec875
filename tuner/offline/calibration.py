"""Simulated engines as the proxy has learned them, from an answer of `GET /admin/fleet`.

Theory of operation: the proxy learns by which factor a replica's prefills take longer than its prior
(`prefill_slowdown`), and its round trip. So a simulated engine prefills by the same prior times that factor, at that
round trip. Its decoding is the profile's, because the proxy cannot separate decoding from waiting. The simulated Router
starts with the priors of `gorgo serve`, and learns the rest again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from gorgo.core.latency.prefill import PrefillPrior
from gorgo.errors import TunerError
from gorgo.lab.sim.fleet import SimFleet, SimReplica

#: A thousand replicas are 1 MB.
MAX_BYTES = 16 << 20


def read_fleet(path: Path) -> Mapping[str, Any]:
    """Return a saved answer of `GET /admin/fleet`; raises `TunerError`."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise TunerError(f"{path}: cannot be read ({error}); expected what GET /admin/fleet answers") from error
    if not isinstance(found, dict):
        raise TunerError(f"{path}: expected what GET /admin/fleet answers, a JSON object of at most {MAX_BYTES} bytes")
    return found


def calibrated(fleet: SimFleet, reported: Mapping[str, Any], *, source: str) -> SimFleet:
    """Return `fleet` with engines and round trips as `reported`, an answer of `GET /admin/fleet`.

    Unknown values, and replicas that the answer does not name, stay as they are. Raises `TunerError`, which names
    `source`, for another answer, and for one that shares no replica with `fleet`.
    """
    rows = reported.get("replicas")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise TunerError(f"{source}: replicas: expected a list of objects with a name, as GET /admin/fleet answers")
    known = {str(row["name"]): row for row in rows}
    if not any(replica.name in known for replica in fleet.replicas):
        names = ", ".join(replica.name for replica in fleet.replicas)
        raise TunerError(f"{source}: names none of the replicas of the configuration: {names}")
    return SimFleet(tuple(_learned(replica, known.get(replica.name), source) for replica in fleet.replicas))


def _learned(replica: SimReplica, row: Mapping[str, Any] | None, source: str) -> SimReplica:
    if row is None:
        return replica
    spec, where = replica.spec, f"{source}: replica {replica.name!r}"
    prior = PrefillPrior.of(spec.prefill_base_s, spec.prefill_tokens_per_s, spec.prefill_kappa_s)
    slowdown = _number(row, "prefill_slowdown", where)
    profile, link = replica.profile, replica.link
    if slowdown is not None:
        profile = replace(
            profile,
            prefill_base_s=prior.base_s * slowdown,
            prefill_tokens_per_s=prior.tokens_per_s / slowdown,
            prefill_kappa_s=prior.kappa_s * slowdown,
        )
    if (kv_tokens := _number(row, "kv_capacity_tokens", where)) is not None:
        profile = replace(profile, kv_tokens=round(kv_tokens))
    if (running := _number(row, "max_running_requests", where)) is not None:
        profile = replace(profile, max_running_requests=round(running))
    if (rtt_ms := _number(row, "rtt_ms", where)) is not None:
        link = replace(link, rtt_s=rtt_ms / 1e3)
    return replace(replica, profile=profile, link=link)


def _number(row: Mapping[str, Any], key: str, where: str) -> float | None:
    """Return the number of a key; None if unknown."""
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value > 0):
        raise TunerError(f"{where}: {key} is {value!r}; expected a number above 0, or null")
    return float(value)
