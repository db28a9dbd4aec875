"""Poison requests: a prompt on which engines die is not sent to a third one.

Owns the suspects: prompts whose attempts broke off, and which of their replicas went down afterwards. Leaves the error
to `outcomes`, and the health of replicas to `core.fleet`.

Theory of operation. A retry after a broken connection is right where the replica died by itself, and wrong where the
prompt killed it: one retry of the router and one of an SDK would stop a fleet. A broken connection alone proves
nothing. It counts where the replica, after it was sent the prompt, refused a connection, failed a probe or restarted.
`MOST_KILLED` such replicas within `WINDOW_S` make a prompt poison, whichever request brings it, until the first of them
is older than that. For a request whose last attempt has broken just now, the others have to be proven: there was no
time to prove the last. A prompt that was answered to its end in that time is no suspect, so that many clients with one
prompt are served while replicas die for another reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from gorgo.core.fleet.replica import Replica
from gorgo.core.lru import Lru
from gorgo.core.messages.request import RouteRequest
from gorgo.core.record import record

#: Replicas that one prompt may take down.
MOST_KILLED = 2
#: How long a broken attempt counts, and how long after it the replica may be found down, s: an engine that dies takes
#: tens of seconds until it listens again, and its counters are read at the next scrape.
WINDOW_S = 60.0
#: Suspects at once: more than attempts in flight on several replicas that die within the window. Prompts that were
#: answered are as many: of those that many clients send, the last answer is never far away.
MAX_SUSPECTS = 4096
#: Model, hash of the beginning, hash of the whole full blocks, and the length.
_Key = tuple[str | None, int, bytes, int]


@record
class PoisonPrompt:
    """A prompt that is sent to no replica until `until_s`; `request_id` is its last request that broke off."""

    request_id: str
    client: str | None
    model: str | None
    replicas: tuple[str, ...]
    until_s: float


class _Suspect:
    """One prompt: when its broken attempts were dispatched and broke off, by replica, and its last request."""

    __slots__ = ("broken", "request")

    def __init__(self, request: RouteRequest) -> None:
        self.request = request
        self.broken: dict[Replica, tuple[float, float]] = {}

    def killed(self, down_s: Mapping[Replica, float], *, now: float) -> list[tuple[float, Replica]]:
        """Return the replicas under which it broke off within the window and that were found down, first one first."""
        found = [
            (at_s, replica)
            for replica, (sent_s, at_s) in self.broken.items()
            if now - at_s < WINDOW_S and sent_s <= down_s.get(replica, -inf) < at_s + WINDOW_S
        ]
        return sorted(found, key=lambda each: each[0])


class PoisonPrompts:
    """The prompts that replicas went down under.

    Example
    -------
    >>> PoisonPrompts().known(RouteRequest("r", 0.0, 100, b"", 64.0, 1), now=0.0) is None
    True
    """

    __slots__ = ("_answered_s", "_down_s", "_suspects")

    def __init__(self) -> None:
        self._suspects = Lru[_Key, _Suspect](MAX_SUSPECTS)
        #: When a prompt was last answered to its end.
        self._answered_s = Lru[_Key, float](MAX_SUSPECTS)
        #: When a replica was last found down; as many as the fleet has.
        self._down_s: dict[Replica, float] = {}

    def on_broken(self, request: RouteRequest, replica: Replica, *, dispatched_s: float, now: float) -> None:
        """Record that the connection of an attempt broke before the end of its answer."""
        key = _key(request)
        if now - self._answered_s.get(key, -inf) < WINDOW_S:
            return
        suspect = self._suspects.get(key)
        if suspect is None:
            suspect = _Suspect(request)
        suspect.request = request
        suspect.broken = {each: times for each, times in suspect.broken.items() if now - times[1] < WINDOW_S}
        suspect.broken[replica] = dispatched_s, now
        self._suspects.put(key, suspect)

    def on_down(self, replica: Replica, *, now: float) -> None:
        """Record that a replica refused a connection, failed a probe or has restarted."""
        if replica.slot >= 0:
            self._down_s[replica] = now

    def on_answered(self, request: RouteRequest, *, now: float) -> None:
        """Record that a replica has answered a prompt to its end: it is no suspect."""
        key = _key(request)
        self._answered_s.put(key, now)
        if self._suspects:
            self._suspects.pop(key, None)

    def stops(self, request: RouteRequest, replica: Replica, *, now: float) -> bool:
        """Return whether a request whose attempt on `replica` has just broken off may have no other."""
        suspect = self._suspects.get(_key(request))
        if suspect is None:
            return False
        killed = {other for _, other in suspect.killed(self._down_s, now=now)}
        return len(killed | {replica}) >= MOST_KILLED

    def known(self, request: RouteRequest, *, now: float) -> PoisonPrompt | None:
        """Return what is known of a prompt that no replica may have now; `None` for any other."""
        suspect = self._suspects.get(_key(request)) if self._suspects else None
        return None if suspect is None else self._poison(suspect, now)

    def all(self, *, now: float) -> list[PoisonPrompt]:
        """Return the prompts that no replica may have now."""
        return [found for suspect in self._suspects.values() if (found := self._poison(suspect, now)) is not None]

    def forget_left(self) -> None:
        """Forget replicas that left."""
        self._down_s = {replica: at_s for replica, at_s in self._down_s.items() if replica.slot >= 0}

    def _poison(self, suspect: _Suspect, now: float) -> PoisonPrompt | None:
        killed = suspect.killed(self._down_s, now=now)
        if len(killed) < MOST_KILLED:
            return None
        request = suspect.request
        return PoisonPrompt(
            request.request_id,
            request.client,
            request.recorded_model,
            tuple(replica.spec.name for _, replica in killed),
            killed[-MOST_KILLED][0] + WINDOW_S,
        )


def _key(request: RouteRequest) -> _Key:
    size = request.prompt_tokens if request.text_bytes is None else request.text_bytes
    return request.recorded_model, request.prefix_hash, request.blocks[-8:], size
