"""One sidecar, or two candidates for leader, beside several proxies in virtual time: weights at all or at none,
samples once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.errors import LeadershipLost, ProxyRefused, WeightsError
from tests.tuner.sidecar.fake_proxy import DEFAULTS, PAPER
from tests.tuner.sidecar.group.beside_group import NAMES, BesideGroup
from tuner.campaign.options import CampaignOptions
from tuner.sidecar.group import Agreement, GroupPut, PutCall, Reported
from tuner.sidecar.loop import Sidecar

# --- One sidecar beside several proxies in virtual time: weights at all or at none, samples of all once.


@pytest.fixture
def beside(tmp_path: Path) -> BesideGroup:
    return BesideGroup(tmp_path)


async def test_each_put_reaches_all_proxies_and_generations_are_written(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]
    puts = [[put["weights"] for put in proxy.puts] for proxy in beside.proxies.values()]
    assert puts[0] == puts[1] == puts[2]
    assert beside.history.campaigns()[0].target == " ".join(NAMES)


async def test_samples_of_all_proxies_fill_one_window(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step()  # the first put
    await beside.step(2)
    assert beside.sidecar.progress().samples == 6, "two of each of three"


async def test_samples_of_versions_that_the_group_did_not_agree_on_are_discarded(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step()
    beside.b.serve(5)
    for row in beside.b.ring:
        row["weights_version"] = 1  # routed before the put
    await beside.step()
    assert beside.sidecar.progress().samples == 0


async def test_a_put_that_one_proxy_does_not_get_is_undone_at_the_others(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    before, versions = beside.weights, [proxy.version for proxy in beside.proxies.values()]
    put, calls = beside.b._put, list[int]()

    def break_down(body: dict[str, object]) -> httpx.Response:
        calls.append(1)
        raise httpx.ConnectError("connection refused")

    beside.b._put = break_down  # type: ignore[method-assign]
    while not calls:
        await beside.step(2)
    assert beside.weights == before, "all have the weights of before"
    assert beside.a.version == versions[0] + 2, "put and undone"
    assert beside.group.undone_puts == 1
    beside.b._put = put  # type: ignore[method-assign]
    await beside.until_generation(4)
    assert len(beside.weights) == 1
    assert beside.events[0] == "restart"
    assert beside.numbers == [0, 1, 2, 3]


async def test_a_put_whose_answer_was_lost_is_undone_at_that_proxy_too(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    before = beside.weights
    beside.b.deaf = True
    undone = beside.group.undone_puts
    while beside.group.undone_puts == undone:
        await beside.step(2)
    assert beside.weights == before or beside.b.weights != before[0], "its answer to the undoing is lost as well"
    assert [beside.a.weights] == before
    beside.b.deaf = False
    await beside.until_generation(4)
    assert len(beside.weights) == 1
    assert "foreign" not in beside.events


async def test_a_proxy_that_restarts_gets_the_weights_of_the_group_before_its_samples_count(
    beside: BesideGroup,
) -> None:
    await beside.start()
    await beside.until_generation(2)
    offspring = dict(beside.a.weights)
    beside.b.restart()
    await beside.step(4)
    assert beside.weights == [offspring]
    assert beside.sidecar.progress().samples == 0, "nothing of before counts"
    assert beside.events == ["restart"]
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_a_proxy_with_weights_of_an_earlier_process_is_brought_to_the_group(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 1.1}, by="gorgo tune, campaign 1, process 1")
    await beside.step()
    await beside.step()
    assert len(beside.weights) == 1
    assert beside.weights[0]["w_rtt"] != 1.1
    assert "foreign" not in beside.events


async def test_weights_of_an_operator_at_one_proxy_become_those_of_all(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 1.5}, by="operator")
    await beside.step()
    assert [one["w_rtt"] for one in beside.weights] == [1.5]
    assert beside.sidecar.campaign.incumbent["w_rtt"] == 1.5
    assert beside.events == ["foreign"]
    assert "operator at http://b" in beside.history.events()[0].reason


async def test_weights_outside_the_box_at_one_proxy_end_the_campaign_at_all(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, allow_out_of_range={"w_queue": (0.05, 0.9)})
    await beside.start()
    await beside.until_generation(2)
    beside.b.set({"w_rtt": 50.0}, by="operator")
    await beside.step()
    assert beside.sidecar.stopped is not None
    assert await beside.sidecar.finish()
    assert [one["w_rtt"] for one in beside.weights] == [50.0]


async def test_one_frozen_proxy_pauses_the_campaign(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    beside.b.frozen = {"reason": "held-out week"}
    puts = len(beside.a.puts)
    for _ in range(5):
        await beside.step(4)
    assert len(beside.a.puts) == puts
    assert beside.sidecar.progress().trouble == "frozen: held-out week (http://b)"
    beside.b.frozen = None
    await beside.until_generation(3)


async def test_without_one_proxy_nothing_is_put_and_no_sample_is_lost_meanwhile(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, replace(PAPER, window=40))
    await beside.start()
    await beside.step()
    await beside.step(1)
    beside.b.down = True
    puts = len(beside.a.puts)
    for _ in range(3):
        await beside.step(1)
    assert len(beside.a.puts) == puts
    assert "http://b" in str(beside.sidecar.progress().trouble)
    beside.b.down = False
    await beside.step()
    assert beside.sidecar.progress().samples == 12, "four at each of three"
    assert not any("missing" in line for line in beside.complaints)


async def test_a_proxy_out_of_reach_for_longer_than_the_discard_takes_the_candidate_from_the_others(
    beside: BesideGroup,
) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    assert beside.weights != [incumbent], "a candidate is in force"
    beside.b.down = True
    await beside.step(1, seconds=PAPER.discard_s + 1)
    assert [beside.a.weights, beside.proxies[NAMES[2]].weights] == [incumbent, incumbent]
    assert beside.events == ["rollback"]
    beside.b.down = False
    await beside.step(1)
    await beside.step(1)
    assert beside.weights == [incumbent]
    await beside.until_generation(4)
    assert beside.numbers == [0, 1, 2, 3]


async def test_harm_is_rolled_back_where_it_can_be_though_one_proxy_is_missed(tmp_path: Path) -> None:
    options = CampaignOptions(window=12, hop=6, warm_up_s=0.0, rest_blocks=0.0, max_generations=4)
    beside = BesideGroup(tmp_path, options)
    await beside.start()
    while beside.sidecar.campaign.trial is None or beside.sidecar.campaign.trial.arm == "incumbent":
        await beside.step(4)
    start = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    for proxy in beside.proxies.values():
        proxy.serve(8)
        for row in list(proxy.ring)[-8:]:
            row["e2e_s"] = 90.0

    def break_down(body: dict[str, object]) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    put = beside.b._put
    beside.b._put = break_down  # type: ignore[method-assign]
    await beside.step()
    assert "rollback" in beside.events
    assert (beside.a.weights, beside.b.weights == start) == (start, False)
    beside.b._put = put  # type: ignore[method-assign]
    await beside.step()
    await beside.step()
    assert beside.weights == [start]


async def test_the_guard_counts_errors_over_all_proxies(tmp_path: Path) -> None:
    options = CampaignOptions(window=40, hop=20, warm_up_s=0.0, rest_blocks=0.0, hard_errors=0.05)
    beside = BesideGroup(tmp_path, options)
    await beside.start()
    while beside.sidecar.campaign.trial is None or beside.sidecar.campaign.trial.arm == "incumbent":
        await beside.step(4)
    for proxy in beside.proxies.values():  # one at each: the guard of one proxy needs two
        proxy.serve(7)
        proxy.ring[-1]["status"] = 503
    await beside.step()
    reasons = [event.reason for event in beside.history.events() if event.kind == "rollback"]
    assert reasons == ["2 of the last 20 requests failed"]


async def test_a_killed_sidecar_is_continued_by_another_process(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(3)
    beside.b.set({"w_rtt": 1.1}, by="gorgo tune, campaign 1, process 1")  # killed between two calls of one put
    await beside.start()
    assert beside.said[-1] == "resumes campaign 1, generation 3"
    await beside.until_generation(6)
    assert beside.numbers == [0, 1, 2, 3, 4, 5]
    assert beside.events == [], "no restart of a proxy, and no weights of others"
    assert len(beside.weights) == 1


async def test_an_ended_process_leaves_the_incumbent_at_all_that_answer(beside: BesideGroup) -> None:
    await beside.start()
    await beside.until_generation(2)
    incumbent = {**DEFAULTS, **beside.sidecar.campaign.incumbent}
    beside.b.down = True
    assert not await beside.sidecar.finish()
    assert beside.a.weights == incumbent
    assert "may be in force still" in beside.complaints[-1]


async def test_a_campaign_at_its_end_freezes_all(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, replace(PAPER, max_generations=2, freeze_at_end=True))
    await beside.start()
    while beside.sidecar.stopped is None:
        await beside.step(2)
    assert [proxy.frozen for proxy in beside.proxies.values()] == [{"reason": "2 generations"}] * 3
    assert len(beside.weights) == 1


async def test_proxies_with_different_weights_start_no_campaign(beside: BesideGroup, tmp_path: Path) -> None:
    beside.b.set({"w_rtt": 1.5}, by="operator")
    with pytest.raises(WeightsError, match=r"w_rtt is 0\.5 at http://a, 1\.5 at http://b.*initial_weights"):
        await beside.start()
    (tmp_path / "other").mkdir()
    named = BesideGroup(tmp_path / "other", start={"w_rtt": 1.0})
    named.b.set({"w_rtt": 1.5}, by="operator")
    await named.start()
    await named.step()
    assert [one["w_rtt"] for one in named.weights] == [1.0]


async def test_one_proxy_under_two_addresses_is_refused(beside: BesideGroup) -> None:
    beside.b.boot_id = beside.a.boot_id
    with pytest.raises(ProxyRefused, match="http://a and http://b are one proxy"):
        await beside.start()


async def test_clocks_of_proxies_do_not_move_a_block(tmp_path: Path) -> None:
    beside = BesideGroup(tmp_path, CampaignOptions(window=12, hop=6, warm_up_s=0.0, rest_blocks=0.0))
    serve = beside.b.serve

    def five_seconds_off(count: int, ttft_ms: float = 400.0) -> None:
        serve(count, ttft_ms)
        for row in list(beside.b.ring)[-count:] if count else []:
            row["finished_s"] += 5.0

    beside.b.serve = five_seconds_off  # type: ignore[method-assign]
    answer = beside.b._samples
    beside.b._samples = lambda after: answer(after) | {"now_s": 105.0 + beside.b.seq}  # type: ignore[method-assign]
    await beside.start()
    await beside.step(1)
    arrived = []
    delivered = await beside.group.read_new()
    assert delivered[0].samples == ()
    for proxy in beside.proxies.values():
        proxy.serve(1)
    (result,) = await beside.group.read_new()
    arrived = [sample.arrived_s for sample in result.samples]
    assert arrived == [beside.now - 1.0] * 3


async def test_the_metrics_of_a_group_count_its_proxies(beside: BesideGroup) -> None:
    await beside.start()
    await beside.step(1)
    beside.b.down = True
    await beside.step(1)
    value = beside.metrics.registry.get_sample_value
    states = {state: value("gorgo_tuner_proxies", {"state": state}) for state in ("in_step", "unreachable")}
    assert states == {"in_step": 2, "unreachable": 1}
    assert value("gorgo_tuner_weights_version", {"proxy": "http://a"}) == beside.a.version


# --- Any sequence of failures, restarts and partial puts: one weight set, or samples that do not count.


NAMES_PUT_PROPERTY = ("a", "b", "c")
START = {"w": 0.0}


class ModelProxy:
    """A proxy: a version, weights, and what the network does to the next calls."""

    def __init__(self) -> None:
        self.version, self.values = 1, dict(START)
        self.reachable = True
        self.loses_answers = False

    def restart(self) -> None:
        self.version, self.values = 1, dict(START)

    def set(self, values: dict[str, float]) -> None:
        self.version, self.values = self.version + 1, dict(values)

    def put(self, call: PutCall) -> int | str:
        """Return the new version, `refused`, or `unanswered`, executed or not."""
        if not self.reachable:
            return "unanswered"
        if call.expected_version != self.version:
            return "refused"
        self.set(dict(call.values))
        return "unanswered" if self.loses_answers else self.version

    @property
    def report(self) -> Reported:
        return Reported(self.version, dict(self.values))


class ModelShell:
    """The shell in a few lines: it does what the agreement and the put say."""

    def __init__(self) -> None:
        self.proxies = {name: ModelProxy() for name in NAMES_PUT_PROPERTY}
        self.agreement = Agreement(NAMES_PUT_PROPERTY)
        self.next_value = 1.0

    def read(self) -> bool:
        """Read all proxies; False if one cannot be reached, and nothing is recorded then."""
        if not all(proxy.reachable for proxy in self.proxies.values()):
            return False
        found = {name: proxy.report for name, proxy in self.proxies.items()}
        if self.agreement.differing(found):
            self.agreement.begin_epoch("other weights")
        self.agreement.record_reports(found)
        return True

    def put(self, cut: str | None) -> None:
        """Put a new set; the network to `cut` breaks after the call, before the undoing."""
        if any(self.agreement.reported(name) is None for name in NAMES_PUT_PROPERTY):
            return
        values = {"w": self.next_value}
        self.next_value += 1
        put = GroupPut(self.agreement, values)
        for name, call in put.calls().items():
            answer = self.proxies[name].put(call)
            if isinstance(answer, int):
                put.applied(name, answer)
            elif answer == "refused":
                put.refused(name)
            else:
                put.unanswered(name)
        if put.complete:
            put.finish_put()
            return
        if cut is not None:
            self.proxies[cut].reachable = False
        if not put.disturbed:
            return
        self.agreement.begin_epoch("undone")
        for name in sorted(put.unknown):
            if self.proxies[name].reachable:
                put.found(name, self.proxies[name].report)
        for name, call in put.undo().items():
            answer = self.proxies[name].put(call)
            if isinstance(answer, int):
                put.undone(name, answer)

    def check(self) -> None:
        """Assert that samples count only while all proxies that can be reached have one set of weights."""
        reachable = {name: proxy for name, proxy in self.proxies.items() if proxy.reachable}
        alike = len({proxy.values["w"] for proxy in reachable.values()}) <= 1
        numbers = {self.agreement.number_of(name, proxy.version) for name, proxy in reachable.items()}
        if not alike:
            assert numbers == {None}, "samples of two weight sets count"
        assert len(numbers - {None}) <= 1, "one number at a time"


EVENT = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([None, *NAMES_PUT_PROPERTY])),
    st.tuples(
        st.sampled_from(["restart", "cut", "mend", "deaf", "hears", "operator"]), st.sampled_from(NAMES_PUT_PROPERTY)
    ),
)


@given(events=st.lists(EVENT, max_size=40))
def test_reachable_proxies_have_one_set_or_their_samples_do_not_count(
    events: Sequence[tuple[str, str | None]],
) -> None:
    shell = ModelShell()
    shell.read()
    for what, name in events:
        if name is not None and what != "put":
            happens(shell.proxies[name], what)
        shell.read()
        if what == "put":
            shell.put(name)
        if all(proxy.reachable for proxy in shell.proxies.values()):
            shell.check()
    for proxy in shell.proxies.values():
        proxy.reachable, proxy.loses_answers = True, False
    assert shell.read()
    shell.put(None)
    assert shell.agreement.in_step, "once all are back, one put brings them to one set"
    shell.check()
    assert {proxy.values["w"] for proxy in shell.proxies.values()} == {shell.next_value - 1}


@given(events=st.lists(EVENT, max_size=40))
def test_a_put_that_fails_leaves_no_reachable_proxy_with_its_weights(
    events: Sequence[tuple[str, str | None]],
) -> None:
    shell = ModelShell()
    shell.read()
    for what, name in events:
        if name is not None and what != "put":
            happens(shell.proxies[name], what)
        if not shell.read() or what != "put":
            continue
        before = {key: dict(proxy.values) for key, proxy in shell.proxies.items()}
        wanted = {"w": shell.next_value}
        shell.put(None)
        now = {key: dict(proxy.values) for key, proxy in shell.proxies.items() if not proxy.loses_answers}
        assert all(values == wanted for values in now.values()) or now == {key: before[key] for key in now}


def happens(proxy: ModelProxy, what: str) -> None:
    match what:
        case "restart":
            proxy.restart()
        case "cut" | "mend":
            proxy.reachable = what == "mend"
        case "deaf" | "hears":
            proxy.loses_answers = what == "deaf"
        case "operator":
            proxy.set({"w": -1.0})


# --- Two candidates for leader beside three proxies in virtual time, while calls, proxies and processes break at any
# call.
#
# At no time have two proxies different weights for longer than the start of a block that is discarded, and the history
# has each generation once.


#: Of a call to a proxy that does not answer: a third of the discarded seconds (`tuner.sidecar.bootstrap`).
TIMEOUT_S = PAPER.discard_s / 3
CALL_S = 0.01
#: Until a standby leads: the lease of the store, and one attempt.
TAKE_OVER_S = 11.0


class KilledError(Exception):
    """The process has ended at once, with its calls."""


class Led:
    """The leadership of the newest process."""

    has_standby = True

    def __init__(self, world: Candidates) -> None:
        self._world = world

    async def try_to_lead(self) -> str | None:
        raise AssertionError("a process that is started leads")

    async def confirm_leadership(self) -> None:
        if self._world.leadership is not self:
            raise LeadershipLost("the lease in the store has ended")

    async def release(self) -> None:
        return


class Candidates(BesideGroup):
    """Processes one after the other, or two at a time; `happens` is called before each call is delivered.

    `stopped` has proxies that take calls and execute them when they go on; they serve nothing meanwhile. `apart_s` is
    the longest time for which proxies that serve had different weights.
    """

    def __init__(self, path: Path) -> None:
        endless = replace(PAPER, max_generations=100_000)
        super().__init__(path, endless, algorithm="random")
        self.happens: Callable[[str, httpx.Request], Awaitable[None]] | None = None
        self.stopped: dict[str, list[httpx.Request]] = {}
        self.apart_s, self._since_s = 0.0, self.now

    async def start(self) -> Sidecar:
        self.leadership = Led(self)
        return await super().start()

    def transport(self, name: str) -> httpx.MockTransport:
        async def deliver(request: httpx.Request) -> httpx.Response:
            if (happens := self.happens) is not None:
                await happens(name, request)
            if name in self.stopped:
                self.stopped[name].append(request)
                self.passes(TIMEOUT_S)
                raise httpx.ReadTimeout("no answer")
            self.passes(CALL_S)
            try:
                return self.proxies[name].handle(request)
            finally:
                self.passes(0.0)

        return httpx.MockTransport(deliver)

    def passes(self, seconds: float) -> None:
        """Advance the clock, and measure for how long the weights have differed."""
        self.now += seconds
        serving = [proxy.weights for name, proxy in self.proxies.items() if name not in self.stopped]
        if all(weights == serving[0] for weights in serving):
            self._since_s = self.now
        self.apart_s = max(self.apart_s, self.now - self._since_s)

    def stop(self, name: str) -> None:
        self.stopped.setdefault(name, [])

    def go_on(self) -> None:
        """Let all stopped proxies execute what they have received."""
        for name, received in [*self.stopped.items()]:
            for request in received:
                self.proxies[name].handle(request)
            del self.stopped[name]
        self.passes(0.0)

    async def turn(self) -> None:
        """Serve, wait as long as the process in charge does, and let it step; a killed or replaced one is followed."""
        for name, proxy in self.proxies.items():
            proxy.serve(0 if name in self.stopped else 2)
        process = self.sidecar
        try:
            self.passes(min(await process.step(), TIMEOUT_S))
        except* KilledError:
            self.passes(TAKE_OVER_S)
            await self.follow()
        except* LeadershipLost:
            assert process is not self.sidecar, "another one leads"

    async def follow(self) -> Sidecar:
        """Start the next process as soon as all proxies answer."""
        self.happens = None
        self.go_on()
        return await self.start()


def break_at(world: Candidates, rng: Random) -> None:
    """Choose what breaks, and at which of the next calls."""
    left, what, victim = rng.randrange(25), rng.choice(["kill", "replace", "stop", "restart"]), rng.choice(NAMES)
    only_puts = rng.random() < 0.5

    async def happens(_name: str, request: httpx.Request) -> None:
        nonlocal left
        left -= request.method == "PUT" or not only_puts
        if left >= 0:
            return
        world.happens = None
        match what:
            case "kill":
                raise KilledError
            case "replace":
                await world.follow()
                await world.sidecar.step()
            case "stop":
                world.stop(victim)
            case "restart":
                world.proxies[victim].restart()

    world.happens = happens


async def survives(path: Path, seed: int, *, breaks: int) -> None:
    world, rng = Candidates(path), Random(seed)
    await world.start()
    for _ in range(breaks):
        break_at(world, rng)
        for _ in range(rng.randrange(3, 12)):
            await world.turn()
        world.go_on()
        await world.turn()
    world.happens = None
    await world.until_generation(len(world.numbers) + 2)
    assert world.apart_s <= PAPER.discard_s
    assert len(world.weights) == 1
    assert world.numbers == list(range(len(world.numbers)))
    assert len(world.history.campaigns()) == 1


@pytest.mark.parametrize("seed", [0, 1])
async def test_whatever_breaks_at_any_call_weights_do_not_differ_beyond_the_discard_and_no_generation_is_missing(
    tmp_path: Path, seed: int
) -> None:
    await survives(tmp_path, seed, breaks=5)


@pytest.mark.system
@pytest.mark.parametrize("seed", range(2, 32))
async def test_the_same_with_more_seeds_and_breaks(tmp_path: Path, seed: int) -> None:
    await survives(tmp_path, seed, breaks=12)


async def test_a_leader_killed_between_two_calls_of_a_put_leaves_one_set_to_its_standby(tmp_path: Path) -> None:
    world = Candidates(tmp_path)
    await world.start()
    await world.until_generation(2)
    puts = []

    async def kill_at_the_second(_name: str, request: httpx.Request) -> None:
        puts.append(request.method) if request.method == "PUT" else None
        if len(puts) == 2:
            raise KilledError

    world.happens = kill_at_the_second
    while len(puts) < 2:
        await world.turn()
    assert len(world.weights) == 2, "the put reached one proxy"
    await world.turn()
    assert len(world.weights) == 1
    assert TAKE_OVER_S < world.apart_s < PAPER.discard_s
    await world.until_generation(5)
    assert world.numbers == [0, 1, 2, 3, 4]
    assert "foreign" not in world.events


async def test_a_proxy_stopped_during_a_put_that_executes_it_later_is_brought_back(tmp_path: Path) -> None:
    world = Candidates(tmp_path)
    await world.start()
    await world.until_generation(2)
    (before,) = world.weights

    async def stop_b(name: str, request: httpx.Request) -> None:
        if name == NAMES[1] and request.method == "PUT":
            world.stop(name)
            world.happens = None

    world.happens = stop_b
    while not world.stopped:
        await world.turn()
    assert world.a.weights == world.proxies[NAMES[2]].weights == before, "undone"
    world.go_on()
    assert world.b.weights != before, "it has executed the put, and nobody waits for the answer"
    await world.turn()
    await world.turn()
    assert len(world.weights) == 1
    assert world.apart_s <= PAPER.discard_s
    await world.until_generation(5)
    assert world.numbers == [0, 1, 2, 3, 4]
    assert "foreign" not in world.events
