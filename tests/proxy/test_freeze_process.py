"""`gorgo serve --state` as a process that is killed at any moment, and the commands around it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from pathlib import Path

import httpx
import pytest

from gorgo.config.weights_file import read_weights_file
from gorgo.live.control.state_file import StateFile
from tests.proxy.conftest import Start
from tests.proxy.fakes import DONE, FakeReplica, delta, stream
from tests.proxy.followed import regions
from tests.proxy.served import gorgo, served

#: Each is a start of a process; `make test-system` kills more often.
KILLS = 6
KILLS_LONG = 200


@pytest.fixture
async def folder(start: Start, tmp_path: Path) -> Path:
    replica: FakeReplica = await start.replica(stream(delta("a"), DONE))
    (tmp_path / "regions.yaml").write_bytes(regions({"a": replica}, proxy={"policy": "gorgo"}))
    return tmp_path


async def killed_while_freezing(folder: Path, kills: int) -> None:
    """Unfreeze and freeze as fast as it goes, kill, start: what was answered holds, or what was asked last."""
    chance = random.Random(5)
    file = StateFile(folder / "state.json")
    frozen, version, acknowledged, asked = 0, 1, 0.5, 0.5
    for number in range(kills):
        # So many are answered before it is killed, at some moment of the next: at once every third time.
        answered, enough = number % 3 and chance.randrange(1, 4), asyncio.Event()
        async with served(folder, "--state", str(file.path)) as proxy:
            found = await proxy.weights()
            assert found["weights"]["w_rtt"] in (acknowledged, asked)
            assert found["version"] >= version
            acknowledged = asked = found["weights"]["w_rtt"]
            version, at_rest = found["version"], False

            async def freeze_again_and_again(wanted: int, enough: asyncio.Event) -> None:
                nonlocal frozen, acknowledged, asked, version, at_rest
                while not at_rest:
                    if frozen >= wanted:
                        enough.set()
                    await proxy.admin.post("/admin/unfreeze")
                    asked = round(0.05 + (frozen + 1) % 1000 / 1000, 3)
                    body = {"weights": {"w_rtt": asked}, "reason": "x" * chance.randrange(900)}
                    version = (await proxy.admin.post("/admin/freeze", json=body)).json()["version"]
                    acknowledged = asked
                    frozen += 1
                    at_rest = chance.random() < 0.1  # now and then it is killed at rest, frozen

            freezing = asyncio.create_task(freeze_again_and_again(frozen + answered, enough))
            waiting = asyncio.create_task(enough.wait())
            await asyncio.wait((freezing, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await asyncio.wait((freezing,), timeout=chance.uniform(0.0, 0.02))
            proxy.process.kill()
            await asyncio.wait((freezing,))
            assert at_rest or isinstance(freezing.exception(), httpx.HTTPError)
        kept = file.read()
        assert kept is not None
        assert kept.version >= version
        assert kept.weights["w_rtt"] in (acknowledged, asked)
        if at_rest:
            assert (kept.frozen is not None, kept.weights["w_rtt"]) == (True, acknowledged)
    assert frozen > kills / 2, "changes were made"


@pytest.mark.timeout(180)  # six starts of a process, on a core that others share
@pytest.mark.system
async def test_kill_at_any_moment_leaves_what_was_acknowledged_or_in_flight(folder: Path) -> None:
    await killed_while_freezing(folder, KILLS)


@pytest.mark.system
@pytest.mark.timeout(1200)
async def test_two_hundred_kills_leave_what_was_acknowledged_or_in_flight(folder: Path) -> None:
    await killed_while_freezing(folder, KILLS_LONG)


def weights_file(path: Path, value: float) -> str:
    """Write weights of the policy `gorgo` and return the path as a word of a command."""
    path.write_text(json.dumps({"policy": "gorgo", "weights": {"w_rtt": value}}))
    return str(path)


async def test_a_freeze_by_command_is_said_shown_and_exported(folder: Path) -> None:
    exported, weights = folder / "found.json", weights_file(folder / "tuned.json", 0.7)
    async with served(folder, "--state", str(folder / "state.json")) as proxy:
        at = ("--url", proxy.admin_url)
        done = await gorgo("freeze", *at, "--weights", weights, "--reason", "held-out", "--export", str(exported))
        assert done.returncode == 0, done.stderr
        line = r"policy gorgo w_rtt=0.7 w_queue=0.1, version 2, frozen since \S+ by tester: held-out\n"
        assert re.fullmatch(line, done.stdout)
        assert done.stderr == ""
        status = await gorgo("status", *at)
        assert re.search(line, " ".join(status.stdout.split()) + "\n"), "its lines are as wide as a terminal"
        refused = await gorgo("freeze", *at, "--weights", str(folder / "regions.yaml"))
        assert refused.returncode == 2
    file = read_weights_file(exported)
    assert (file.policy, dict(file.weights), file.note) == ("gorgo", {"w_rtt": 0.7, "w_queue": 0.1}, "held-out")


@pytest.mark.system
async def test_frozen_weights_outlive_a_kill_and_another_policy_until_they_are_unfrozen(folder: Path) -> None:
    state = ("--state", str(folder / "state.json"))
    async with served(folder, *state) as proxy:
        body = {"policy": "gorgo", "weights": {"w_rtt": 0.7}, "by": "tester"}
        assert (await proxy.admin.post("/admin/freeze", json=body)).json()["version"] == 2
        proxy.process.send_signal(signal.SIGKILL)
    async with served(folder, *state, "--policy", "nearest") as proxy:
        at = ("--url", proxy.admin_url)
        found = await proxy.weights()
        assert (found["policy"], found["weights"], found["version"]) == ("gorgo", {"w_rtt": 0.7, "w_queue": 0.1}, 2)
        response = await proxy.admin.put("/admin/weights", json={"weights": {"w_rtt": 0.5}})
        assert response.status_code == 409
        refused = await gorgo("freeze", *at, "--weights", weights_file(folder / "other.json", 0.9))
        assert refused.returncode == 1
        assert "answered 409: the weights are frozen since" in refused.stderr
        unfrozen = await gorgo("unfreeze", *at, "--json")
        assert json.loads(unfrozen.stdout)["frozen"] is None


async def test_a_freeze_without_a_state_file_warns_that_it_ends_with_its_process(folder: Path) -> None:
    async with served(folder, "--weights", weights_file(folder / "tuned.json", 0.7)) as proxy:
        assert (await proxy.weights())["weights"]["w_rtt"] == 0.7
        done = await gorgo("freeze", "--url", proxy.admin_url)
        assert "without --state: the freeze ends with its process" in done.stderr


@pytest.mark.parametrize("text", ['{"gorgo_state": 1', '{"gorgo_state": 2}'])
async def test_state_that_cannot_be_read_ends_the_start_with_its_reason(folder: Path, text: str) -> None:
    (folder / "state.json").write_text(text)
    done = await gorgo("serve", "--config", str(folder / "regions.yaml"), "--state", str(folder / "state.json"))
    assert done.returncode == 2
    assert f"{folder / 'state.json'}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "state.json").read_text() == text


async def test_request_log_that_cannot_be_written_ends_the_start(folder: Path) -> None:
    words = ("serve", "--config", str(folder / "regions.yaml"), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0")
    done = await gorgo(*words, "--request-log", str(folder / "nowhere" / "log"))
    assert done.returncode == 2
    assert "cannot write a request log: No such file or directory" in done.stderr
