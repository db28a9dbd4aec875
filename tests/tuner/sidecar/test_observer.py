"""What is said, counted and written of a campaign, and a database in trouble: nothing is lost, everything is said."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from gorgo.errors import HistoryError, ProxyUnreachable
from tests.tuner.campaign.fleet import START, Proxy, Run
from tests.tuner.history.examples import generation
from tuner.campaign.options import CampaignOptions
from tuner.history import CampaignRow, EventRow, History, database
from tuner.history.store import EventKind
from tuner.objective import TunerSample
from tuner.proxy_client import ProxyWeights, SampleBatchResult
from tuner.sidecar import history_buffer, loop
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.history_buffer import FIRST_RETRY_S, MAX_WAITING, CampaignStart, HistoryBuffer, as_line
from tuner.sidecar.loop import CampaignObserver
from tuner.sidecar.metrics import TunerMetrics
from tuner.sidecar.progress import Reporter

# --- What is said, counted and written of a campaign, and how long is waited after what fails.


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
    assert (loop.FIRST_BACK_OFF_S, loop.MAX_BACK_OFF_S) == (0.5, 30.0)


# --- A database in trouble: nothing is lost, everything is said, and it is not asked all the time.


BEGINNING = CampaignStart(started_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
STOP = EventRow(at_s=2.0, kind="stop", weights=None, reason="the end")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


@pytest.fixture
def history(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.02)
    opened = History(f"sqlite:///{path}")
    opened.begin_campaign(now_s=1.0, target="http://proxy", policy="gorgo", options={"seed": 1})
    yield opened
    opened.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def journal(history: History, said: list[str]) -> HistoryBuffer:
    return HistoryBuffer(history, 1, BEGINNING, said.append)


def numbers(history: History) -> list[int]:
    return [row.number for row in history.generations()]


def test_a_row_and_where_the_campaign_is_after_it_are_written_together(
    journal: HistoryBuffer, history: History
) -> None:
    journal.add(generation(0))
    journal.save({"generation": 1})
    assert journal.flush(now=10.0)
    assert numbers(history) == [0]
    assert history.unfinished(target="http://proxy", policy="gorgo") == (1, {"generation": 1})


def test_an_outcome_ends_the_campaign(journal: HistoryBuffer, history: History) -> None:
    journal.save({"generation": 1})
    journal.end("converged")
    assert journal.flush(now=10.0)
    (row,) = history.campaigns()
    assert (row.outcome, row.finished_s) == ("converged", 10.0)
    assert history.unfinished(target="http://proxy", policy="gorgo") is None


def test_rows_wait_for_a_locked_database_and_are_written_in_order(
    journal: HistoryBuffer, history: History, path: Path, said: list[str]
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for number in range(3):
        journal.add(generation(number))
        assert not journal.flush(now=10.0 + number)
    assert journal.waiting == 3
    assert len(said) == 1
    assert "another process" in said[0]
    other.execute("ROLLBACK")
    other.close()
    assert not journal.flush(now=10.5), "not asked again so soon"
    assert journal.flush(now=10.0 + FIRST_RETRY_S)
    assert numbers(history) == [0, 1, 2]
    assert said[-1] == "the history is written again"


def test_a_full_disk_keeps_the_rows_of_before_and_gets_the_others_later(
    journal: HistoryBuffer, history: History, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)

    def small(connection: sqlite3.Connection, _entry: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(history._engine, "connect", small)
    for number in range(1, 21):
        journal.add(generation(number, reason="x" * 1_000))
    assert not journal.flush(now=2.0)
    assert "disk is full" in said[0]
    assert numbers(history)[0] == 0
    assert len(numbers(history)) < 21
    event.remove(history._engine, "connect", small)
    assert journal.flush(now=3.0, at_once=True)
    assert numbers(history) == list(range(21))


def test_a_damaged_file_that_is_moved_away_is_replaced_by_a_new_one(
    journal: HistoryBuffer, history: History, path: Path, said: list[str]
) -> None:
    journal.add(generation(0))
    assert journal.flush(now=1.0)
    for file in path.parent.glob("history.sqlite3-*"):
        file.unlink()
    path.write_bytes(b"a diary, not a database\n" * 1000)
    journal.add(generation(1))
    assert not journal.flush(now=2.0)
    assert "not a database" in said[0]
    path.rename(path.with_suffix(".damaged"))
    journal.save({"generation": 2})
    assert journal.flush(now=100.0)
    assert numbers(history) == [1]
    assert [row.target for row in history.campaigns()] == ["http://proxy"]
    assert "campaign 1 there" in said[1]


def test_what_was_never_written_is_left_over_as_json(journal: HistoryBuffer, path: Path, said: list[str]) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.add(generation(4))
    journal.add(STOP)
    assert not journal.flush(now=1.0)
    other.close()
    assert [line[:12] for line in journal.unsaved()] == ['{"number": 4', '{"at_s": 2.0']


def test_a_row_that_finds_no_room_is_said_whole(journal: HistoryBuffer, said: list[str]) -> None:
    for number in range(MAX_WAITING + 1):
        journal.add(generation(number))
    assert journal.waiting == MAX_WAITING
    assert '"number": 0' in said[0]
    assert "is lost" in said[0]


def test_a_dry_run_writes_nothing(said: list[str]) -> None:
    journal = HistoryBuffer(None, 0, BEGINNING, said.append)
    journal.add(STOP)
    journal.save({})
    journal.end("over")
    assert journal.waiting == 0
    assert journal.flush(now=1.0)


class Trouble:
    """A history that refuses to be written while there are words for it."""

    def __init__(self) -> None:
        self.words: str | None = "locked"
        self.written: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []
        self.row: CampaignRow | None = None
        self.asked_s: list[float] = []

    def write(self, campaign: int, **what: Any) -> None:
        self.asked_s.append(what["now_s"])
        if self.words is not None:
            raise HistoryError(self.words)
        self.written.append({"campaign": campaign} | what)

    def bring_up_to_date(self) -> None:
        pass

    def campaign(self, _number: int) -> CampaignRow | None:
        return self.row

    def begin_campaign(self, **what: Any) -> int:
        self.begun.append(what)
        return 9


def troubled(said: list[str]) -> tuple[HistoryBuffer, Trouble]:
    trouble = Trouble()
    return HistoryBuffer(trouble, 1, BEGINNING, said.append), trouble  # type: ignore[arg-type]


def known(**changes: Any) -> CampaignRow:
    mine: dict[str, Any] = {"id": 1, "started_s": 1.0, "finished_s": None, "outcome": None, "target": "http://proxy"}
    return CampaignRow(**mine | {"policy": "gorgo", "options": {}} | changes)


def test_a_database_in_trouble_is_asked_less_and_less_often(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.row = known()
    journal.add(STOP)
    for half_s in range(600):
        assert not journal.flush(now=half_s / 2)
    assert trouble.asked_s == [0.0, 5.0, 15.0, 35.0, 75.0, 135.0, 195.0, 255.0]
    trouble.words = None
    assert not journal.flush(now=314.9)
    assert journal.flush(now=315.0)
    trouble.words = "locked"
    journal.add(STOP)
    assert not journal.flush(now=320.0)
    assert not journal.flush(now=325.0)
    assert trouble.asked_s[-2:] == [320.0, 325.0], "from the first wait again"


def test_what_waits_is_the_order_of_the_rows_and_only_the_newest_state(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.words = None
    journal.add(generation(0))
    journal.add(STOP)
    journal.add(generation(1))
    journal.save({"generation": 1})
    journal.save({"generation": 2})
    assert journal.waiting == 3
    assert journal.flush(now=7.0)
    assert trouble.written == [
        {
            "campaign": 1,
            "generations": [generation(0), generation(1)],
            "events": [STOP],
            "state": {"generation": 2},
            "outcome": None,
            "now_s": 7.0,
        }
    ]
    assert journal.waiting == 0
    assert journal.flush(now=8.0)
    assert len(trouble.written) == 1, "what was written is not written again"


@pytest.mark.parametrize("what", ["row", "state", "outcome"])
def test_a_single_thing_to_write_is_written(what: str, said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.words = None
    if what == "row":
        journal.add(STOP)
    elif what == "state":
        journal.save({})
    else:
        journal.end("over")
    assert [journal.flush(now=7.0), journal.flush(now=8.0)] == [True, True]
    assert len(trouble.written) == 1, "what is written does not wait any more"
    assert trouble.begun == [], "there was no trouble to find it again after"


def test_an_error_is_said_once_and_again_when_it_changes(said: list[str]) -> None:
    journal, trouble = troubled(said)
    trouble.row = known()
    journal.add(STOP)
    for words in ("locked", "locked", "full", "full", "locked"):
        trouble.words = words
        assert not journal.flush(now=0.0, at_once=True)
    assert said == [f"{words}; routing goes on, 1 rows wait to be written" for words in ("locked", "full", "locked")]
    assert journal.error == "locked"
    trouble.words = None
    assert journal.flush(now=0.0, at_once=True)
    assert said[3:] == ["the history is written again"]
    journal.add(STOP)
    assert journal.flush(now=0.0), "and nothing is waited for any more"
    assert len(said) == 4


@pytest.mark.parametrize(
    ("row", "mine"),
    [(known(), True), (None, False), (known(started_s=2.0), False), (known(target="http://other"), False)],
)
def test_after_trouble_the_campaign_s_row_is_looked_for(row: CampaignRow | None, mine: bool, said: list[str]) -> None:
    journal, trouble = troubled(said)
    journal.add(STOP)
    assert not journal.flush(now=0.0)
    trouble.words, trouble.row = None, row
    assert journal.flush(now=FIRST_RETRY_S)
    assert trouble.written[0]["campaign"] == journal.campaign == (1 if mine else 9)
    begun = {"now_s": 1.0, "target": "http://proxy", "policy": "gorgo", "options": {"seed": 1}}
    assert trouble.begun == ([] if mine else [begun])
    assert ("the database is another one: this is campaign 9 there" in said) != mine


def test_rows_are_one_line_of_json_each() -> None:
    assert json.loads(as_line(generation(4))) == generation(4).as_json()
    assert json.loads(as_line(STOP)) == {"at_s": 2.0, "kind": "stop", "weights": None, "reason": "the end"}


def test_a_thousand_rows_wait_for_a_database_in_trouble_and_the_oldest_is_lost(said: list[str]) -> None:
    journal, trouble = troubled(said)
    for number in range(1001):
        journal.add(EventRow(at_s=float(number), kind="stop", weights={"w": 1.0}, reason="r"))
    assert (journal.waiting, MAX_WAITING) == (1000, 1000)
    assert len(said) == 1
    assert '"at_s": 0.0' in said[0]
    assert '"weights": {"w": 1.0}' in said[0]
    trouble.words = None
    assert journal.flush(now=1.0)
    assert journal.waiting == 0


def test_a_database_is_tried_again_after_five_seconds_and_then_within_a_minute() -> None:
    assert (FIRST_RETRY_S, history_buffer.MAX_RETRY_S) == (5.0, 60.0)
