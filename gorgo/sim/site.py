"""One replica of a run as the proxy meets it: the way there, connections, and the engine.

Owns time on the way of requests. One leaves on a pooled connection, waits a round trip per flight of its body, reaches
the engine, and its first and last tokens come back a trip later. A replica that dies resets what is open: the proxy
hears of it a trip later, and what it sends afterwards is refused. Probes and scrapes, on the same connections, are
`background`; which attempt is told what is the shell's affair.

What is left out: a partition resets connections like a death (in a real one they hang until a time-out), and gaps
between tokens are the engine's own, without the jitter of each one's trip.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from gorgo.core.request import Ending, OpenConnection, Outcome
from gorgo.errors import BadRequest
from gorgo.sim.background import Background, Listener, background_trips, out_s
from gorgo.sim.engine_model import EngineModel
from gorgo.sim.engine_request import EngineRequest, Stage
from gorgo.sim.fleet import SimReplica
from gorgo.sim.gaps import GapHistogram, p95_s
from gorgo.sim.kernel import Kernel
from gorgo.sim.network import Draws, Link, Trips
from gorgo.sim.pool import Pool
from gorgo.sim.replica import Sending, SimEngine

#: As the proxy's limits: attempts open on one replica at a time.
CONNECTIONS = 1024


class Shell(Listener, Protocol):
    """Who is told."""

    def tell_path(self, replica: str, connection: OpenConnection | None) -> None: ...

    def first_token(self, sending: Sending) -> None: ...

    def ended(self, sending: Sending, outcome: Outcome) -> None: ...


class Site:
    """One replica.

    Parameters
    ----------
    kernel, shell:
        The heap, and who is told.
    replica:
        What it is.
    number:
        Its place in the fleet.
    draws:
        The run's chance.
    block_tokens:
        Tokens of one item of a request's key.
    gaps:
        Takes the times between tokens of what completes.
    ahead:
        As in `SimEngine`.
    """

    def __init__(
        self,
        kernel: Kernel,
        shell: Shell,
        replica: SimReplica,
        *,
        number: int,
        draws: Draws,
        block_tokens: int,
        gaps: GapHistogram,
        ahead: bool = True,
    ) -> None:
        self._kernel = kernel
        self._shell = shell
        self.replica = replica
        self.name = replica.name
        self.link: Link = replica.link
        self._block_tokens = block_tokens
        self._gaps = gaps
        self._ahead = ahead
        self._slowdown = 1.0
        self._engine = self._new_engine()
        self._pool = Pool(self, partial(shell.tell_path, self.name))
        #: What the proxy asks beside requests.
        self.background = Background(
            kernel, shell, self, self._pool, name=self.name, trips=background_trips(draws, number)
        )
        self._open: dict[Sending, None] = {}
        self._travelling: dict[Sending, None] = {}
        self._dead = self._cut_off = False
        self._delay = (0.0, 0.0, 0.0)

    # -- what an onlooker sees

    @property
    def model(self) -> EngineModel[Sending]:
        """The engine as it is now; another one after a death."""
        return self._engine.model

    @property
    def on_the_way(self) -> list[tuple[float, EngineRequest]]:
        """Requests sent and not there yet, with the times at which they will arrive."""
        return [(sending.arrives_s, sending) for sending in self._travelling]

    @property
    def rtt_s(self) -> float:
        """Present mean round trip."""
        return self.link.rtt_s

    @property
    def alive(self) -> bool:
        return not (self._dead or self._cut_off)

    def first_look(self) -> None:
        """What the proxy knows of it before it serves."""
        self._shell.tell_path(self.name, None)
        self.background.first_look()

    # -- requests

    def send(self, sending: Sending) -> None:
        """A request leaves for the engine now."""
        now = self._kernel.now
        self._open[sending] = None
        if len(self._open) > CONNECTIONS:
            outcome = Outcome(Ending.BUSY, error="connections_exhausted")
            self._kernel.at(now, partial(self._end, sending, outcome))
            return
        sending.kept, waits = self._pool.take(sending.body_bytes, now=now)
        if not self.alive:
            refused_s = now + sending.trips.round_trip_s(self.link)
            self._kernel.at(refused_s, partial(self._fail, sending, "connect_failed"))
            return
        sending.arrives_s = now + out_s(sending.trips, self.link, waits) + self._delayed_s(sending.trips)
        self._travelling[sending] = None
        self._kernel.at(sending.arrives_s, partial(self._arrive, sending))

    def give_up(self, sending: Sending) -> None:
        """The proxy waits no longer."""
        self._let_go(sending, Outcome(Ending.FAILED_BEFORE_CONTENT, error="timeout"))

    def cancel(self, sending: Sending) -> None:
        """Another attempt has answered."""
        self._let_go(sending, Outcome(Ending.SUPERSEDED))

    def _let_go(self, sending: Sending, outcome: Outcome) -> None:
        """The proxy closes the connection, and the engine drops the request when it hears so."""
        if sending.over:
            return
        if sending.kept is not None:
            self._pool.close(sending.kept)
        heard_s = self._kernel.now + sending.trips.one_way_s(self.link)
        self._kernel.at(heard_s, partial(self._drop, self._engine, sending))
        self._end(sending, outcome)

    # -- faults

    def set_slowdown(self, factor: float) -> None:
        self._slowdown = factor
        self._engine.set_slowdown(factor)

    def set_rtt(self, rtt_s: float) -> None:
        self.link = replace(self.link, rtt_s=rtt_s)

    def set_path_delay(self, share: float, low_s: float, high_s: float) -> None:
        self._delay = (share, low_s, high_s)

    def set_reachable(self, reachable: bool) -> None:
        """Cut off, it keeps what it holds, but what ran there is lost."""
        self._cut_off = not reachable
        if not reachable:
            self._lose_open()

    def kill(self) -> None:
        self._dead = True
        self._lose_open()
        self._engine.stop()
        self._engine = self._new_engine()

    def revive(self) -> None:
        self._dead = False

    # -- helpers

    def _new_engine(self) -> SimEngine:
        model: EngineModel[Sending] = EngineModel(self.replica.profile, item_bytes=8, item_tokens=self._block_tokens)
        model.slowdown = self._slowdown
        return SimEngine(self._kernel, model, first_token=self._first_token, finished=self._finished, ahead=self._ahead)

    def _delayed_s(self, trips: Trips) -> float:
        share, low_s, high_s = self._delay
        if not share or trips.uniform() >= share:
            return 0.0
        return low_s + (high_s - low_s) * trips.uniform()

    def _arrive(self, sending: Sending) -> None:
        if self._travelling.pop(sending, True) is not None:
            return  # Lost on the way.
        try:
            self._engine.submit(sending)
        except BadRequest as refusal:
            back_s = self._kernel.now + sending.trips.one_way_s(self.link)
            outcome = Outcome(Ending.REFUSED, status=400, error=str(refusal))
            self._kernel.at(back_s, partial(self._end, sending, outcome))

    def _first_token(self, sending: Sending, at_s: float) -> None:
        sending.first_seen_s = at_s + sending.trips.one_way_s(self.link)
        self._kernel.at(sending.first_seen_s, partial(self._see_first, sending))

    def _see_first(self, sending: Sending) -> None:
        if not sending.over:
            sending.content_seen = True
            self._shell.first_token(sending)

    def _finished(self, sending: Sending, at_s: float) -> None:
        assert sending.first_seen_s is not None, "the first token comes first"
        pairs = self._engine.gaps(sending)
        self._gaps.add(pairs)
        outcome = Outcome(
            Ending.COMPLETED,
            status=200,
            prompt_tokens=sending.prompt_tokens,
            cached_tokens=sending.cached_tokens,
            output_tokens=sending.output_tokens,
            itl_s_p95=p95_s(pairs),
        )
        seen_s = max(sending.first_seen_s, at_s + sending.trips.one_way_s(self.link))
        self._kernel.at(seen_s, partial(self._end, sending, outcome))

    def _end(self, sending: Sending, outcome: Outcome) -> None:
        if sending.over:
            return
        sending.over = True
        del self._open[sending]
        # Before it is told, as in the proxy: who waited for this end may take the connection.
        if sending.kept is not None:
            self._pool.give_back(sending.kept, now=self._kernel.now)
        self._shell.ended(sending, outcome)

    def _fail(self, sending: Sending, reason: str) -> None:
        if sending.kept is not None:
            self._pool.close(sending.kept)
        if sending.content_seen:
            self._end(sending, Outcome(Ending.FAILED_AFTER_CONTENT, status=200, error=reason))
        else:
            self._end(sending, Outcome(Ending.FAILED_BEFORE_CONTENT, error=reason))

    def _drop(self, engine: SimEngine, sending: Sending) -> None:
        """The engine hears that nobody waits any more."""
        self._travelling.pop(sending, None)
        if engine is self._engine:
            engine.abort(sending)

    def _lose_open(self) -> None:
        """Every connection is reset: what has left the engine still arrives, the rest is over."""
        now = self._kernel.now
        self._travelling.clear()
        for sending in self._open:
            if sending.stage is Stage.FINISHED or sending.over:
                continue
            self._engine.abort(sending)
            heard_s = max(sending.first_seen_s or 0.0, now + sending.trips.one_way_s(self.link))
            reason = "disconnected"
            if sending.first_seen_s is None and sending.kept is not None and sending.kept.used:
                # A kept connection that breaks before any answer is nobody's fault: tried on a new one, and refused.
                heard_s += sending.trips.round_trip_s(self.link)
                reason = "connect_failed"
            self._kernel.at(heard_s, partial(self._fail, sending, reason))
        self._pool.lose_all()
