"""The feed of one publisher: which of its messages are applied, and what follows from a hole in their numbers.

Owns the order of messages, the queue of live ones during a replay, and the decision that the blocks of the replica are
not known any longer. Pure: a shell (`subscription`) moves bytes and acts.

- `Apply`, `Forget` and `Replay` are the actions that a feed asks for.
- `Position` is the place among the publisher's messages.
- `Knowledge` is what the messages applied so far tell of its cache.
- `MessageQueue` has live messages that wait for a replay.
- `ReplayLimit` bounds the replays.
- `PublisherFeed` decides.

Theory of operation. A publisher numbers its messages from 0 and retains the last ones (10,000 by default) for replays.
A number that is too high is a gap; one that is not above the last live one is from a new process. While a replay runs,
live messages wait, because events are applied in order.

A new process can have passed the last number before its first live message comes. The replay of a gap therefore starts
with the last message applied, which is compared by its content: another content, or none, is another process. A replay
of all messages starts at 0. What was known is forgotten at its first message, since a block stored twice counts twice.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import blake2b

from gorgo.live.kv_feed_stats import FeedState, KvFeedStats


@dataclass(frozen=True, slots=True)
class Apply:
    """Decode a message and pass its events to the Router; `era` is for `Knowledge.emptied` and `spoiled`."""

    payload: bytes
    era: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the blocks of this feed; `restarted`: the cache is empty, for it is that of a new process."""

    restarted: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """Request the messages from number `start` on, instead of any replay that runs."""

    start: int
    generation: int


FeedAction = Apply | Forget | Replay


#: Longest message that is retained for a comparison: those of 1,000 replicas take 16 MB.
COMPARED_BYTES = 16 * 1024


class Position:
    """The last message applied, and the highest live number of this process.

    Example
    -------
    >>> position = Position()
    >>> position.set(7, b"payload")
    >>> position.is_next(8), position.has_content(b"other")
    (True, False)
    """

    def __init__(self) -> None:
        #: `None`: any message may be the next; -1: the first one is.
        self.last: int | None = None
        self.live: int | None = None
        self._content = b""

    def set(self, number: int, payload: bytes) -> None:
        """Record the last message applied."""
        self.last, self._content = number, _content(payload)

    def is_next(self, number: int) -> bool:
        return self.last is not None and number == self.last + 1

    def has_content(self, payload: bytes) -> bool:
        """Return whether the last message had this content."""
        return _content(payload) == self._content

    def goes_back(self, number: int) -> bool:
        """Return whether a live message of this number is of another process."""
        return self.live is not None and number <= self.live


def _content(payload: bytes) -> bytes:
    """Return what a message is compared by: itself, or a digest of a long one."""
    return payload if len(payload) <= COMPARED_BYTES else blake2b(payload).digest()


class Knowledge:
    """How much of a publisher's cache is known, and from which message on.

    Each time the blocks are forgotten an era ends; what a message of an earlier era told does not count any longer.

    Example
    -------
    >>> knowledge = Knowledge()
    >>> knowledge.advance(0, b"a")
    Apply(payload=b'a', era=0)
    >>> knowledge.end_era(), knowledge.end_era()
    ([Forget(restarted=False)], [])
    >>> knowledge.emptied(0), knowledge.complete
    (None, False)
    """

    def __init__(self) -> None:
        #: Whether the events describe the whole cache: from the first message on, or since the cache was empty.
        self.complete = False
        #: Whether a replay of all messages could tell more than is known.
        self.lost = True
        self.position = Position()
        #: Whether nothing was applied since the blocks were forgotten, and how often they were.
        self._is_empty = True
        self._era = 0

    def begin(self, *, complete: bool, lost: bool) -> None:
        """Record how much is known from the next message on."""
        self.complete, self.lost = complete, lost

    def advance(self, number: int, payload: bytes) -> Apply:
        """Record the next message, and return what to do with it."""
        self.position.set(number, payload)
        self._is_empty = False
        return Apply(payload, self._era)

    def end_era(self, *, restarted: bool = False) -> list[FeedAction]:
        """Forget what is known; return what follows."""
        self.complete, self.lost, self.position.last = False, True, None
        if self._is_empty and not restarted:
            return []
        self._is_empty = True
        self._era += 1
        return [Forget(restarted)]

    def emptied(self, era: int) -> None:
        """Record that an applied message reported an empty cache: from there on everything is known."""
        if era == self._era:
            self.complete, self.lost = True, False

    def spoiled(self, era: int) -> None:
        """Record that part of an applied message could not be read."""
        if era == self._era:
            self.complete = False


#: As many as engines retain, and a minute of a busy engine's bytes. Beyond, the newest are dropped: a further replay
#: has them.
MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 1024 * 1024


class MessageQueue:
    """Numbered messages in their order, bounded in number and bytes.

    Example
    -------
    >>> queue = MessageQueue()
    >>> queue.add(7, b"first"), queue.pop(), bool(queue)
    (None, (7, b'first'), False)
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, number: int, payload: bytes) -> None:
        """Append a message, unless the queue is full."""
        if len(self._messages) < MAX_MESSAGES and self._bytes + len(payload) <= MAX_BYTES:
            self._messages.append((number, payload))
            self._bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Remove and return the oldest message."""
        number, payload = self._messages.popleft()
        self._bytes -= len(payload)
        return number, payload

    def put_back(self, number: int, payload: bytes) -> None:
        """Undo `pop`."""
        self._messages.appendleft((number, payload))
        self._bytes += len(payload)

    def drop_all(self) -> None:
        self._messages.clear()
        self._bytes = 0


# When a feed may request a replay, and how far the one that runs is.


#: Time between a failed replay and the next one.
COOL_DOWN_S = 30.0
#: Replays in a row that each ended before a further hole: the publisher drops messages faster than it replays them.
MAX_REPLAYS = 4


@dataclass(slots=True)
class RunningReplay:
    """A replay that runs; `useless` are its further messages."""

    state: FeedState
    whole: bool
    began: bool = False
    useless: bool = False
    other_process: bool = False


class ReplayLimit:
    """Bounds the replays of one publisher.

    Example
    -------
    >>> limit = ReplayLimit(offered=True)
    >>> limit.fail(now=5.0), limit.is_cool(now=5.0 + COOL_DOWN_S / 2), limit.is_cool(now=5.0 + COOL_DOWN_S)
    (True, False, True)
    """

    def __init__(self, *, offered: bool) -> None:
        self.offered = offered
        self._in_a_row = 0
        self._hot_until_s = float("-inf")

    def is_cool(self, *, now: float) -> bool:
        """Return whether the publisher offers replays, and no replay has failed lately."""
        return self.offered and now >= self._hot_until_s

    def may_replay(self, *, now: float) -> bool:
        return self.is_cool(now=now) and self._in_a_row < MAX_REPLAYS

    def count(self) -> None:
        """Count a replay of a row."""
        self._in_a_row += 1

    def end_row(self) -> None:
        self._in_a_row = 0

    def fail(self, *, now: float) -> bool:
        """End a row without success; return whether it is news."""
        self._in_a_row = 0
        was_cool = self.is_cool(now=now)
        if was_cool:
            self._hot_until_s = now + COOL_DOWN_S
        return was_cool


#: Time without a connection after which the blocks are forgotten; a replay repairs a shorter cut.
MAX_CUT_S = 5.0


class PublisherFeed:
    """One publisher's messages.

    Parameters
    ----------
    replays:
        Whether the publisher offers replays.
    stats:
        Counts of the replica, which its other feeds share.

    Example
    -------
    >>> feed = PublisherFeed(replays=True, stats=KvFeedStats())
    >>> feed.connected(now=0.0)
    [Replay(start=0, generation=1)]
    >>> feed.replayed(1, 0, b"a")
    [Apply(payload=b'a', era=0)]
    >>> feed.replay_ended(1, now=0.2), feed.state.value
    ([], 'live')
    >>> feed.received(2, b"c", now=1.0), feed.state.value
    ([Replay(start=0, generation=2)], 'gap')
    """

    def __init__(self, *, replays: bool, stats: KvFeedStats) -> None:
        self._stats = stats
        self.known = Knowledge()
        #: Set by the shell: no event came, though requests were served.
        self.silent = False
        self._is_connected = False
        #: Since when the connection is missing; `None` before the first one.
        self._cut_s: float | None = None
        self._position = self.known.position
        self._queue = MessageQueue()
        self._progress: RunningReplay | None = None
        self._generation = 0
        self._limit = ReplayLimit(offered=replays)

    @property
    def state(self) -> FeedState:
        if not self._is_connected:
            return FeedState.WAITING if self._cut_s is None else FeedState.CUT
        if self.silent:
            return FeedState.SILENT
        if self._progress is not None:
            return self._progress.state
        if self.known.complete:
            return FeedState.LIVE
        return FeedState.WAITING if self._position.last is None else FeedState.PARTIAL

    # -- the connection

    def connected(self, *, now: float) -> list[FeedAction]:
        """Begin, or compare the publisher with the one before a cut."""
        self._is_connected = True
        self._limit.end_row()
        if not self._limit.offered:
            return []
        state = FeedState.WAITING if self._cut_s is None else FeedState.GAP
        return self._request(state, whole=self.known.lost, now=now)

    def disconnected(self, *, now: float) -> list[FeedAction]:
        """Record a broken connection; `tick` forgets the blocks if it stays broken."""
        if self._is_connected or self._cut_s is None:
            self._cut_s = now
        self._is_connected = False
        return []

    def tick(self, *, now: float) -> list[FeedAction]:
        """Forget the blocks of a publisher without a connection; repeat a failed replay after its cool-down."""
        if not self._is_connected:
            is_short = self._cut_s is None or now - self._cut_s < MAX_CUT_S
            return [] if is_short else self.known.end_era()
        if self.known.lost and self._progress is None and self._limit.is_cool(now=now):
            return self._request(FeedState.PARTIAL, whole=True, now=now)
        return []

    # -- messages

    def received(self, number: int, payload: bytes, *, now: float) -> list[FeedAction]:
        """Handle a live message."""
        self.silent = False
        self._stats.last_message_s = now
        went_back = self._position.goes_back(number)
        self._position.live = number
        if went_back:
            return self._restarted(number, payload, now=now)
        if self._progress is not None:
            self._queue.add(number, payload)
            return []
        return self._next(number, payload, now=now)

    def continues(self, number: int) -> bool:
        """Return whether a live message of this number would only be applied."""
        position = self._position
        return self._progress is None and position.is_next(number) and not position.goes_back(number)

    def continued(self, number: int, payload: bytes, *, now: float) -> int:
        """Handle a live message that `continues`, whose events the caller applies; return its era."""
        self.silent = False
        self._stats.last_message_s = now
        self._position.live = number
        return self.known.advance(number, payload).era

    def replayed(self, generation: int, number: int, payload: bytes) -> list[FeedAction]:
        """Handle a message of a replay."""
        progress = self._progress
        if progress is None or generation != self._generation or progress.useless:
            return []
        first, progress.began = not progress.began, True
        position = self._position
        if first and (progress.whole or position.last is None or number > position.last):
            # For a gap: the publisher does not retain its messages any longer.
            actions = self.known.end_era()
            self.known.begin(complete=progress.whole and number == 0, lost=False)
            return [*actions, self.known.advance(number, payload)]
        assert position.last is not None
        if first:
            progress.useless = progress.other_process = not position.has_content(payload)
            return []
        if position.is_next(number):
            return [self.known.advance(number, payload)]
        # A hole in the replay; what follows it is requested again.
        progress.useless = number > position.last
        return []

    def replay_ended(self, generation: int, *, now: float) -> list[FeedAction]:
        """Handle the end of a replay."""
        progress = self._progress
        if progress is None or generation != self._generation:
            return []
        self._progress = None
        if progress.whole and not progress.began:
            # The process has published nothing.
            actions = self.known.end_era()
            self.known.begin(complete=True, lost=False)
            self._position.last = -1
            return [*actions, *self._drain(now=now)]
        if progress.other_process or not progress.began:
            self._stats.restarts += 1
            return [*self.known.end_era(restarted=True), *self._request(FeedState.RESTARTED, whole=True, now=now)]
        if progress.useless:
            return self._request(progress.state, whole=False, now=now)
        return self._drain(now=now)

    def replay_failed(self, generation: int, *, now: float) -> list[FeedAction]:
        """Handle a replay without an end: forget the blocks, continue with the live messages."""
        if self._progress is None or generation != self._generation:
            return []
        return self._give_up(now=now)

    # -- steps

    def _next(self, number: int, payload: bytes, *, now: float) -> list[FeedAction]:
        last = self._position.last
        if last is None:
            self.known.begin(complete=number == 0, lost=number != 0)
            return [self.known.advance(number, payload)]
        if number <= last:
            return []  # a replay has had it
        if number == last + 1:
            return [self.known.advance(number, payload)]
        self._stats.gaps += 1
        self._queue.add(number, payload)
        return self._request(FeedState.GAP, whole=False, now=now)

    def _restarted(self, number: int, payload: bytes, *, now: float) -> list[FeedAction]:
        self._stats.restarts += 1
        self._progress = None
        self._queue.drop_all()
        self._limit.end_row()
        actions = self.known.end_era(restarted=True)
        if number == 0:
            return [*actions, *self._next(number, payload, now=now)]
        self._queue.add(number, payload)
        return [*actions, *self._request(FeedState.RESTARTED, whole=True, now=now)]

    def _request(self, state: FeedState, *, whole: bool, now: float) -> list[FeedAction]:
        if not self._limit.may_replay(now=now):
            return self._give_up(now=now)
        # With nothing applied there is nothing to compare.
        last = self._position.last
        start = 0 if whole or last is None else max(last, 0)
        self._progress = RunningReplay(state, whole=whole or last is None or last < 0)
        self._limit.count()
        self._generation += 1
        self._stats.replays += 1
        return [Replay(start, self._generation)]

    def _give_up(self, *, now: float) -> list[FeedAction]:
        """Continue with the live messages alone."""
        self._progress = None
        return [*self._without_replay(now=now), *self._drain(now=now)]

    def _without_replay(self, *, now: float) -> list[FeedAction]:
        if self._limit.fail(now=now):
            self._stats.failed_replays += 1
        return self.known.end_era()

    def _drain(self, *, now: float) -> list[FeedAction]:
        """Apply what waited for a replay, up to a gap that can be replayed."""
        actions: list[FeedAction] = []
        while self._queue:
            number, payload = self._queue.pop()
            last = self._position.last
            if last is not None and number > last + 1:
                if self._limit.may_replay(now=now):
                    self._queue.put_back(number, payload)
                    return [*actions, *self._request(FeedState.GAP, whole=False, now=now)]
                actions += self._without_replay(now=now)
            actions += self._next(number, payload, now=now)
        self._limit.end_row()
        return actions
