"""Real processes: two proxies under traffic and two tuners, while a leader is killed and a proxy stops during a put."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from gorgo.cli import app
from gorgo.lab.demo import Processes
from tests.live.peer_store.conftest import module_server, redis_server
from tests.live.peer_store.server import ENVIRON, RedisServer
from tests.tuner.sidecar.relay import Relay
from tests.tuner.sidecar.rig import ENDLESS, TOKEN, Rig, Traffic, until, write_config
from tuner.history import EventRow, History

__all__ = ["module_server", "redis_server"]


# --- Two real proxies, candidates for the leader beside them, and a watch over the weights in force.


#: A call of the tuner takes a third at most.
DISCARD_S = 15.0
SETTINGS = f"{{window: 12, hop: 6, warm_up_s: 0, poll_s: 0.1, block_s: 40, discard_s: {DISCARD_S}}}\n"
POLL_S = 0.02


class Watch(threading.Thread):
    """Polls the weights of both proxies; `apart_s` is the longest time for which they differed.

    A proxy without an answer is stopped, and serves nothing.
    """

    def __init__(self, admins: Mapping[str, str]) -> None:
        super().__init__(daemon=True)
        self.apart_s, self.seen = 0.0, 0
        self._admins = admins
        self._ending = threading.Event()

    def run(self) -> None:
        since_s = time.monotonic()
        with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}, timeout=0.5, trust_env=False) as client:
            while not self._ending.wait(POLL_S):
                began_s, found = time.monotonic(), list[object]()
                for admin in self._admins.values():
                    with suppress(httpx.HTTPError):
                        found.append(client.get(f"{admin}/admin/policy").json()["weights"])
                self.seen += len(found) == len(self._admins)
                if all(one == found[0] for one in found):
                    since_s = began_s
                self.apart_s = max(self.apart_s, time.monotonic() - since_s)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self.join()


class GroupRig:
    """Proxies `a` and `b`; the tuners reach `b` through a relay that can stop it when a put comes."""

    def __init__(self, a: Rig, b: Rig, database: str, config: Path | None) -> None:
        self.a, self.b, self.database, self._config = a, b, database, config
        self.stops_b = threading.Event()
        self.stopped = threading.Event()
        self.relay = Relay(int(b.admin.rpartition(":")[2]), self._before)

    @property
    def admins(self) -> dict[str, str]:
        return {"a": self.a.admin, "b": self.b.admin}

    def tune(self) -> str:
        """Start a candidate whose campaign does not end by itself."""
        config = () if self._config is None else ("--config", str(self._config))
        return self.a.tune("--url", self.relay.url, *config, *ENDLESS)

    def _before(self, chunk: bytes) -> None:
        if chunk.startswith(b"PUT ") and self.stops_b.is_set():
            self.stops_b.clear()
            os.kill(self.b.pid("serve-b"), signal.SIGSTOP)
            self.stopped.set()

    def stop_b_during_a_put(self) -> None:
        self.stops_b.set()
        assert self.stopped.wait(60), "no put comes"

    def let_b_go_on(self) -> None:
        os.kill(self.b.pid("serve-b"), signal.SIGCONT)

    def numbers(self) -> list[int]:
        history = History(self.database)
        try:
            return [row.number for row in history.generations()]
        finally:
            history.close()

    def events(self) -> list[EventRow]:
        history = History(self.database)
        try:
            assert len(history.campaigns()) == 1
            return history.events()
        finally:
            history.close()

    def until_generation(self, number: int, tuner: str) -> None:
        until(lambda: number in self.numbers(), f"generation {number}", lambda: self.a.said(tuner))


@contextmanager
def group_rig(
    folder: Path, engines: Mapping[str, str], *, database: str | None = None, store: RedisServer | None = None
) -> Iterator[GroupRig]:
    """Start two proxies, with a history in SQLite unless `database` names one."""
    environ = {**os.environ, **ENVIRON, "GORGO_ADMIN_TOKEN": TOKEN, "PYTHONUNBUFFERED": "1"}
    with Processes(folder, environ) as processes:
        rigs = {}
        for name in ("a", "b"):
            (folder / name).mkdir()
            rigs[name] = rig = Rig(folder / name, processes, engines)
            rig.settings.write_text(SETTINGS)
            if database is not None:
                rig.database = database
            rig.serve(f"serve-{name}")
        config = None
        if store is not None:
            config = folder / "regions.yaml"
            write_config(config, engines)
            shared = {"url": store.url, "group": "g", "key_env": store.shared().key_env}
            config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"shared": shared}))
        group = GroupRig(rigs["a"], rigs["b"], rigs["a"].database, config)
        with group.relay:
            yield group


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


@pytest.mark.system
@pytest.mark.timeout(900)
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
