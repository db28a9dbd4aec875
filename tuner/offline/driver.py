"""The shell of a campaign in virtual time: reads the Router's samples, and executes actions.

The order of calls is the sidecar's: all new samples first, then time, then actions. Without a network a put is executed
at once and never refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from gorgo.core.router import Router
from tuner.campaign.actions import Action, Freeze, PutWeights, RecordGeneration, RollBack, Stop, Wait
from tuner.campaign.generation import Generation
from tuner.campaign.machine import Campaign
from tuner.objective import TunerSample

#: As the sidecar polls, s.
POLL_S = 1.0
#: Samples of one poll, as of the admin listener.
BATCH = 1000


class CampaignDriver:
    """A controller of a simulation, through which a campaign acts on its Router.

    Parameters
    ----------
    campaign:
        New, or from its saved state.
    poll_s:
        Between two polls, in virtual seconds.

    Weights are set whatever the policy's own box: the campaign has a box of its own.
    """

    def __init__(self, campaign: Campaign, *, poll_s: float = POLL_S) -> None:
        self.campaign = campaign
        self.generations: list[Generation] = []
        self.stopped: str | None = None
        self.puts = 0
        self.rollbacks = 0
        self._poll_s = poll_s
        self._next_s: float | None = 0.0

    @property
    def next_s(self) -> float | None:
        """Return the time of the next poll; None when the campaign is done."""
        return self._next_s

    def act(self, router: Router, now: float) -> None:
        """Poll the Router once and act on it."""
        if self.campaign.phase == "new":
            self._carry_out(self.campaign.on_start(now=now), router, now)
        self._read(router, now)
        self._carry_out(self.campaign.on_time(now=now), router, now)
        self._next_s = None if self.stopped is not None else now + self._poll_s

    def _read(self, router: Router, now: float) -> None:
        samples = router.samples
        while self.stopped is None and (rows := self._new(router)):
            boot_id = samples.boot_id
            self._carry_out(self.campaign.on_samples(rows, boot_id=boot_id, now=now), router, now)

    def _new(self, router: Router) -> list[TunerSample]:
        rows: list[dict[str, Any]] = router.samples.after(self.campaign.cursor.last_seq, BATCH)["samples"]
        return [TunerSample.from_json(row) for row in rows]

    def _carry_out(self, actions: Iterable[Action], router: Router, now: float) -> None:
        waiting = deque(actions)
        while waiting:
            match waiting.popleft():
                case PutWeights() | RollBack() as order:
                    self.puts += 1
                    self.rollbacks += isinstance(order, RollBack)
                    specs = router.settings.policy.weight_specs
                    weights = router.settings.weights.changed(specs, order.values, allow_out_of_range=True)
                    router.settings.set_weights(weights, now=now)
                    waiting.extend(self.campaign.on_weights_applied(weights.version, ticket=order.ticket, now=now))
                case RecordGeneration() as record:
                    self.generations.append(record.generation)
                case Stop() as stop:
                    self.stopped = stop.reason
                case Freeze() | Wait():  # a simulated proxy has one tuner, which polls every `poll_s` anyway
                    pass
