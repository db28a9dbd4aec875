"""The prefill queue of one replica: predicted work before the first tokens of what was dispatched to it.

Owns the requests without a first token, in order of dispatch, and three values that a cost reads. The length of one
prefill is `prefill` and `PrefillSpeed`; what a busy replica costs is the policy's.

Theory of operation. All times are the engine's: a request arrives some round trips after its dispatch, and a first
token left half a round trip before the proxy has it. Between first tokens the time is dead reckoning: each dispatch
adds its prefill at the end. Each first token corrects it: the engine is free after the prefills still queued.

A stuck replica must not look idle when its predicted work is over. So the head of the queue has a time at which its
first token is due, and lateness counts as work (the policy's rule). When the head leaves without a first token, the
engine has spent on it the time until now, at most its prefill; the next one starts there.

An engine serves other routers too, in one line. What they have left there at a dispatch, as they report, comes before
the request: that long the clock runs for them, and the request is neither done nor late.

An answer that is not streamed has no visible first token. Such a request stays queued until its prefill should be over,
until a later one has its first token, or until it ends; it is never late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf

from gorgo.core.latency.prefill import PrefillSpeed
from gorgo.core.numeric import clamp
from gorgo.core.record import mutable_record

#: A first token may be so late before its replica counts as stuck, s.
STUCK_AFTER_S = 0.3


@mutable_record
class _Entry:
    arrival_s: float
    #: By the prior; the learned factor is applied on use, so that it is the latest one.
    prior_s: float
    #: Whether its first token is visible.
    streamed: bool
    #: Work of other routers before it, after what is before the one ahead, s.
    shared_s: float


class PrefillQueue:
    """Requests before their first token on one replica.

    Example
    -------
    >>> queue = PrefillQueue()
    >>> queue.add("a", arrives_s=10.0, prior_s=0.5, streamed=True)
    >>> queue.add("b", arrives_s=10.1, prior_s=0.25, streamed=True)
    >>> queue.drained_at_s, queue.head_due_s, queue.backlog_s
    (10.75, 10.5, 0.75)
    >>> queue.on_first_token("a", engine_s=11.0)  # half a second late: all that is behind it is
    >>> 11.25 < queue.drained_at_s < 11.3, round(queue.head_due_s - queue.drained_at_s, 9)
    (True, 0.0)
    """

    __slots__ = ("_anchor_s", "_entries", "_prior_s", "drained_at_s", "head_due_s", "on_change", "shared_s", "speed")

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        #: Called after each change of the public values.
        self.on_change: Callable[[], None] = _no_observer
        #: When the engine has done all prefills dispatched to it; in the past when it is idle.
        self.drained_at_s = -inf
        #: When the engine should have the first token of the head; infinite when none is expected.
        self.head_due_s = inf
        #: When the engine began with the head, if it had arrived.
        self._anchor_s = -inf
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._prior_s = 0.0
        #: Work of other routers before the queued requests, as of their dispatches, s; `drained_at_s` contains it.
        self.shared_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def backlog_s(self) -> float:
        """Prefill of all queued requests."""
        return self._prior_s * self.speed.factor

    def left_s(self, *, engine_s: float) -> float:
        """Return the work left at `engine_s`: at least what is behind the head, of which nothing is done yet."""
        if not self._entries:
            return 0.0
        backlog_s = self.backlog_s
        behind_s = backlog_s - self._head().prior_s * self.speed.factor
        own_s = self.own_drained_at_s(engine_s=engine_s) - engine_s
        return max(0.0, behind_s, min(own_s, backlog_s))

    def own_drained_at_s(self, *, engine_s: float) -> float:
        """Return when the engine would have done the queued prefills if it went on with them at `engine_s`."""
        return self.drained_at_s - self.shared_left_s(engine_s=engine_s)

    def shared_left_s(self, *, engine_s: float) -> float:
        """Return the work of other routers left before the queued requests, as of their dispatches, s."""
        if not self.shared_s:
            return 0.0
        return self.shared_s - clamp(engine_s - self._began_s(), 0.0, self._head().shared_s)

    @property
    def head_shared_s(self) -> float:
        """Work of other routers before the head alone, s."""
        return self._head().shared_s if self._entries else 0.0

    @property
    def head_began_s(self) -> float:
        """When the engine began with that; the past if nothing is queued."""
        return self._began_s() if self._entries else -inf

    def before(self, key: str) -> list[str]:
        """Return the streamed requests queued before `key`; empty if it is not queued."""
        if key not in self._entries:
            return []
        ahead: list[str] = []
        for other, entry in self._entries.items():
            if other == key:
                break
            if entry.streamed:
                ahead.append(other)
        return ahead

    def add(self, key: str, *, arrives_s: float, prior_s: float, streamed: bool, shared_s: float = 0.0) -> None:
        """Add a dispatched request; `shared_s` is work of other routers before it that is not before others queued."""
        assert key not in self._entries, "an attempt is dispatched once"
        self._entries[key] = _Entry(arrives_s, prior_s, streamed, shared_s)
        self._prior_s += prior_s
        self.shared_s += shared_s
        begins_s = arrives_s if arrives_s > self.drained_at_s else self.drained_at_s
        self.drained_at_s = begins_s + shared_s + prior_s * self.speed.factor
        self._advance(arrives_s)
        self.on_change()

    def on_first_token(self, key: str, *, engine_s: float, shared_until_s: float = -inf) -> None:
        """Remove `key`: the engine has its first token. A key that is not queued is ignored.

        Until `shared_until_s` the engine had prefills of other routers.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        while (head_key := self._head_key()) != key and not self._entries[head_key].streamed:
            self._pass_head()
        self.speed.on_first_token(
            engine_s=engine_s,
            arrived_s=entry.arrival_s,
            prior_s=entry.prior_s,
            head=head_key == key,
            shared_until_s=shared_until_s,
        )
        self._remove(key)
        self._anchor_s = engine_s
        self.drained_at_s = engine_s + self.backlog_s + self.shared_s
        self._advance(engine_s)
        self.on_change()

    def remove(self, key: str, *, engine_s: float) -> None:
        """Remove `key`, which ended without a visible first token; the engine stops at `engine_s`."""
        entry = self._entries.get(key)
        if entry is None:
            return
        spent_s = 0.0
        if self._head_key() == key:
            began_s = self._anchor_s if self._anchor_s > entry.arrival_s else entry.arrival_s
            shared_s = clamp(engine_s - began_s, 0.0, entry.shared_s)
            spent_s = clamp(engine_s - began_s - entry.shared_s, 0.0, entry.prior_s * self.speed.factor)
            self._anchor_s = began_s + shared_s + spent_s
            self._use_shared(entry, shared_s)
        self.drained_at_s -= entry.prior_s * self.speed.factor - spent_s
        if entry.shared_s:
            self._pass_on_shared(key, entry)
        self._remove(key)
        self._advance(engine_s)
        self.on_change()

    def set_speed_prior(self, factor: float) -> None:
        """Take the engine's reported factor as the prior of the learned one."""
        self.speed.set_prior(factor)
        self.on_change()

    def reset_speed(self) -> None:
        """Forget the learned factor: the prior that it corrects has changed."""
        self.speed = PrefillSpeed()
        self.on_change()

    def check(self) -> None:
        """Assert every invariant; for tests."""
        total = sum(entry.prior_s for entry in self._entries.values())
        assert abs(total - self._prior_s) <= 1e-9 * (1.0 + total)
        assert (self.head_due_s < inf) == bool(self._entries and self._head().streamed)
        assert self._entries or self._prior_s == 0.0, "an empty queue has no work"
        shared = sum(entry.shared_s for entry in self._entries.values())
        assert abs(shared - self.shared_s) <= 1e-9 * (1.0 + shared)

    def _advance(self, engine_s: float) -> None:
        """Drop requests at the head whose invisible prefill must be over, and set when the head is due."""
        self.head_due_s = inf
        while self._entries:
            head = self._head()
            began_s = self._anchor_s if self._anchor_s > head.arrival_s else head.arrival_s
            due_s = began_s + head.shared_s + head.prior_s * self.speed.factor
            if head.streamed:
                self.head_due_s = due_s
                return
            if due_s > engine_s:
                return
            self._pass_head()
        # The rest of dead reckoning is noise: an empty queue is an idle engine.
        if self.drained_at_s > engine_s:
            self.drained_at_s = engine_s

    def _pass_head(self) -> None:
        head = self._head()
        self._anchor_s = max(self._anchor_s, head.arrival_s) + head.shared_s + head.prior_s * self.speed.factor
        self._remove(self._head_key())

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._prior_s -= entry.prior_s
        self.shared_s -= entry.shared_s
        if not self._entries:
            self._prior_s = self.shared_s = 0.0  # sums of floats drift

    def _use_shared(self, entry: _Entry, shared_s: float) -> None:
        entry.shared_s -= shared_s
        self.shared_s -= shared_s

    def _pass_on_shared(self, key: str, entry: _Entry) -> None:
        """Move the work of other routers before `key` to the request behind it; behind the last one nobody waits."""
        behind = iter(self._entries)
        while next(behind) != key:
            pass
        following = next(behind, None)
        if following is None:
            self.drained_at_s -= entry.shared_s
        else:
            self._entries[following].shared_s += entry.shared_s
            entry.shared_s = 0.0

    def _head_key(self) -> str:
        return next(iter(self._entries))

    def _head(self) -> _Entry:
        return next(iter(self._entries.values()))

    def _began_s(self) -> float:
        return max(self._anchor_s, self._head().arrival_s)


def _no_observer() -> None:
    pass
