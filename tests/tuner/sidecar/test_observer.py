"""What is said, counted and written of a campaign, and how long is waited after what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.errors import ProxyUnreachable
from tests.tuner.campaign.fleet import START, Proxy, Run
from tests.tuner.history.examples import generation
from tuner.campaign.options import CampaignOptions
from tuner.history import EventRow
from tuner.history.store import EventKind
from tuner.objective import TunerSample
from tuner.proxy_client import ProxyWeights
from tuner.sidecar import observer
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.history_buffer import CampaignStart, HistoryBuffer
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.observer import CampaignObserver
from tuner.sidecar.progress import Reporter
from tuner.sidecar.reader import SampleBatchResult

SAMPLE = TunerSample(1, 0.0, "a", 5, 400.0, 2.0, 12.0, 200)


class Kept(HistoryBuffer):
    """Remembers its rows."""

    def __init__(self) -> None:
        self.complained: list[str] = []
        super().__init__(
            None, 1, CampaignStart(started_s=0.0, target="t", policy="gorgo", options={}), self.complained.append
        )
        self.rows: list[Any] = []

    def add(self, row: Any) -> None:
        self.rows.append(row)


class Told:
    """A teller of a campaign that has just begun, with version 5 of the weights in force."""

    def __init__(self, **options: Any) -> None:
        self.run = Run(Proxy(), CampaignOptions(**{"window": 4, "hop": 2, "warm_up_s": 0.0} | options), start=ALL)
        self.orders = CommandQueue("c", "c p", 5)
        self.journal, self.metrics = Kept(), TunerMetrics()
        self.said: list[str] = []
        self.complaints: list[str] = []
        reporter = Reporter(self.said.append, self.complaints.append)
        self.teller = CampaignObserver(
            self.run.campaign, self.orders, self.journal, reporter, self.metrics, clock=lambda: 1234.0
        )

    def deliver(self, *ttft_ms: float, version: int = 5, lost: int = 0, unreadable: tuple[str, ...] = ()) -> None:
        samples = tuple(replace(SAMPLE, ttft_ms=one, weights_version=version) for one in ttft_ms)
        self.teller.delivered(SampleBatchResult("boot-1", samples, lost, unreadable))

    def count(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"gorgo_tuner_{name}_total", labels)


ALL = {**START, "delta": 3.0}


@pytest.fixture
def told() -> Told:
    return Told()


def test_an_event_is_a_line_now_and_a_row_in_the_history(told: Told) -> None:
    told.teller.log_event("freeze", "by hand", {"w_rtt": 0.5})
    told.teller.log_event("unfreeze", "over")
    assert told.said == ["freeze: by hand", "unfreeze: over"]
    assert told.journal.rows == [
        EventRow(at_s=1234.0, kind="freeze", weights={"w_rtt": 0.5}, reason="by hand"),
        EventRow(at_s=1234.0, kind="unfreeze", weights=None, reason="over"),
    ]


@pytest.mark.parametrize(
    ("lost", "unreadable", "missing", "words"),
    [
        (0, (), 0, []),
        (3, (), 3, ["3 samples are missing: the current measurement starts again"]),
        (
            0,
            ("sample 2: no", "sample 3: no"),
            2,
            ["2 samples are missing: the current measurement starts again; sample 2: no"],
        ),
        (3, ("sample 2: no",), 4, ["4 samples are missing: the current measurement starts again; sample 2: no"]),
    ],
)
def test_samples_that_are_missing_are_said_and_counted(
    told: Told, lost: int, unreadable: tuple[str, ...], missing: int, words: list[str]
) -> None:
    told.deliver(400.0, 500.0, lost=lost, unreadable=unreadable)
    assert told.complaints == words
    assert told.count("lost_samples") == missing
    assert told.count("samples") == 2


def test_the_line_is_about_samples_of_the_weights_in_force(told: Told) -> None:
    told.deliver(100.0, 100.0, version=4)
    told.deliver(400.0, 400.0, 400.0, 400.0, 800.0, 800.0, 800.0, 800.0)
    progress = told.teller.progress(None)
    assert (progress.samples, progress.needed, progress.ttft_ms_p95) == (8, 4, 800.0)
    told.teller.applied()
    progress = told.teller.progress(None)
    assert (progress.samples, progress.ttft_ms_p95) == (0, None)
    told.deliver(400.0)
    told.teller.restarted()
    assert told.teller.progress(None).ttft_ms_p95 is None
    assert told.count("proxy_restarts") == 1
    assert [row.kind for row in told.journal.rows] == ["restart"]


def test_a_generation_is_written_with_the_weights_that_do_not_move(told: Told) -> None:
    told.teller.decided(generation(1, weights={"w_rtt": 0.7, "w_queue": 0.2}, reason="r"))
    (row,) = told.journal.rows
    assert row.weights == {"w_rtt": 0.7, "w_queue": 0.2, "delta": 3.0}
    assert told.said == ["generation 1 accepted: w_rtt=0.7 w_queue=0.2, p95 TTFT 1584 ms: r"]
    assert told.count("generations", outcome="accepted") == 1


def test_a_roll_back_is_counted_and_written(told: Told) -> None:
    told.teller.rolled_back("harm", {"w_rtt": 0.5})
    assert told.count("rollbacks") == 1
    kinds: list[EventKind] = [row.kind for row in told.journal.rows]
    assert (kinds, told.said) == (["rollback"], ["rollback: harm"])


def test_what_fails_is_said_once_and_tried_again_less_and_less_often(told: Told) -> None:
    assert told.teller.back_off_s() is None
    assert told.said == [], "nothing has failed"
    waits = []
    for _ in range(14):
        told.teller.failed(ProxyUnreachable("no answer"))
        waits.append(told.teller.back_off_s())
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 8]
    assert told.complaints == ["no answer; routing goes on, the tuner tries again"]
    assert told.teller.progress("frozen: r").trouble == "no answer"
    told.teller.trouble = None
    assert [told.teller.back_off_s(), told.teller.back_off_s()] == [None, None]
    assert told.said == ["the proxy answers again"]
    assert told.teller.progress("frozen: r").trouble == "frozen: r"
    told.teller.failed(ProxyUnreachable("no answer"))
    assert told.teller.back_off_s() == 0.5
    assert len(told.complaints) == 2


def test_a_step_is_counted_and_shown(told: Told) -> None:
    told.teller.stepped(None)
    told.teller.failed(ProxyUnreachable("no answer"))
    told.teller.stepped(None)
    assert (told.count("polls", result="ok"), told.count("polls", result="failed")) == (1, 1)
    assert told.said == ["warming: w_rtt=0.5 w_queue=0.1, 0 of 4 samples"]
    assert told.metrics.registry.get_sample_value("gorgo_tuner_generation") == 0


@pytest.mark.parametrize(
    ("mode", "arm", "needed", "detail"),
    [("switchback", "incumbent", 0, "0 of 20 pairs"), ("paper", "offspring", 2, "")],
)
def test_progress_says_what_is_waited_for(mode: str, arm: str, needed: int, detail: str) -> None:
    told = Told(mode=mode)
    before = told.teller.progress(None)
    assert (before.phase, before.arm, before.needed, before.detail, before.weights) == ("warming", "", 4, "", None)
    told.run.until(lambda: told.run.campaign.phase == "comparing")
    told.orders.see(ProxyWeights("gorgo", 6, {"w_rtt": 0.7}, None))
    found = told.teller.progress(None)
    assert (found.phase, found.generation, found.arm, found.needed, found.detail) == (
        "comparing",
        1,
        arm,
        needed,
        detail,
    )
    assert (found.weights, found.incumbent) == ({"w_rtt": 0.7}, START)


def test_a_proxy_that_is_away_is_polled_after_half_a_second_and_then_within_half_a_minute() -> None:
    assert (observer.FIRST_BACK_OFF_S, observer.MAX_BACK_OFF_S) == (0.5, 30.0)
