"""One stall of an engine costs it no more than the stall, under the default policy."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.messages.actions import Dispatch
from gorgo.core.router import Router
from tests.core.routers import COMPLETED, a_request, dispatched, make_router, submitted, timed

#: Four requests a second, each of 0.2 s of prefill on any of three replicas.
EVERY_S, TOKENS, PREFILL_S = 0.25, 200, 0.2
STALL_S = 8.0


class Fleet:
    """Three replicas, each with one queue, of which one stops for a while."""

    def __init__(self) -> None:
        self.router: Router = make_router(policy="gorgo-ms", replicas=[timed(name) for name in ("a", "b", "c")])
        for name in ("a", "b", "c"):
            for _ in range(20):
                self.router.replicas.on_probe(name, 0.01, now=0.0)
        self._rng = np.random.default_rng(0)
        self._free_s = dict.fromkeys("abc", 0.0)
        self._open: list[tuple[float, str]] = []
        self.sent: list[tuple[float, str]] = []
        self.now = 0.0

    def run(self, until_s: float, *, stopped: str | None = None, resumes_s: float = 0.0) -> None:
        while self.now < until_s:
            self.now += self._rng.exponential(EVERY_S)
            self._answer()
            request = a_request(f"r{len(self.sent)}", prompt_tokens=TOKENS, received_s=self.now)
            sent: Dispatch = dispatched(submitted(self.router, request, now=self.now))
            self.sent.append((self.now, sent.replica))
            begins_s = max(self.now, self._free_s[sent.replica])
            if sent.replica == stopped:
                begins_s = max(begins_s, resumes_s)
            self._free_s[sent.replica] = begins_s + PREFILL_S
            self._open.append((self._free_s[sent.replica], sent.attempt_id))

    def share(self, name: str, since_s: float, until_s: float) -> float:
        names = [replica for at_s, replica in self.sent if since_s <= at_s < until_s]
        return names.count(name) / len(names)

    def _answer(self) -> None:
        for at_s, attempt_id in sorted(entry for entry in self._open if entry[0] <= self.now):
            self.router.on_first_token(attempt_id, now=at_s)
            self.router.on_finish(attempt_id, COMPLETED, now=at_s)
        self._open = [entry for entry in self._open if entry[0] > self.now]


@pytest.mark.parametrize("probe_fails", [False, True])
def test_a_replica_has_its_fair_share_within_twenty_seconds_of_a_stall(probe_fails: bool) -> None:
    fleet = Fleet()
    fleet.run(60.0)
    assert fleet.share("a", 20.0, 60.0) > 0.2
    if probe_fails:
        fleet.run(64.0, stopped="a", resumes_s=60.0 + STALL_S)
        fleet.router.replicas.on_probe("a", None, now=fleet.now)
    fleet.run(60.0 + STALL_S, stopped="a", resumes_s=60.0 + STALL_S)
    fleet.run(120.0)
    end_s = 60.0 + STALL_S
    assert fleet.share("a", end_s + 20.0, end_s + 30.0) > 0.25


def test_what_waits_while_a_probe_fails_teaches_no_speed() -> None:
    fleet = Fleet()
    fleet.run(10.0)
    (before,) = [row.prefill_slowdown for row in fleet.router.view.snapshots(now=10.0) if row.name == "a"]
    sent = dispatched(submitted(fleet.router, a_request("stalls", pinned_replica="a", received_s=20.0), now=20.0))
    fleet.router.replicas.on_probe("a", None, now=24.0)
    fleet.router.on_first_token(sent.attempt_id, now=28.0)
    (after,) = [row.prefill_slowdown for row in fleet.router.view.snapshots(now=28.0) if row.name == "a"]
    assert after == before
