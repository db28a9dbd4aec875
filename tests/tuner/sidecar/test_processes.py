"""Real processes: engines, proxy and tuner, under traffic, while they are killed, frozen and restarted."""

from __future__ import annotations

import signal

import pytest
from typer.testing import CliRunner

from gorgo.cli import app
from tests.tuner.sidecar.rig import TOKEN, Rig, Traffic, until
from tuner.history import History

#: Each starts three or four interpreters; a minute is enough on two cores that are free, and these are shared.
pytestmark = pytest.mark.timeout(240)


@pytest.mark.system
def test_clients_notice_nothing_when_the_tuner_is_killed_and_a_second_one_goes_on(rig: Rig) -> None:
    with Traffic(rig.url) as traffic:
        first = rig.tune()
        rig.until_generation(2)
        version = rig.weights()["version"]
        assert version > 3, "weights were put"
        assert rig.end(first, signal.SIGKILL) == -signal.SIGKILL
        asked = traffic.done
        until(lambda: traffic.done > asked + 20, "traffic without a tuner")
        left = rig.numbers()
        second = rig.tune()
        rig.until_generation(left[-1] + 2)
        assert f"resumes campaign 1, generation {left[-1] + 1}" in rig.said(second)
        assert rig.end(second) == 0
    assert traffic.errors == []
    numbers = rig.numbers()
    assert numbers == list(range(len(numbers)))
    history = History(rig.database)
    assert [row.outcome for row in history.campaigns()] == [None]
    policy, best = history.weights_of("best")
    history.close()
    assert (policy, best) == ("gorgo", rig.weights()["weights"]), "the incumbent is in force when nobody watches"


def test_a_freeze_holds_over_a_restart_of_the_proxy_and_its_end_lets_the_tuner_go_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", TOKEN)
    with Traffic(rig.url):
        tuner = rig.tune()
        rig.until_generation(2)
        words = ["--url", rig.admin]
        frozen = CliRunner().invoke(
            app, ["freeze", *words, "--weights", "1", "--database", rig.database, "--reason", "held-out week"]
        )
        assert frozen.exit_code == 0, frozen.output
        until(lambda: "frozen: held-out week" in rig.said(tuner), "the tuner notices")
        pinned = rig.weights()
        generations = len(rig.numbers())
        assert rig.end("serve") == 0
        until(lambda: "routing goes on, the tuner tries again" in rig.said(tuner), "the tuner misses the proxy")
        rig.serve("serve-again")
        again = rig.weights()
        assert (again["weights"], again["frozen"]) == (pinned["weights"], pinned["frozen"])
        until(lambda: "the proxy answers again" in rig.said(tuner), "the tuner is back")
        assert len(rig.numbers()) == generations, "nothing was tried in between"
        unfrozen = CliRunner().invoke(app, ["unfreeze", *words])
        assert unfrozen.exit_code == 0, unfrozen.output
        rig.until_generation(generations + 1)
        assert rig.end(tuner) == 0
    said = rig.said(tuner)
    assert "restart: the proxy has restarted" in said
    assert "Traceback" not in said
    history = History(rig.database)
    kinds = [event.kind for event in history.events()]
    history.close()
    assert sorted(set(kinds)) == ["foreign", "freeze", "restart", "unfreeze"]
    assert rig.numbers() == list(range(len(rig.numbers())))
