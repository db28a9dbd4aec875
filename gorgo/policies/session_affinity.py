"""`simple-session-affinity`: the same session to the same replica, by rendezvous hashing."""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import IndexKind
from gorgo.core.policy.weights import Weights, WeightSpec


class SimpleSessionAffinity:
    """Rendezvous hashing: the fixed salt of each replica is mixed with the key of the session; the greatest value wins.

    The key is the session id of the client, else the hash of the first 256 tokens. If a replica leaves, only its
    sessions move; they return with it.

    References
    ----------
    GORGO paper, baselines. Thaler and Ravishankar, Using name-based mappings to increase hit rates, 1998. The mixer is
    the finaliser of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
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
        score = _mix(candidates.salt ^ _mix(_key(request)))
        return Choice(int(score.argmax()))


def _key(request: RouteRequest) -> NDArray[np.uint64]:
    """64 bits that name the session, in every process the same."""
    key = request.prefix_hash
    if request.session_id is not None:
        key = int.from_bytes(blake2b(request.session_id.encode(), digest_size=8).digest(), "little")
    return np.array([key & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every bit in changes half of the bits out. Arrays wrap around silently, as wanted."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))
