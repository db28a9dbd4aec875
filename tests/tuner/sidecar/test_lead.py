"""A standby waits, leads, loses the leadership and waits again; one that cannot wait ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gorgo.errors import LeadershipLost, TunerError
from tests.tuner.sidecar.fake_proxy import PAPER, Beside, FakeProxy
from tests.tuner.sidecar.group.beside_group import BesideGroup
from tuner.sidecar.bootstrap import run_sidecar
from tuner.sidecar.lead import lead
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.options import SidecarOptions, leadership_of
from tuner.sidecar.progress import Reporter


class FakeLeadership:
    """A leadership whose tries and confirmations a test lists."""

    def __init__(self, tries: list[str | None], *, has_standby: bool = True) -> None:
        self.tries, self.has_standby, self.lost = tries, has_standby, False
        self.released = 0

    async def try_to_lead(self) -> str | None:
        return self.tries.pop(0)

    async def confirm_leadership(self) -> None:
        if self.lost:
            raise LeadershipLost("the lease in the store has ended")

    async def release(self) -> None:
        self.released += 1


class Candidate:
    """One process around a leadership."""

    def __init__(self, leadership: FakeLeadership) -> None:
        self.leadership, self.stop, self.metrics = leadership, asyncio.Event(), TunerMetrics()
        self.said: list[str] = []
        self.waits: list[float] = []
        self.led: list[bool] = []
        self.lose = 0

    async def run(self) -> bool:
        reporter = Reporter(self.said.append, self.said.append)
        return await lead(self.leadership, self.tune, reporter, self.metrics, self.stop, wait=self.wait)

    async def wait(self, _stop: asyncio.Event, seconds: float) -> None:
        self.waits.append(seconds)

    async def tune(self, waited: bool) -> bool:
        self.led.append(waited)
        assert self.leads == 1.0
        if len(self.led) <= self.lose:
            raise LeadershipLost("the lease in the store has ended")
        return True

    @property
    def leads(self) -> float | None:
        return self.metrics.registry.get_sample_value("gorgo_tuner_leader")


async def test_a_standby_tries_each_second_and_says_why_once() -> None:
    candidate = Candidate(FakeLeadership(["another process leads"] * 3 + [None]))
    assert await candidate.run()
    assert candidate.waits == [1.0] * 3
    assert candidate.led == [True]
    assert candidate.said == ["standby: another process leads", "leader: takes over from the history"]
    assert (candidate.leads, candidate.leadership.released) == (0.0, 1)


async def test_the_first_leader_has_not_waited() -> None:
    candidate = Candidate(FakeLeadership([None]))
    assert await candidate.run()
    assert (candidate.led, candidate.said) == ([False], [])


async def test_a_leader_that_loses_the_leadership_is_a_standby_again() -> None:
    candidate = Candidate(FakeLeadership([None, "another process leads", None]))
    candidate.lose = 1
    assert await candidate.run()
    assert candidate.led == [False, True]
    assert candidate.said[0] == "standby: the lease in the store has ended; puts nothing more"
    assert candidate.leadership.released == 2


async def test_a_second_candidate_without_a_standby_ends_with_the_remedy() -> None:
    candidate = Candidate(FakeLeadership(["process 7 tunes http://a"], has_standby=False))
    with pytest.raises(TunerError, match=r"^process 7 tunes http://a; a standby needs a history in PostgreSQL"):
        await candidate.run()


async def test_a_stopped_standby_ends_in_order() -> None:
    candidate = Candidate(FakeLeadership(["another process leads"]))
    candidate.stop.set()
    assert await candidate.run()
    assert candidate.led == []


async def test_a_leader_that_was_replaced_puts_and_writes_nothing_more(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path)
    beside.leadership = FakeLeadership([])
    await beside.start()
    await beside.until_generation(2)
    first, group = beside.sidecar, beside.group
    await beside.start()  # the history is claimed
    assert beside.said[-1] == "resumes campaign 1, generation 2"
    rows, puts = beside.numbers, len(beside.a.puts)
    second = beside.sidecar
    beside.sidecar = first
    with pytest.raises(LeadershipLost, match="taken over campaign 1"):
        await beside.until_generation(4)
    assert beside.numbers == rows
    beside.sidecar = second
    await beside.step()
    await beside.until_generation(5)
    assert beside.numbers == [0, 1, 2, 3, 4]
    assert len(beside.a.puts) > puts
    assert group is not beside.group


async def test_without_the_leadership_no_weights_are_put_not_even_the_incumbent(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path)
    beside.leadership = leadership = FakeLeadership([])
    await beside.start()
    await beside.until_generation(2)
    puts, candidate = len(beside.a.puts), beside.weights
    leadership.lost = True
    with pytest.raises(LeadershipLost):
        await beside.step()
    with pytest.raises(LeadershipLost):
        await beside.sidecar.finish()
    assert (len(beside.a.puts), beside.weights) == (puts, candidate)


async def test_two_tuners_on_one_history_in_sqlite_are_refused(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    lock = leadership_of(beside.options)
    assert await lock.try_to_lead() is None
    said: list[str] = []
    with pytest.raises(TunerError, match=r"tunes http://proxy:9090 with this history; a standby needs"):
        await run_sidecar(beside.options, Reporter(said.append, said.append), asyncio.Event())
    await lock.release()


async def test_a_standby_ends_with_the_campaign_for_which_it_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    number = beside.history.begin_campaign(now_s=1.0, target=beside.options.url, policy="gorgo", options={})
    leadership, said = FakeLeadership(["another process leads", None]), list[str]()
    monkeypatch.setattr("tuner.sidecar.bootstrap.leadership_of", lambda _options: leadership)

    async def wait(_stop: asyncio.Event, _seconds: float) -> None:
        beside.history.end_campaign(number, now_s=2.0, outcome="100 generations")

    monkeypatch.setattr("tuner.sidecar.bootstrap.wait", wait)
    options = SidecarOptions(url=beside.options.url, token="t", database=beside.options.database, campaign=PAPER)
    assert await run_sidecar(options, Reporter(said.append, said.append), asyncio.Event())
    assert said[-1] == "campaign 1 has ended; `gorgo history` shows it"
    assert len(beside.history.campaigns()) == 1
