"""The routers of a run: the shell around each, how many there are, and what they know of each other.

`RouterShell` carries out a Router's actions and reports events to it, as the proxy does: it owns the Router's attempts,
its timer, the time-outs of attempts without content, and its ports to the replicas. `RouterGroup` has the settings of a
group, `PeerStore` carries their reports; what a report says is left to `gorgo.core.peers`. The simulation has the feed
and the records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Literal

import numpy as np

from gorgo.config.values import FIRST_TOKEN_TIMEOUT_S
from gorgo.core.continuation import MOST_BACKLOG_S, MOST_PAUSE_S, MOVE_INTERVAL_S
from gorgo.core.messages.actions import Action, Cancel, Continue, Dispatch, Forward, Hedge, Reject
from gorgo.core.messages.request import AttemptResult, EngineSample, OpenConnection, Outcome
from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.exchange import is_urgent
from gorgo.core.peers.records import PeerReport
from gorgo.core.router import Router
from gorgo.errors import ConfigError
from gorgo.lab.sim.engine.driver import AnswerSoFar, SimAttempt
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import LATER, Link, RandomTable, TripDelays
from gorgo.lab.sim.open_requests import OpenRequests
from gorgo.lab.sim.port import ReplicaPort
from gorgo.lab.sim.remote_replica import RemoteReplica
from gorgo.lab.sim.topology import ClientTrip, Topology
from gorgo.lab.sim.workload import SimRequest

# Times at which the proxy acts by itself. One event is for all time-outs: attempts wait equally long, so the one sent
# first is due first.


class FirstTokenTimeouts:
    """Time-outs of attempts without a first token."""

    def __init__(self, kernel: EventQueue) -> None:
        self._kernel = kernel
        #: In the order of their times; those that have ended go when they are first, so it holds what was sent in the
        #: last two minutes at most.
        self._waiting: deque[tuple[float, SimAttempt, RemoteReplica]] = deque()

    def watch(self, sending: SimAttempt, site: RemoteReplica) -> None:
        """An attempt is sent to `site` now."""
        due_s = self._kernel.now + FIRST_TOKEN_TIMEOUT_S
        self._waiting.append((due_s, sending, site))
        if len(self._waiting) == 1:
            self._kernel.at(due_s, self._check)

    def _check(self) -> None:
        waiting, now = self._waiting, self._kernel.now
        late: list[tuple[SimAttempt, RemoteReplica]] = []
        while waiting and (_is_settled(waiting[0][1]) or waiting[0][0] <= now):
            _, sending, site = waiting.popleft()
            if not _is_settled(sending):
                late.append((sending, site))
        if waiting:
            self._kernel.at(waiting[0][0], self._check)
        for sending, site in late:
            site.time_out(sending)


def _is_settled(sending: SimAttempt) -> bool:
    return sending.done or sending.has_first_token


class RouterTimer:
    """Wakes the Router at its next time.

    Parameters
    ----------
    kernel:
        The event queue.
    next_s:
        Returns when it is to be woken, `None`: not at all. Any event can change it.
    wake:
        Called then.
    """

    def __init__(self, kernel: EventQueue, next_s: Callable[[], float | None], wake: Callable[[], None]) -> None:
        self._kernel = kernel
        self._next_s = next_s
        self._wake = wake
        self._due_s: float | None = None

    def arm(self) -> None:
        """Schedule the next time; called after every event that can bring it forward."""
        due_s = self._next_s()
        if due_s is not None and (self._due_s is None or due_s < self._due_s):
            self._due_s = due_s
            self._kernel.at(max(due_s, self._kernel.now), partial(self._expire, due_s))

    def _expire(self, due_s: float) -> None:
        if due_s == self._due_s:  # Else it was to be woken earlier, and was.
            self._due_s = None
            self._wake()


#: Keys of trips per request: more than the attempts that any limit allows in practice.
KEYS_PER_REQUEST = 8


@dataclass(frozen=True, slots=True)
class RunParts:
    """What the shells of a run share."""

    kernel: EventQueue
    draws: RandomTable
    served: OpenRequests
    #: Called after a request has ended.
    on_request_end: Callable[[], None]
    #: Returns an outcome as Routers receive it.
    reported: Callable[[Outcome], Outcome]


@dataclass(frozen=True, slots=True)
class OpenRest:
    """The rest of an answer, asked for while the stream of the answer is open; whichever goes on first has it."""

    old: SimAttempt
    new: SimAttempt
    dispatch: Dispatch
    #: What the client has until then: what the stream brings is held.
    part: AnswerSoFar
    why: str


class RouterShell:
    """One Router in virtual time.

    Parameters
    ----------
    router:
        May be replaced (`replace_router`).
    run:
        Parts of the run.
    publish:
        Carries a report to the other routers now; `None` without a store.
    """

    def __init__(self, router: Router, run: RunParts, *, publish: Callable[[RouterShell], None] | None = None) -> None:
        self.router = router
        self._run = run
        self._kernel = run.kernel
        self._publish = publish
        #: By replica.
        self.ports: dict[str, tuple[RemoteReplica, ReplicaPort]] = {}
        #: Attempts that have not ended, by id.
        self._attempts: dict[str, tuple[SimAttempt, RemoteReplica]] = {}
        #: Requests that have not ended, with what their clients have of an answer that broke off.
        self._requests: dict[str, AnswerSoFar | None] = {}
        #: By request.
        self._rests: dict[str, OpenRest] = {}
        #: Streams whose answers go on elsewhere, and why, until their ends are reported; and those that stay.
        self._left: dict[str, str] = {}
        self._staying: set[str] = set()
        self._deadlines = FirstTokenTimeouts(self._kernel)
        self._timer = RouterTimer(self._kernel, lambda: self.router.next_timer(), self._wake)
        #: The next connections as of the Router's next event.
        self._connections: dict[str, OpenConnection | None] = {}

    # -- events of replicas

    def on_connection(self, replica: str, connection: OpenConnection | None) -> None:
        self._connections[replica] = connection

    def on_probe(self, replica: str, rtt_s: float | None) -> None:
        self.carry_out(self.informed().replicas.on_probe(replica, rtt_s, now=self._kernel.now))

    def on_sample(self, replica: str, sample: EngineSample | None) -> None:
        self.carry_out(self.router.replicas.on_engine_sample(replica, sample, now=self._kernel.now))

    def on_first_token(self, sending: SimAttempt) -> None:
        now = self._kernel.now
        rest = self._rests.get(sending.request_id)
        if rest is not None and rest.new is sending:
            self._left[rest.old.attempt_id] = rest.why
            self._take_rest(rest)
        self._run.served.first_token(sending.request_id, self._attempts[sending.attempt_id][1], now=now)
        self.carry_out(self.informed().on_first_token(sending.attempt_id, now=now))

    def on_stalled(self, sending: SimAttempt) -> bool:
        return self._continue_beside(sending, "stalled")

    def on_end(self, sending: SimAttempt, outcome: Outcome) -> None:
        if self._attempts.pop(sending.attempt_id, None) is None:
            return  # Of a Router that was replaced.
        self._staying.discard(sending.attempt_id)
        is_left = self._left.pop(sending.attempt_id, None) is not None
        rest = self._rests.get(sending.request_id)
        if rest is not None and rest.old is sending and outcome.partial_tokens:
            # The answer is left to the rest, which begins where the client is.
            self._take_rest(rest)
            sending.so_far, is_left = rest.part, True
            outcome = replace(outcome, partial_tokens=rest.part.tokens)
        elif rest is not None and rest.old is sending:
            self.carry_out(self.informed().on_resumed(sending.attempt_id, now=self._kernel.now))
        elif rest is not None and rest.new is sending:
            del self._rests[sending.request_id]
            is_left = True
        if is_left:
            _, others = self.informed().on_finish(sending.attempt_id, self._run.reported(outcome), now=self._kernel.now)
            self.carry_out(others)
            return
        outcome = self._broken_off(sending, outcome)
        action, others = self.informed().on_finish(
            sending.attempt_id, self._run.reported(outcome), now=self._kernel.now
        )
        # A refusal ends its request if the Router forwards it, and a broken answer unless it goes on.
        ended = outcome.result.final or bool(outcome.continue_on)
        if isinstance(action, Forward) if outcome.unsent else ended and not isinstance(action, Continue):
            self._run.served.on_result(sending.request_id, outcome, now=self._kernel.now)
            self._end_request(sending.request_id)
        self.carry_out(others if action is None or isinstance(action, Forward) else [action, *others])

    # -- events of the run

    def submit(self, request: SimRequest, trip: ClientTrip | None = None) -> None:
        """A request is here now, from a client elsewhere by its trip."""
        now = self._kernel.now
        route_request = self._run.served.received(request, now=now, trip=trip)
        self._requests[route_request.request_id] = None
        action, others = self.informed().submit(route_request, now=now)
        self.carry_out([*others, action])

    def informed(self) -> Router:
        """Return the Router for its next event, with the connections of now."""
        if self._connections:
            for replica, connection in self._connections.items():
                self.router.replicas.on_connection(replica, connection, now=self._kernel.now)
            self._connections.clear()
        return self.router

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the Router wants."""
        for action in actions:
            match action:
                case Dispatch():
                    self._dispatch(action)
                case Hedge():
                    self._run.served.hedged(action.request_id)
                    self._dispatch(action.dispatch)
                case Continue():
                    part = self._requests[action.request_id]
                    assert part is not None, "there is an answer to continue"
                    self._run.served.continued(action.request_id, part.tokens)
                    self._dispatch(action.dispatch)
                case Cancel():
                    sending, site = self._attempts[action.attempt_id]
                    why = self._left.get(action.attempt_id)
                    if why is None:
                        site.cancel(sending)
                    else:
                        site.end_stream(sending, why)
                case Reject():
                    self._run.served.rejected(action, now=self._kernel.now)
                    self._end_request(action.request_id)
        self.arm()

    def arm(self) -> None:
        """Schedule the Router's next timer, which any event can bring forward."""
        self._timer.arm()

    def set_draining(self, replica: str, draining: bool) -> None:
        """Drain a replica and have its streams go on elsewhere, as by `gorgo drain --move`; or undo it."""
        self.informed().replicas.drain(replica, draining, now=self._kernel.now)
        if draining:
            self._move(replica)
        self.arm()

    def _move(self, replica: str) -> None:
        """Move the oldest stream if another replica has a short queue, and the next one soon."""
        site = self.ports[replica][0]
        streams = [each for each, at in self._attempts.values() if at is site and self._may_move(each, site)]
        if not streams or replica not in self.router.view.draining():
            return
        if self.router.view.has_short_queue(backlog_s=MOST_BACKLOG_S, now=self._kernel.now):
            for each in sorted(streams, key=lambda each: each.first_token_arrival_s or 0.0):
                if self._continue_beside(each, "moved"):
                    break
        self._kernel.at(self._kernel.now + MOVE_INTERVAL_S, partial(self._move, replica))

    def _may_move(self, sending: SimAttempt, site: RemoteReplica) -> bool:
        return site.can_move(sending) and sending.attempt_id not in self._staying

    def _continue_beside(self, sending: SimAttempt, why: str) -> bool:
        """Ask another replica for the rest of an answer whose stream stays open; return whether one was asked."""
        router, now, replicas = self.informed(), self._kernel.now, frozenset(self.ports)
        if sending.request_id in self._rests or not router.can_continue(sending.attempt_id, replicas, now=now):
            return False
        part = self._attempts[sending.attempt_id][1].so_far(sending)
        action = router.continue_beside(sending.attempt_id, replicas, part.tokens, now=now)
        if action is None:
            return False
        dispatch = action.dispatch
        self._run.served.opened_beside(dispatch)
        request = self._run.served.rest_of(sending.request_id, part.tokens)
        new = self._attempt(dispatch, request, part)
        self._rests[sending.request_id] = rest = OpenRest(sending, new, dispatch, part, why)
        self._send(new, dispatch)
        if why == "moved":
            self._kernel.at(now + MOST_PAUSE_S, partial(self._stay, rest))
        self.arm()
        return True

    def _stay(self, rest: OpenRest) -> None:
        """Leave an answer that was held back for long to its own stream."""
        if self._rests.get(rest.new.request_id) is rest:
            self._staying.add(rest.old.attempt_id)
            self.carry_out(self.informed().on_resumed(rest.old.attempt_id, now=self._kernel.now))

    def _take_rest(self, rest: OpenRest) -> None:
        """The answer goes on at the other replica, from what the client has."""
        request_id = rest.new.request_id
        del self._rests[request_id]
        self._requests[request_id] = rest.part
        self._run.served.continued(request_id, rest.part.tokens)
        self._run.served.dispatched(rest.dispatch, now=self._kernel.now)

    # -- peers

    def has_news(self) -> bool:
        exchange = self.router.peers.exchange
        return exchange is not None and exchange.has_news(now=self._kernel.now)

    def write_report(self) -> PeerReport:
        return self.router.peers.report(now=self._kernel.now)

    def on_peer(self, report: PeerReport, *, age_s: float) -> None:
        router = self.informed() if self.router.queued else self.router
        actions = router.peers.on_report(report, now=self._kernel.now, age_s=age_s)
        if actions or router.queued:
            self.carry_out(actions)
        exchange = self.router.peers.exchange
        assert exchange is not None, "it has joined"
        hints = exchange.probe_hints
        while hints:
            self.ports[hints.popleft()][1].background.probe()

    def replace_router(self, router: Router) -> None:
        """Kill the process: its connections break and its requests fail. `router`, a new one, takes its place."""
        now = self._kernel.now
        killed, self._attempts = self._attempts, {}
        for request_id in list(self._requests):
            self._run.served.broken(request_id, "router_killed", now=now)
        self._requests.clear()
        self._rests.clear()
        self._left.clear()
        self._staying.clear()
        for sending, site in killed.values():
            site.cancel(sending)
        self.router = router
        self._connections.clear()
        for _, port in self.ports.values():
            port.pool.lose_all()
            port.probe_first()
        self._run.on_request_end()

    # -- helpers

    def _dispatch(self, dispatch: Dispatch) -> None:
        request = self._run.served.dispatched(dispatch, now=self._kernel.now)
        self._send(self._attempt(dispatch, request, self._requests[dispatch.request_id]), dispatch)

    def _attempt(self, dispatch: Dispatch, request: SimRequest, before: AnswerSoFar | None) -> SimAttempt:
        return SimAttempt(
            dispatch.request_id,
            dispatch.attempt_id,
            request.blocks,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            body_bytes=request.body_bytes,
            output_key=request.output_blocks,
            trips=TripDelays(self._run.draws, request.index * KEYS_PER_REQUEST + dispatch.attempt),
            before=before,
        )

    def _send(self, sending: SimAttempt, dispatch: Dispatch) -> None:
        site, port = self.ports[dispatch.replica]
        self._attempts[dispatch.attempt_id] = sending, site
        self._deadlines.watch(sending, site)
        site.send(sending, port)
        if self._publish is not None and is_urgent(dispatch):
            self._publish(self)

    def _broken_off(self, sending: SimAttempt, outcome: Outcome) -> Outcome:
        """Return the outcome, with the replicas that can go on if it leaves an answer that the client has in part."""
        part = sending.so_far if outcome.partial_tokens else sending.before
        if part is None:
            return outcome
        if not outcome.partial_tokens:
            if outcome.result is not AttemptResult.UPSTREAM_4XX:
                return outcome
            # The request for the rest is the proxy's own.
            outcome = replace(outcome, error="not_continued", sent=True, unsent=False)
        self._requests[sending.request_id] = part
        return replace(outcome, continue_on=frozenset(self.ports), partial_tokens=part.tokens)

    def _end_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._run.on_request_end()

    def _wake(self) -> None:
        self.carry_out(self.informed().handle_timer(now=self._kernel.now))


#: Which router gets a request: `random`, as a load balancer without keys; `session`, as one with session affinity;
#: `region`: by session, and each router is in a region of the fleet.
Split = Literal["random", "session", "region"]
#: `none`: each router learns alone; `store`: they report to each other; `local`: so do the workers of one machine, at
#: shorter intervals; `all`: one router sees and decides all.
Sharing = Literal["none", "store", "local", "all"]
SPLITS: tuple[Split, ...] = ("random", "session", "region")
SHARINGS: tuple[Sharing, ...] = ("none", "store", "local", "all")
#: Between two reports of a router, s, and from a report to its receipt: over a store in the same region, and over a
#: socket of one machine.
INTERVALS_S: Mapping[Sharing, float] = {"local": 0.01}
DELAYS_S: Mapping[Sharing, float] = {"local": 0.001}
STORE_INTERVAL_S, STORE_DELAY_S = 0.1, 0.005
#: Within one region.
_LOCAL_RTT_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGroup:
    """Routers of one fleet.

    Parameters
    ----------
    count:
        Routers.
    split, sharing:
        As the types say.
    delay_s:
        From a report to its receipt by the others. `None`: as `sharing` has it (`DELAYS_S`).
    loss:
        Share of reports that a receiver never gets.
    topology:
        Where each router is, and its clients, in place of `split`. None: as the fleet has its links.
    """

    count: int = 1
    split: Split = "random"
    sharing: Sharing = "none"
    delay_s: float | None = None
    loss: float = 0.0
    topology: Topology | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"{self.count} routers; expected at least 1")
        if self.split == "region" and self.sharing == "all":
            raise ConfigError("one router that sees all is in one region; expected the split 'random' or 'session'")
        if not (self.report_delay_s >= 0.0 and 0.0 <= self.loss <= 1.0):
            raise ConfigError("reports take a time that is not negative and are lost with a share of 0 to 1")

    def placed(self, topology: Topology | None) -> RouterGroup:
        """Return the group with its routers in their places; raises `ConfigError` where these contradict it."""
        if topology is None:
            return self
        count = len(topology.routers)
        if self.count not in (1, count):
            raise ConfigError(f"{self.count} routers, and a scenario that has {count}; expected no number beside it")
        if self.split != "random" or (self.sharing == "all" and count > 1):
            raise ConfigError(
                f"split {self.split!r}, sharing {self.sharing!r} and routers with places; expected no split, and "
                "sharing none, store or local"
            )
        return replace(self, count=count, topology=topology)

    @property
    def reports(self) -> bool:
        """Return whether the routers report to each other."""
        return self.sharing in ("store", "local")

    @property
    def report_delay_s(self) -> float:
        """Return the time from a report to its receipt, s."""
        return DELAYS_S.get(self.sharing, STORE_DELAY_S) if self.delay_s is None else self.delay_s

    @property
    def interval_s(self) -> float:
        """Return the time between two reports of a router, s."""
        return INTERVALS_S.get(self.sharing, STORE_INTERVAL_S)

    @property
    def shells(self) -> int:
        """Return the routers that decide."""
        return 1 if self.sharing == "all" else self.count

    def router_of(self, request: SimRequest, *, seed: int) -> int:
        """Return the router of a request."""
        if self.shells == 1:
            return 0
        if self.split == "random":
            key = f"{seed} {request.index}"
        else:
            key = f"{request.prefix_hash if request.session_id is None else request.session_id}"
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % self.count

    def links(self, fleet: SimFleet, number: int) -> Sequence[Link]:
        """Return the links of a router to the replicas.

        The fleet's are those of its proxy. A router elsewhere has its own region near, and others by the way over the
        proxy's region, which is the longest that they can be.
        """
        if self.topology is not None:
            return [each.link for each in self.topology.fleet_of(fleet, number).replicas]
        links = [each.link for each in fleet.replicas]
        if self.split != "region":
            return links
        regions = list(dict.fromkeys(each.region for each in fleet.replicas))
        home = regions[number % len(regions)]
        away_s = min(each.link.rtt_s for each in fleet.replicas if each.region == home)
        if away_s <= _LOCAL_RTT_S:
            return links
        return [
            replace(each.link, rtt_s=_LOCAL_RTT_S if each.region == home else away_s + each.link.rtt_s)
            for each in fleet.replicas
        ]


#: A run of one router.
ONE_ROUTER = RouterGroup()


# The store of a run carries the reports of routers to the others, with delay and loss, and has a history for one that
# joins. Each report takes its wire form on the way, so that a run has what a store would have.


#: Reports in the history: some minutes of a group, as a trimmed stream has.
MAX_HISTORY = 10_000


class PeerStore:
    """Carries reports.

    Parameters
    ----------
    kernel:
        The event queue.
    group:
        Delay, loss and interval.
    seed:
        Of the loss.
    """

    def __init__(self, kernel: EventQueue, group: RouterGroup, *, seed: int) -> None:
        self._kernel = kernel
        self._group = group
        self._chance = np.random.default_rng([seed, 0x73746F7265])
        self._receivers: Sequence[RouterShell] = ()
        self._history: deque[tuple[float, PeerReport]] = deque(maxlen=MAX_HISTORY)
        #: Reports and their bytes.
        self.reports = self.bytes = 0

    def start(self, receivers: Sequence[RouterShell]) -> None:
        """Let routers report in turn, evenly spread over the interval."""
        self._receivers = receivers
        for number, receiver in enumerate(receivers):
            first_s = self._group.interval_s * (number + 1) / len(receivers)
            self._kernel.at(first_s, partial(self._report_in_turn, receiver))

    def publish(self, sender: RouterShell) -> None:
        """Carry a report of `sender`, written now, to the others."""
        text = encode_report(sender.write_report())
        report = decode_report(text)
        self.reports += 1
        self.bytes += len(text)
        self._history.append((self._kernel.now, report))
        arrival_s = self._kernel.now + self._group.report_delay_s
        others = [each for each in self._receivers if each is not sender]
        if others:
            self._kernel.at(arrival_s, partial(self._deliver, others, report))

    def replay(self, receiver: RouterShell) -> None:
        """Give a router that joins the history."""
        for written_s, report in self._history:
            receiver.on_peer(report, age_s=self._kernel.now - written_s)

    def _deliver(self, receivers: Sequence[RouterShell], report: PeerReport) -> None:
        loss = self._group.loss
        for receiver in receivers:
            if not loss or self._chance.random() >= loss:
                receiver.on_peer(report, age_s=self._group.report_delay_s)

    def _report_in_turn(self, sender: RouterShell) -> None:
        if sender.has_news():
            self.publish(sender)
        self._kernel.at(self._kernel.now + self._group.interval_s, partial(self._report_in_turn, sender))
