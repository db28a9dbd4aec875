"""Who goes to a replica now, who waits at the proxy, and who is turned away.

Owns the life of a request before its first dispatch: one look on arrival, further looks while it waits, and its end.
The rules are `overload`, the order `waiting_room`, the choice and the reservation `placing`.

Theory of operation. A request goes to the replica that is cheapest of all, if that one is open; if not it waits for it,
and later ones may pass. How long a place in a full batch takes to come is in no cost, and how many places there are is
a guess for each replica; so one without a place is left for the next best that has one and has as much of the prompt
cached, if that costs no more than the time in which one place comes free. Where less is cached, or it costs more, the
place is waited for: going elsewhere would take time of the engines from all who wait.

Whatever can open a replica (a first token, an end, time) has the room walked in order until nobody who was looked at
can go. A walk looks at so many at most, and not again within a moment at who wants a replica that is still closed, so
that an event costs a bounded time however many wait; who was left out is next. A request that arrives is looked at
alone: everything open has been offered to those who were there before.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from gorgo.core.actions import Action, Dispatch, Hold, Reject
from gorgo.core.coming_back import MIN_RETRY_S, ComingBack
from gorgo.core.decision import Forecast
from gorgo.core.eligible import Eligible
from gorgo.core.endings import no_replica, queue_full, too_late
from gorgo.core.fleet import Fleet
from gorgo.core.ledger import RequestState
from gorgo.core.overload import Doors, OverloadLimits, is_hopeless, last_chance_s
from gorgo.core.placing import Placement, Placer
from gorgo.core.request import RouteRequest
from gorgo.core.waiting_room import Held, WaitingRoom

#: Looks per walk: two milliseconds at 30 us each.
MAX_LOOKS = 64
#: Who wants a closed replica is not looked at again for so long, s: costs drift slowly, and by events that are fewer.
LOOK_AGAIN_S = 0.05

#: Who may serve a request now.
Filter = Callable[[RouteRequest, float], Eligible]
#: Who waited, and how that ended.
Settled = tuple[RequestState, Dispatch | Reject]


class FrontDoor:
    """Decides between Dispatch, Hold and Reject.

    Parameters
    ----------
    fleet, placer:
        The Router's.
    eligible:
        Who may serve a request now; answers nobody for one whose replica is gone.
    limits:
        May be replaced by `set_limits`.
    """

    def __init__(self, fleet: Fleet, placer: Placer, eligible: Filter, limits: OverloadLimits) -> None:
        self._fleet = fleet
        self._placer = placer
        self._eligible = eligible
        self.doors = Doors(fleet, limits)
        self.room = WaitingRoom()
        self._coming_back = ComingBack()
        self._limits = limits
        #: (time, number, who) at which a time may be over; those who have left are passed over.
        self._drops: list[tuple[float, int, Held]] = []
        self._walked_s = float("-inf")
        #: When the look at all began that a walk had to break off; `None` if the last one came to the end.
        self._sweep_s: float | None = None
        #: Something happened that may have opened a replica, and the room has not been walked since.
        self.stirred = False

    def set_limits(self, limits: OverloadLimits) -> None:
        self._limits = self.doors.limits = limits
        self.stirred = True

    def arrive(self, state: RequestState, *, now: float) -> Action:
        """A new request: where to, or that it waits, or that it is turned away."""
        request = state.request
        eligible = self._eligible(request, now)
        if not eligible.members:
            return self._strand(state, now)
        placement = self._placer.look(request, eligible, now=now)
        forecast = placement.choice.forecast
        if forecast is None or not self._limits.hold:
            return self._placer.dispatch(state, placement, now=now)
        placement = self._with_a_place(request, placement, now)
        opened = self.doors.is_open(placement.member, now=now)
        deadline_s = self._deadline_s(request)
        if opened and deadline_s is None:
            return self._placer.dispatch(state, placement, now=now)
        predicted = forecast()
        waited_s = now - request.received_s
        if deadline_s is not None and is_hopeless(
            predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits
        ):
            return too_late(request, self._come_back_s(now))
        if opened:
            return self._placer.dispatch(state, placement, now=now)
        held = Held(state, float(predicted.prefill_s.min()), since_s=now)
        held.wanted, held.looked_s = placement.member.spec.name, now
        held.drop_s = self._drop_s(request, predicted, deadline_s)
        return self._hold(held, now)

    def walk(self, *, now: float) -> list[Settled]:
        """Offer what is open to those who wait, in order, and turn away whose time is over."""
        self.stirred = False
        if not self.room:
            self._drops.clear()
            return []
        self._walked_s = now
        actions = self._drop_late(now)
        looks, closed = 0, self._closed(now)
        began_s = now if self._sweep_s is None else self._sweep_s
        if closed and len(closed) == len(self._fleet.members):
            return actions
        for held in list(self.room):
            if held.wanted in closed and (now - held.looked_s < LOOK_AGAIN_S or held.looked_s >= began_s):
                continue
            if looks == MAX_LOOKS:
                self._sweep_s = began_s
                return actions
            action = self._look_again(held, now)
            if isinstance(action, Dispatch):
                closed = self._closed(now)
            if action is not None:
                actions.append((held.state, action))
            looks += held.stranded_s is None  # who has nobody to go to is asked nothing
            if closed and len(closed) == len(self._fleet.members):
                break
        self._sweep_s = None
        return actions

    def abandon(self, request_id: str) -> RequestState | None:
        """Its client is gone. The request, if it waited."""
        held = self.room.get(request_id)
        if held is None:
            return None
        self.room.remove(held)
        return held.state

    def next_s(self, *, now: float) -> float | None:
        """When `walk` is next of use; `None` while nobody waits."""
        if not self.room:
            return None
        if self.stirred:
            return now
        due = [at for member in self._fleet.members.values() if (at := self.doors.opens_s(member, now=now)) is not None]
        if self._limits.hold and len(self._closed(now)) < len(self._fleet.members):
            due.append(self._walked_s + LOOK_AGAIN_S)
        while self._drops and not self._waits(self._drops[0][2]):
            heappop(self._drops)
        if self._drops:
            due.append(self._drops[0][0])
        return min(due, default=None)

    # -- helpers

    def _with_a_place(self, request: RouteRequest, best: Placement, now: float) -> Placement:
        """`best`, or the next best that has a place and as much of the prompt, where that costs less than waiting."""
        cost, row, eligible = best.choice.cost, best.choice.row, best.eligible
        if cost is None or self._placer.policy.unit != "ms" or self.doors.has_place(best.member):
            return best
        cached = best.matched[eligible.slots]
        fit = [
            other
            for other, member in enumerate(eligible.members)
            if cached[other] >= cached[row] and self.doors.has_place(member)
        ]
        dearer_s = min((float(cost[other] - cost[row]) for other in fit), default=inf) / 1e3
        if dearer_s > best.member.batch.place_s:
            return best
        unfit = set(eligible.names) - {eligible.names[other] for other in fit}
        return self._placer.look(request, eligible.without(unfit, "full"), now=now)

    def _hold(self, held: Held, now: float) -> Action:
        request = held.state.request
        if not self.room:
            # Whatever happened before, this one was asked after it.
            self.stirred, self._walked_s = False, now
        if len(self.room) >= self._limits.held:
            return queue_full(request, self._limits.held, self._come_back_s(now))
        self.room.add(held)
        self._remind(held)
        return Hold(request.request_id)

    def _strand(self, state: RequestState, now: float) -> Action:
        """Nobody can take it, open or not."""
        if self._limits.no_replica_wait_s <= 0.0:
            return no_replica(state.request, self._readmission_s(now))
        held = Held(state, self._least_prefill_s(state.request), since_s=now, stranded_s=now)
        held.drop_s = self._patience_s(held)
        return self._hold(held, now)

    def _least_prefill_s(self, request: RouteRequest) -> float:
        """By the priors, of a request that no policy is asked about: by it clients take turns."""
        tokens = request.prompt_tokens
        told = (member.prior.seconds(tokens, 0) * member.clock.speed.factor for member in self._fleet.members.values())
        return min(told, default=0.0)

    def _look_again(self, held: Held, now: float) -> Dispatch | Reject | None:
        request = held.state.request
        eligible = self._eligible(request, now)
        if not eligible.members:
            return self._stranded(held, now)
        held.stranded_s = None
        placement = self._placer.look(request, eligible, now=now)
        forecast = placement.choice.forecast
        if not self._limits.hold or forecast is None:
            return self._go(held, placement, now)
        placement = self._with_a_place(request, placement, now)
        held.wanted, held.looked_s = placement.member.spec.name, now
        predicted, deadline_s = forecast(), self._deadline_s(request)
        if deadline_s is not None:
            waited_s = now - request.received_s
            if is_hopeless(predicted, waited_s=waited_s, deadline_s=deadline_s, limits=self._limits):
                return self._drop(held, now)
        if self.doors.is_open(placement.member, now=now):
            return self._go(held, placement, now)
        self._set_drop(held, self._drop_s(request, predicted, deadline_s))
        return None

    def _go(self, held: Held, placement: Placement, now: float) -> Dispatch:
        self.room.serve(held)
        return self._placer.dispatch(held.state, placement, now=now)

    def _drop(self, held: Held, now: float) -> Reject:
        self.room.remove(held)
        return too_late(held.state.request, self._come_back_s(now))

    def _stranded(self, held: Held, now: float) -> Reject | None:
        if held.stranded_s is None:
            held.stranded_s = now
        over_s = self._patience_s(held)
        if now < over_s:
            held.wanted, held.looked_s = None, now
            self._set_drop(held, over_s)
            return None
        self.room.remove(held)
        return no_replica(held.state.request, self._readmission_s(now))

    def _patience_s(self, held: Held) -> float:
        """How long it waits for anybody at all; not beyond its deadline."""
        assert held.stranded_s is not None, "it has somewhere to go"
        over_s, deadline_s = held.stranded_s + self._limits.no_replica_wait_s, self._deadline_s(held.state.request)
        return over_s if deadline_s is None else min(over_s, held.state.request.received_s + deadline_s)

    def _drop_late(self, now: float) -> list[Settled]:
        """Those whose time may be over are looked at out of turn."""
        actions: list[Settled] = []
        while self._drops and self._drops[0][0] <= now:
            held = heappop(self._drops)[2]
            if self._waits(held) and held.drop_s <= now:
                action = self._look_again(held, now)
                if action is None and held.drop_s <= now:
                    action = self._drop(held, now)
                if action is not None:
                    actions.append((held.state, action))
        return actions

    def _drop_s(self, request: RouteRequest, predicted: Forecast, deadline_s: float | None) -> float:
        if deadline_s is None:
            return float("inf")
        return last_chance_s(predicted, received_s=request.received_s, deadline_s=deadline_s, limits=self._limits)

    def _set_drop(self, held: Held, drop_s: float) -> None:
        if drop_s != held.drop_s:
            held.drop_s = drop_s
            self._remind(held)

    def _remind(self, held: Held) -> None:
        if held.drop_s == float("inf"):
            return
        heappush(self._drops, (held.drop_s, held.number, held))
        if len(self._drops) > 4 * len(self.room) + 64:
            self._drops = [entry for entry in self._drops if self._waits(entry[2]) and entry[0] == entry[2].drop_s]
            heapify(self._drops)

    def _waits(self, held: Held) -> bool:
        return self.room.get(held.request_id) is held

    def _closed(self, now: float) -> set[str]:
        """Nobody is while nothing is held back."""
        if not self._limits.hold:
            return set()
        return {name for name, member in self._fleet.members.items() if not self.doors.is_open(member, now=now)}

    def _deadline_s(self, request: RouteRequest) -> float | None:
        return self._limits.slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s

    def _come_back_s(self, now: float) -> float:
        """For a request that is turned away now: what waits and what was sent has to be prefilled before it."""
        members = [member for member in self._fleet.members.values() if member.health.accepts]
        if not members:
            return MIN_RETRY_S
        work_s = sum(self.doors.work_s(member, now=now) for member in members)
        return self._coming_back.told_s((work_s + self.room.prefill_s) / len(members), now=now)

    def _readmission_s(self, now: float) -> float:
        """When the first ejected replica may be tried again."""
        wakes = [member.health.wakes_s for member in self._fleet.members.values()]
        return max(MIN_RETRY_S, min((at for at in wakes if at is not None), default=now) - now)
