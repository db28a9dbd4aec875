"""The store of a run: it carries the reports of routers to the others, and has a history for one that joins.

Owns delay, loss and the history. Each report takes its wire form on the way, so that a run has what a store would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import numpy as np

from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.records import PeerReport
from gorgo.sim.event_queue import EventQueue
from gorgo.sim.routers.group import RouterGroup
from gorgo.sim.routers.shell import RouterShell

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
        arrival_s = self._kernel.now + self._group.delay_s
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
                receiver.on_peer(report, age_s=self._group.delay_s)

    def _report_in_turn(self, sender: RouterShell) -> None:
        if sender.has_news():
            self.publish(sender)
        self._kernel.at(self._kernel.now + self._group.interval_s, partial(self._report_in_turn, sender))
