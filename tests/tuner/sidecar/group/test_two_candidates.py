"""Two candidates for leader beside three proxies in virtual time, while calls, proxies and processes break at any call.

At no time have two proxies different weights for longer than the start of a block that is discarded, and the history
has each generation once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import pytest

from gorgo.errors import LeadershipLost
from tests.tuner.sidecar.fake_proxy import PAPER
from tests.tuner.sidecar.group.beside_group import NAMES, BesideGroup
from tuner.sidecar.loop import Sidecar

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
