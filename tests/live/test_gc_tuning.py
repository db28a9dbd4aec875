"""The collector may look rarely, because nothing large waits for it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gorgo.cli.launch import FULL_RUNS, MIDDLE_RUNS, YOUNG_OBJECTS
from tests.proxy.conftest import Running, Start, until
from tests.proxy.fakes import DONE, Script, answer, chat, delta, hang, reset_after, stream
from tests.proxy.raw import connected

CHAT = "/v1/chat/completions"
LARGE = 300_000
BODY = chat(stream=True, messages=[{"role": "user", "content": "x" * LARGE}])
ANSWER = delta("y" * LARGE)


@pytest.fixture
def cycles() -> Iterator[list[object]]:
    """No garbage is collected during the test; what there is then is kept in this list by the next `gc.collect`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param([[stream(ANSWER, DONE)]], id="a stream"),
        pytest.param([[answer(200, ANSWER)]], id="a whole answer"),
        pytest.param([[answer(500)], [stream(ANSWER, DONE)]], id="a failover"),
        pytest.param([[reset_after(ANSWER)]], id="an answer that breaks off"),
        pytest.param([[answer(503)]], id="a refusal"),
    ],
)
async def test_no_body_is_left_to_the_collector(
    start: Start, scripts: list[list[Script]], cycles: list[object]
) -> None:
    fleet = await start.fleet(*scripts)
    for _ in range(3):
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY, "connection: close")
            assert await client.rest()
    await expect_nothing_large(fleet, cycles)


async def test_no_body_of_a_client_that_left_is_left_to_the_collector(start: Start, cycles: list[object]) -> None:
    fleet = await start.fleet([hang(ANSWER)])
    for _ in range(3):
        fleet.replicas[0].dropped.clear()
        async with connected(fleet.addresses.data) as client:
            await client.post(CHAT, BODY)
            await client.head()
            client.reset()
            await until(fleet.replicas[0].dropped.is_set)
    await expect_nothing_large(fleet, cycles)


def test_what_is_there_at_the_start_is_frozen_and_the_collector_runs_from_then_on() -> None:
    """In a process of its own: the setting is for all of it."""
    program = (
        "import gc; from gorgo.cli.launch import freeze_startup_objects; gc.disable(); freeze_startup_objects(); "
        "print(gc.get_freeze_count() > 0, gc.isenabled(), gc.get_threshold())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"True True {(YOUNG_OBJECTS, MIDDLE_RUNS, FULL_RUNS)}"


async def expect_nothing_large(fleet: Running, cycles: list[object]) -> None:
    await fleet.idle()
    gc.collect()
    found = {type(item).__name__ for item in cycles for held in gc.get_referents(item) if is_large(held)}
    assert found == set()


def is_large(thing: object) -> bool:
    return isinstance(thing, bytes | bytearray | str) and len(thing) >= LARGE
