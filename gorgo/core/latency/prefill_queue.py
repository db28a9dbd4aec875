"""When a replica will have done the prefills that were sent to it: its prefill queue and the line before it.

Owns, for one replica, who waits for a first token in order of dispatch, and the three figures that a cost reads. How
long one prefill takes is `prefill` and `speed`; what a busy replica costs is the policy's.

Theory of operation. All times are the engine's: a request arrives some trips after its dispatch, and a first token left
half a round trip before it is seen. Between first tokens the clock is dead reckoning: each dispatch adds its own
prefill behind what is there. Each first token sets it right: the engine is then free after the prefills of those who
still wait, whatever was believed before.

A stuck replica must not look idle when its clock has run out, so the first in line has a time at which its first token
is due. How late it is counts as work (the policy's rule). When the first in line goes away without a first token, the
engine has spent on it the time until now, at most its prefill, and the next one's time starts there.

An answer that is not a stream shows no first token. Such a request is in line until its prefill should be over, until
one dispatched after it shows its own, or until it ends; being late is never said of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from gorgo.core.latency.prefill_speed import PrefillSpeed

#: A first token may be so late before its replica counts as stuck, s.
STUCK_AFTER_S = 0.3


@dataclass(slots=True)
class _Entry:
    arrival_s: float
    #: By the prior; the learned factor comes in where it is used, so that it is never an old one.
    prior_s: float
    #: Whether its first token can be seen.
    streamed: bool


class PrefillQueue:
    """The line of one replica.

    Example
    -------
    >>> queue = PrefillQueue()
    >>> queue.add("a", arrives_s=10.0, prior_s=0.5, seen=True)
    >>> queue.add("b", arrives_s=10.1, prior_s=0.25, seen=True)
    >>> queue.drained_at_s, queue.head_due_s, queue.backlog_s
    (10.75, 10.5, 0.75)
    >>> queue.on_first_token("a", engine_s=11.0)  # half a second late: all that is behind it is
    >>> 11.25 < queue.drained_at_s < 11.3, round(queue.head_due_s - queue.drained_at_s, 9)
    (True, 0.0)
    """

    __slots__ = ("_anchor_s", "_entries", "_prior_s", "drained_at_s", "head_due_s", "on_change", "speed")

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        #: Called after each change of the public values.
        self.on_change: Callable[[], None] | None = None
        #: When the engine has done all prefills dispatched to it; in the past when it is idle.
        self.drained_at_s = -inf
        #: When the engine should have the first token of the first in line; infinite when none is expected.
        self.head_due_s = inf
        #: When the engine began with the first in line, if it had arrived.
        self._anchor_s = -inf
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._prior_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def backlog_s(self) -> float:
        """Prefill of all in line."""
        return self._prior_s * self.speed.factor

    def before(self, key: str) -> list[str]:
        """Those in line before `key` whose first token will be seen; none if it is not in line."""
        if key not in self._entries:
            return []
        ahead: list[str] = []
        for other, waiting in self._entries.items():
            if other == key:
                break
            if waiting.streamed:
                ahead.append(other)
        return ahead

    def add(self, key: str, *, arrives_s: float, prior_s: float, seen: bool) -> None:
        """A request is on its way. `seen` if it will be a stream, whose first token can be seen."""
        assert key not in self._entries, "an attempt is dispatched once"
        self._entries[key] = _Entry(arrives_s, prior_s, seen)
        self._prior_s += prior_s
        self.drained_at_s = max(self.drained_at_s, arrives_s) + prior_s * self.speed.factor
        self._advance(arrives_s)
        self._changed()

    def on_first_token(self, key: str, *, engine_s: float) -> None:
        """The engine has produced the first token of `key`. One that is not in line is ignored."""
        while self._entries and key in self._entries and not self._head().streamed and self._head_key() != key:
            self._pass_head()
        waiting = self._entries.get(key)
        if waiting is None:
            return
        self.speed.on_first_token(
            engine_s=engine_s, arrived_s=waiting.arrival_s, prior_s=waiting.prior_s, head=self._head_key() == key
        )
        self._remove(key)
        self._anchor_s = engine_s
        self.drained_at_s = engine_s + self.backlog_s
        self._advance(engine_s)
        self._changed()

    def remove(self, key: str, *, engine_s: float) -> None:
        """`key` ended without a first token that could be seen, and the engine knows at `engine_s`."""
        waiting = self._entries.get(key)
        if waiting is None:
            return
        spent_s = 0.0
        if self._head_key() == key:
            began_s = self._began_s()
            spent_s = min(max(engine_s - began_s, 0.0), waiting.prior_s * self.speed.factor)
            self._anchor_s = began_s + spent_s
        self.drained_at_s -= waiting.prior_s * self.speed.factor - spent_s
        self._remove(key)
        self._advance(engine_s)
        self._changed()

    def set_speed_prior(self, factor: float) -> None:
        """Take the engine's reported factor as the prior of the learned one."""
        self.speed.set_prior(factor)
        self._changed()

    def reset_speed(self) -> None:
        """Forget the learned factor: the prior that it corrects has changed."""
        self.speed = PrefillSpeed()
        self._changed()

    def check(self) -> None:
        """Assert every invariant; for tests."""
        total = sum(waiting.prior_s for waiting in self._entries.values())
        assert abs(total - self._prior_s) <= 1e-9 * (1.0 + total)
        assert (self.head_due_s < inf) == bool(self._entries and self._head().streamed)
        assert self._entries or self._prior_s == 0.0, "nobody waits, nothing is to do"

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _advance(self, engine_s: float) -> None:
        """Let those pass whose prefill must be over though nobody sees it; say when the first in line is due."""
        self.head_due_s = inf
        while self._entries:
            head = self._head()
            due_s = self._due_s()
            if head.streamed:
                self.head_due_s = due_s
                return
            if due_s > engine_s:
                return
            self._pass_head()
        # What is left of dead reckoning is noise: an empty line is an idle engine.
        self.drained_at_s = min(self.drained_at_s, engine_s)

    def _pass_head(self) -> None:
        self._anchor_s = self._due_s()
        self._remove(self._head_key())

    def _remove(self, key: str) -> None:
        self._prior_s -= self._entries.pop(key).prior_s
        if not self._entries:
            self._prior_s = 0.0  # sums of floats drift

    def _head_key(self) -> str:
        return next(iter(self._entries))

    def _head(self) -> _Entry:
        return next(iter(self._entries.values()))

    def _began_s(self) -> float:
        return max(self._anchor_s, self._head().arrival_s)

    def _due_s(self) -> float:
        head = self._head()
        return max(self._anchor_s, head.arrival_s) + head.prior_s * self.speed.factor
