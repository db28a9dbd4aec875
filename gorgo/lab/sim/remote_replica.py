"""One replica of a run as the proxy sees it: network, connections and engine.

Owns the times of requests on the network. A request leaves on a pooled connection, takes the round trips of its body,
and its first and last tokens arrive a trip after they leave the engine. A dying replica resets open connections, which
the proxy learns a trip later; later requests are refused. Of an answer that breaks off it notes what the client has.
`port` has probes and scrapes on the same connections.

A profile with data-parallel `ranks` is as many engines, to which requests go in turn. Of these, observers (the oracle,
reports of caches) see the first.

Simplified: a partition resets connections like a death (in a real one they hang until a time-out), and gaps
between tokens are the engine's own, without the jitter of each one's trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

from gorgo.config.model import LimitsConfig
from gorgo.config.values import CONNECTIONS_PER_REPLICA
from gorgo.core.continuation import RECHECK_S, STALL_GAPS, STALL_S
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.errors import BadRequest
from gorgo.lab.sim.engine.driver import AnswerSoFar, EngineDriver, SimAttempt
from gorgo.lab.sim.engine.engines import CacheReporter, Engine, make_engine
from gorgo.lab.sim.engine.itl import ItlHistogram, p95_s
from gorgo.lab.sim.engine.request import EngineRequest, Stage
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimReplica
from gorgo.lab.sim.network import Link, RandomTable, TripDelays, error_outcome
from gorgo.lab.sim.port import Callbacks, ReplicaPort, background_trips, completed_outcome

#: Of a client that has no part of an answer.
_NOTHING = AnswerSoFar(0, (), 0.0)
#: A token that comes just when its stream ends has come.
_ROUNDING = 1e-6


class RemoteReplica:
    """One replica.

    Parameters
    ----------
    kernel, shell:
        The event queue, and the receiver of events.
    replica, number:
        Its spec, profile and link; its place in the fleet.
    draws:
        Random numbers of the run.
    block_tokens:
        Tokens of one item of a request's key.
    gaps:
        Histogram of the gaps between tokens of completed requests.
    has_samples:
        Whether the Router retains samples, which alone have the gaps of one request.
    ahead:
        As in `EngineDriver`.
    """

    def __init__(
        self,
        kernel: EventQueue,
        shell: Callbacks,
        replica: SimReplica,
        *,
        number: int,
        draws: RandomTable,
        block_tokens: int,
        gaps: ItlHistogram,
        has_samples: bool = True,
        ahead: bool = True,
    ) -> None:
        self._kernel = kernel
        self.replica = replica
        self.name = replica.name
        self._block_tokens = block_tokens
        self._gaps, self._has_samples, self._ahead = gaps, has_samples, ahead
        self._slowdown = 1.0
        self._reporter: CacheReporter | None = None
        self._engines = self._new_engines()
        #: Requests that have arrived: each goes to the next rank.
        self._arrived = 0
        #: Preemptions of engines that died.
        self._preempted_before = 0
        #: The ways of routers to it; the first is that of `shell`.
        self.ports = [ReplicaPort(kernel, self, shell, replica.link, background_trips(draws, number))]
        self._open: dict[SimAttempt, None] = {}
        self._in_transit: dict[SimAttempt, None] = {}
        self._dead = self._unreachable = self._hung = False
        self._delay = (0.0, 0.0, 0.0)
        #: Status of each answer while the engine fails at once.
        self._failing: int | None = None

    # -- for observers

    @property
    def model(self) -> Engine[SimAttempt]:
        """The engine as it is now, the first of several ranks; another one after a death."""
        return self._engines[0].model

    @property
    def models(self) -> Sequence[Engine[SimAttempt]]:
        """The engines of all ranks."""
        return [engine.model for engine in self._engines]

    @property
    def in_transit(self) -> list[tuple[float, EngineRequest]]:
        """Requests sent and not there yet, with the times at which they will arrive."""
        return [(sending.arrives_s, sending) for sending in self._in_transit]

    @property
    def link(self) -> Link:
        """Present link of the first router."""
        return self.ports[0].link

    @property
    def rtt_s(self) -> float:
        """Present mean round trip of the first router."""
        return self.ports[0].rtt_s

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines that were here."""
        return self._preempted_before + sum(model.totals.preemptions for model in self.models)

    @property
    def alive(self) -> bool:
        return not (self._dead or self._unreachable)

    def probe_first(self) -> None:
        """Run the probes of all routers before the start."""
        for port in self.ports:
            port.probe_first()

    def add_port(self, shell: Callbacks, link: Link, trips: TripDelays) -> ReplicaPort:
        """Add the way of one more router."""
        port = ReplicaPort(self._kernel, self, shell, link, trips)
        self.ports.append(port)
        return port

    def report_to(self, reporter: CacheReporter) -> None:
        """Report the cache of the engine, and of each that follows it."""
        self._reporter = reporter
        reporter.attach(self.model)

    # -- requests

    def send(self, sending: SimAttempt, port: ReplicaPort | None = None) -> None:
        """A request leaves for the engine now, by default from the first router."""
        now = self._kernel.now
        sending.port = port = self.ports[0] if port is None else port
        self._open[sending] = None
        port.open_attempts += 1
        if port.open_attempts > CONNECTIONS_PER_REPLICA:
            outcome = Outcome(AttemptResult.BUSY, error="connections_exhausted")
            self._kernel.at(now, partial(self._end, sending, outcome))
            return
        sending.pooled, waits = port.pool.acquire(sending.body_bytes, now=now)
        if not self.alive:
            refused_s = now + sending.trips.round_trip_s(port.link)
            self._kernel.at(refused_s, partial(self._fail, sending, "connect_failed"))
            return
        out_s = sending.trips.out_s(port.link, waits)
        sending.arrives_s = now + out_s + self._delayed_s(sending.trips) + port.link.transfer_s(sending.body_bytes)
        self._in_transit[sending] = None
        self._kernel.at(sending.arrives_s, partial(self._arrive, sending))

    def time_out(self, sending: SimAttempt) -> None:
        """The proxy waits no longer."""
        self._cancel(sending, Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"))

    def can_move(self, sending: SimAttempt) -> bool:
        """Return whether it is a stream that has begun, and whose end has not left the engine."""
        return sending.has_first_token and not sending.done and sending.stage is not Stage.FINISHED

    def so_far(self, sending: SimAttempt) -> AnswerSoFar:
        """Return what the client has of a stream that has begun."""
        if not self._hung:  # else that was noted when it stood still
            self._settle()
            self._break_off(sending, self._kernel.now)
        assert sending.so_far is not None, "it has its first token"
        return sending.so_far

    def end_stream(self, sending: SimAttempt, why: str) -> None:
        """The proxy ends a stream whose answer goes on at another replica, because it was moved or stands still."""
        result = AttemptResult.SUPERSEDED if why == "moved" else AttemptResult.FAILED_AFTER_CONTENT
        self._cancel(sending, Outcome(result, status=200, error=why))

    def cancel(self, sending: SimAttempt) -> None:
        """Another attempt has answered."""
        self._cancel(sending, Outcome(AttemptResult.SUPERSEDED))

    def _cancel(self, sending: SimAttempt, outcome: Outcome) -> None:
        """The proxy closes the connection, and the engine drops the request when it hears so."""
        if sending.done:
            return
        if sending.pooled is not None:
            sending.port.pool.close(sending.pooled)
        heard_s = self._kernel.now + sending.trips.one_way_s(sending.port.link)
        self._kernel.at(heard_s, partial(self._drop, self._engines, sending))
        self._end(sending, outcome)

    # -- faults

    def set_slowdown(self, factor: float) -> None:
        self._slowdown = factor
        for engine in self._engines:
            engine.set_slowdown(factor)

    def set_rtt(self, rtt_s: float) -> None:
        """Replace the round trip of the first router; those of others change alike."""
        factor = rtt_s / self.rtt_s if self.rtt_s else 1.0
        for port in self.ports[1:]:
            port.link = replace(port.link, rtt_s=port.link.rtt_s * factor)
        self.ports[0].link = replace(self.ports[0].link, rtt_s=rtt_s)

    def set_path_delay(self, share: float, low_s: float, high_s: float) -> None:
        self._delay = (share, low_s, high_s)

    def set_failing(self, status: int | None) -> None:
        """Answer each request that arrives with an error status; `None` ends it."""
        self._failing = status

    def set_reachable(self, reachable: bool) -> None:
        """Cut the network: the cache stays, running requests are lost."""
        self._unreachable = not reachable
        if not reachable:
            self._lose_open()

    def kill(self) -> None:
        self._dead = True
        if self._hung:
            self._hung = False
            self._set_monitored(True)
        self._lose_open()
        for engine in self._engines:
            engine.stop()
        self._preempted_before = self.preemptions
        self._engines = self._new_engines()
        if self._reporter is not None:
            self._reporter.attach(self.model)

    def hang(self) -> None:
        """Stand still with open connections, until killed. The proxy takes streams for stalled after a while."""
        self._hung = True
        self._settle()
        for engine in self._engines:
            engine.stop()
        self._set_monitored(False)
        for sending in self._open:
            if sending.first_token_arrival_s is None or sending.stage is Stage.FINISHED or sending.done:
                continue
            self._break_off(sending, inf)
            assert sending.so_far is not None, "it has its first token"
            usual_s = max([gap_s for gap_s, _ in sending.so_far.gaps[-1:]], default=0.0)
            stalled_s = sending.so_far.last_s + max(STALL_S, STALL_GAPS * usual_s)
            self._kernel.at(max(stalled_s, self._kernel.now), partial(self._stall, sending))
            silent_s = max(stalled_s, sending.so_far.last_s + LimitsConfig().stream_idle_timeout_s)
            self._kernel.at(silent_s, partial(self._end_silent, sending))

    def revive(self) -> None:
        self._dead = False
        if self._reporter is not None:
            self._reporter.started()

    # -- helpers

    def _stall(self, sending: SimAttempt) -> None:
        if not sending.done:
            sending.port.shell.on_stalled(sending)
            self._kernel.at(self._kernel.now + RECHECK_S, partial(self._stall, sending))

    def _end_silent(self, sending: SimAttempt) -> None:
        if not sending.done:
            self._cancel(sending, _broken(sending, AttemptResult.FAILED_AFTER_CONTENT, "timeout"))

    def _set_monitored(self, answers: bool) -> None:
        for port in self.ports:
            port.background.reports_metrics = port.background.reports_probes = answers

    def _settle(self) -> None:
        """Bring the tokens and gaps of the engines' requests up to now."""
        for engine in self._engines:
            _ = engine.model

    def _new_engines(self) -> list[EngineDriver]:
        return [self._new_engine() for _ in range(self.replica.profile.ranks)]

    def _new_engine(self) -> EngineDriver:
        model: Engine[SimAttempt] = make_engine(self.replica.profile, item_bytes=8, item_tokens=self._block_tokens)
        model.slowdown = self._slowdown
        return EngineDriver(
            self._kernel, model, first_token=self._first_token, finished=self._finished, ahead=self._ahead
        )

    def _delayed_s(self, trips: TripDelays) -> float:
        share, low_s, high_s = self._delay
        if not share or trips.uniform() >= share:
            return 0.0
        return low_s + (high_s - low_s) * trips.uniform()

    def _arrive(self, sending: SimAttempt) -> None:
        if self._in_transit.pop(sending, True) is not None:
            return  # Lost on the way.
        if self._hung:
            return
        if self._failing is not None:
            self._refuse(sending, error_outcome(self._failing))
            return
        try:
            sending.rank = self._arrived % len(self._engines)
            self._arrived += 1
            self._engines[sending.rank].submit(sending)
        except BadRequest as refusal:
            self._refuse(sending, Outcome(AttemptResult.UPSTREAM_4XX, status=400, error=str(refusal), unsent=True))

    def _refuse(self, sending: SimAttempt, outcome: Outcome) -> None:
        self._kernel.at(
            self._kernel.now + sending.trips.one_way_s(sending.port.link), partial(self._end, sending, outcome)
        )

    def _first_token(self, sending: SimAttempt, at_s: float) -> None:
        sending.first_token_arrival_s = at_s + sending.trips.one_way_s(sending.port.link)
        self._kernel.at(sending.first_token_arrival_s, partial(self._receive_first_token, sending))

    def _receive_first_token(self, sending: SimAttempt) -> None:
        if not sending.done:
            sending.has_first_token = True
            sending.port.shell.on_first_token(sending)

    def _finished(self, sending: SimAttempt, at_s: float) -> None:
        assert sending.first_token_arrival_s is not None, "the first token comes first"
        pairs = self._own_gaps(sending)
        self._gaps.add(pairs if sending.before is None else [*sending.before.gaps, *pairs])
        outcome = completed_outcome(sending, itl_s_p95=p95_s(pairs) if self._has_samples else None)
        end_arrival_s = max(sending.first_token_arrival_s, at_s + sending.trips.one_way_s(sending.port.link))
        self._kernel.at(end_arrival_s, partial(self._end, sending, outcome))

    def _own_gaps(self, sending: SimAttempt) -> list[tuple[float, int]]:
        """Return the gaps of an attempt, from the client's last token before a seam on."""
        pairs = self._engines[sending.rank].gaps(sending)
        if sending.before is None or sending.first_token_arrival_s is None:
            return pairs
        return [(sending.first_token_arrival_s - sending.before.last_s, 1), *pairs]

    def _break_off(self, sending: SimAttempt, heard_s: float) -> None:
        """Note what the client has by the time at which the proxy hears of the end, or ends the stream itself."""
        if sending.first_token_arrival_s is None:
            return
        before, own_gaps = sending.before or _NOTHING, self._own_gaps(sending)
        seam = own_gaps[: 0 if sending.before is None else 1]
        last_s, gaps = sending.first_token_arrival_s, []
        for gap_s, times in own_gaps[len(seam) :]:
            came = min(float(times), (heard_s - last_s) / gap_s + _ROUNDING) // 1
            if came >= 1:
                gaps.append((gap_s, int(came)))
                last_s += came * gap_s
            if came < times:
                break  # The rest is still on its way, and lost.
        tokens = before.tokens + 1 + sum([times for _, times in gaps])
        sending.so_far = AnswerSoFar(tokens, (*before.gaps, *seam, *gaps), last_s)

    def _end(self, sending: SimAttempt, outcome: Outcome) -> None:
        if sending.done:
            return
        sending.done = True
        del self._open[sending]
        sending.port.open_attempts -= 1
        # Before the report, as in the proxy: a queued request may take the connection.
        if sending.pooled is not None:
            sending.port.pool.release(sending.pooled, now=self._kernel.now)
        sending.port.shell.on_end(sending, outcome)

    def _fail(self, sending: SimAttempt, reason: str) -> None:
        if sending.pooled is not None:
            sending.port.pool.close(sending.pooled)
        if sending.has_first_token:
            self._end(sending, _broken(sending, AttemptResult.FAILED_AFTER_CONTENT, reason))
        else:
            self._end(sending, Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error=reason))

    def _drop(self, engines: list[EngineDriver], sending: SimAttempt) -> None:
        """Abort a request on the engine after its client disconnected."""
        self._in_transit.pop(sending, None)
        if engines is self._engines:
            engines[sending.rank].abort(sending)

    def _lose_open(self) -> None:
        """Reset every connection: tokens that left the engine still arrive."""
        now = self._kernel.now
        self._in_transit.clear()
        for sending in self._open:
            if sending.stage is Stage.FINISHED or sending.done:
                continue
            self._engines[sending.rank].abort(sending)
            heard_s = max(sending.first_token_arrival_s or 0.0, now + sending.trips.one_way_s(sending.port.link))
            self._break_off(sending, heard_s)
            reason = "disconnected"
            if sending.first_token_arrival_s is None and sending.pooled is not None and sending.pooled.used:
                # A pooled connection that breaks before any answer is no failure: retried on a new one, and refused.
                heard_s += sending.trips.round_trip_s(sending.port.link)
                reason = "connect_failed"
            self._kernel.at(heard_s, partial(self._fail, sending, reason))
        for port in self.ports:
            port.pool.lose_all()


def _broken(sending: SimAttempt, result: AttemptResult, error: str) -> Outcome:
    """Return the outcome of an answer that the client has in part."""
    assert sending.so_far is not None, "it broke off behind its first token"
    return Outcome(result, status=200, error=error, partial_tokens=sending.so_far.tokens)
