"""`simple-session-affinity`: the same session to the same replica, by rendezvous hashing."""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar

import numpy as np

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec
from gorgo.policies.base import rendezvous_scores


class SimpleSessionAffinity:
    """Rendezvous hashing: the fixed salt of each replica is mixed with the key of the session; the greatest value wins.

    The key is the session id of the client, else the hash of the first 256 tokens. If a replica leaves, only its
    sessions move; they return with it.

    References
    ----------
    GORGO paper, baselines. Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998.
    """

    name: ClassVar[str] = "simple-session-affinity"
    summary: ClassVar[str] = "GORGO paper: rendezvous hash of the session id, else of the first 256 tokens"
    unit: ClassVar[str] = ""
    index: ClassVar[IndexKind] = "any"
    weight_specs: ClassVar[tuple[WeightSpec, ...]] = ()
    #: The key alone decides: commands warn of traces in which most requests have the same one.
    by_session: ClassVar[bool] = True

    def choose(
        self,
        request: RouteRequest,
        candidates: Candidates,
        weights: Weights,
        rng: np.random.Generator,
    ) -> Choice:
        return Choice(int(rendezvous_scores(candidates.salt, _key(request)).argmax()))


def _key(request: RouteRequest) -> int:
    """Return 64 bits that name the session, in every process the same."""
    if request.session_id is None:
        return request.prefix_hash
    return int.from_bytes(blake2b(request.session_id.encode(), digest_size=8).digest(), "little")
