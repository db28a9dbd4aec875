"""Real processes: two proxies under traffic and two tuners, while a leader is killed and a proxy stops during a put."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from tests.live.peer_store.conftest import module_server, redis_server
from tests.tuner.sidecar.group.group_rig import DISCARD_S, GroupRig, Watch, group_rig
from tests.tuner.sidecar.rig import TOKEN, Traffic, until

__all__ = ["module_server", "redis_server"]

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

Opened = Callable[..., GroupRig]


@pytest.fixture(params=["store", "postgresql"])
def group(request: pytest.FixtureRequest, tmp_path: Path, engines: dict[str, str]) -> Iterator[GroupRig]:
    """Two proxies, with a lease in the store and a history in SQLite, or with both in PostgreSQL."""
    if request.param == "store":
        options = {"store": request.getfixturevalue("redis_server")}
    else:
        options = {"database": request.getfixturevalue("postgres").new_database()}
    with group_rig(tmp_path, engines, **options) as group:
        yield group


def gorgo(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_killed_leader_and_a_proxy_that_stops_during_a_put_leave_one_weight_set_and_a_whole_history(
    group: GroupRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", TOKEN)
    a, both = group.a, ["--url", group.a.admin, "--url", group.b.admin]
    with ExitStack() as running:
        traffic = [running.enter_context(Traffic(rig.url)) for rig in (group.a, group.b)]
        watch = running.enter_context(Watch(group.admins))
        first = group.tune()
        group.until_generation(1, first)
        second = group.tune()
        a.until_said(second, "standby: another process leads")
        group.until_generation(2, first)

        assert a.end(first, signal.SIGKILL) == -signal.SIGKILL
        a.until_said(second, "leader: takes over from the history")
        a.until_said(second, "resumes campaign 1")
        third = group.tune()
        a.until_said(third, "standby: another process leads")
        group.until_generation(len(group.numbers()) + 1, second)

        version = a.weights()["version"]
        group.stop_b_during_a_put()
        a.until_said(second, "routing goes on, the tuner tries again")
        until(lambda: a.weights()["version"] >= version + 2, "the put is undone at the other proxy")
        group.let_b_go_on()
        a.until_said(second, "the proxy answers again")
        group.until_generation(len(group.numbers()) + 1, second)

        gorgo("freeze", *both, "--reason", "held-out week")
        a.until_said(second, "frozen: held-out week")
        assert gorgo("status", *both).splitlines()[-1] == "2 proxies: the same weights, frozen"
        gorgo("unfreeze", *both)
        group.until_generation(len(group.numbers()) + 1, second)

        assert a.end(second) == 0, "the incumbent is in force"
        a.until_said(third, "leader: takes over from the history")
        group.until_generation(len(group.numbers()) + 1, third)
        assert a.end(third) == 0
    assert [one.errors for one in traffic] == [[], []]
    assert watch.seen > 100
    assert watch.apart_s <= DISCARD_S
    assert group.a.weights()["weights"] == group.b.weights()["weights"]
    numbers = group.numbers()
    assert numbers == list(range(len(numbers)))
    for tuner in (first, second, third):
        assert "Traceback" not in a.said(tuner)
