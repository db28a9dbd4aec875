"""The history remembers what it was told, on every database; how one is opened, and what transactions lock."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, func, inspect, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from gorgo.errors import HistoryError, LeadershipLost
from tests.tuner.history.examples import generation
from tuner.campaign.generation import Generation
from tuner.commands import read_history, weights_of
from tuner.history import CampaignRow, EventRow, History, database
from tuner.history.database import WORD_CHARACTERS, StateTable, TableBase, open_engine, reading, writing
from tuner.history.store import EventKind, row_of, weights_in

# --- The history remembers what it was told, on every database.


TARGET = {"target": "http://127.0.0.1:9090", "policy": "gorgo"}


def begin(history: History) -> int:
    return history.begin_campaign(now_s=1_000.0, options={"mode": "paper"}, **TARGET)


def test_generations_come_back_in_order_as_they_were_told(history: History) -> None:
    campaign = begin(history)
    told = [generation(n, sigma=None if n == 1 else 0.5 / (n + 1), accepted=n != 1) for n in range(3)]
    for one in told:
        history.record(campaign, one)
    assert history.generations() == told
    assert history.generations(limit=2) == told[1:]


def test_a_generation_told_twice_is_kept_once_as_it_was_first(history: History) -> None:
    campaign = begin(history)
    history.record(campaign, generation(reason="first"))
    history.record(campaign, generation(reason="second"))
    assert [one.reason for one in history.generations()] == ["first"]


def test_campaigns_are_apart(history: History) -> None:
    first, second = begin(history), begin(history)
    history.record(first, generation(0, reason="of the first"))
    history.record(second, generation(0, reason="of the second"))
    assert [one.reason for one in history.generations(first)] == ["of the first"]
    assert [one.reason for one in history.generations()] == ["of the second"], "the newest by default"
    assert [one.id for one in history.campaigns()] == [second, first]


def test_a_restart_finds_the_newest_campaign_that_has_not_ended(history: History) -> None:
    assert history.unfinished(**TARGET) is None
    first, second = begin(history), begin(history)
    history.write(first, state={"generation": 3}, now_s=1.0)
    history.write(second, state={"generation": 1}, now_s=2.0)
    history.write(second, state={"generation": 2}, now_s=3.0)
    assert history.unfinished(**TARGET) == (second, {"generation": 2})
    assert history.unfinished(target=TARGET["target"], policy="gorgo-ms") is None
    history.end_campaign(second, now_s=4.0, outcome="converged")
    assert history.unfinished(**TARGET) == (first, {"generation": 3})
    assert [(one.outcome, one.finished_s) for one in history.campaigns()] == [("converged", 4.0), (None, None)]


def test_events_are_kept_with_and_without_a_campaign(history: History) -> None:
    campaign = begin(history)
    history.record_event("freeze", now_s=5.0, reason="by hand", weights={"w_rtt": 0.7})
    history.record_event("rollback", now_s=6.0, reason="E2E p95 over its bound", campaign=campaign)
    assert [(one.kind, one.weights) for one in history.events()] == [("freeze", {"w_rtt": 0.7}), ("rollback", None)]
    assert [one.kind for one in history.events(campaign)] == ["rollback"]


def event(at_s: float, kind: EventKind = "rollback", weights: dict[str, float] | None = None) -> EventRow:
    return EventRow(at_s=at_s, kind=kind, weights=weights, reason=f"at {at_s:g}")


def states(url: str) -> int:
    """Rows that say where a campaign is."""
    engine = open_engine(url)
    with engine.execution_options(begin="BEGIN").connect() as connection:
        count = connection.execute(select(func.count()).select_from(StateTable)).scalar_one()
    engine.dispose()
    return int(count)


def test_what_is_written_at_once_is_found_under_its_campaign(history: History) -> None:
    first, second = begin(history), begin(history)
    told = [event(5.0, weights={"w_rtt": 0.7}), event(6.0, "stop")]
    history.write(first, generations=[generation(0), generation(1)], events=told, state={"generation": 2}, now_s=7.0)
    history.write(second, generations=[generation(0, reason="another")], events=[event(8.0)], now_s=9.0)
    assert history.events(first) == told
    assert history.events(second) == [event(8.0)]
    assert history.events() == [*told, event(8.0)]
    assert history.events(limit=2) == [told[1], event(8.0)]
    assert [row.number for row in history.generations(first)] == [0, 1]
    assert history.unfinished(**TARGET) == (first, {"generation": 2}), "the second has said nothing of where it is"


def test_a_row_that_is_written_twice_is_kept_once(history: History) -> None:
    campaign = begin(history)
    history.write(campaign, generations=[generation(0, reason="first")], now_s=1.0)
    history.write(campaign, generations=[generation(0, reason="second"), generation(1)], now_s=2.0)
    assert [(row.number, row.reason) for row in history.generations()] == [(0, "first"), (1, "the start")]


def test_where_a_campaign_is_is_replaced_and_goes_with_its_end(history: History, url: str) -> None:
    first, second = begin(history), begin(history)
    for number in range(3):
        history.write(first, state={"generation": number}, now_s=float(number))
        history.write(second, state={"generation": 10 + number}, now_s=float(number))
    assert states(url) == 2
    history.write(second, events=[event(4.0)], now_s=4.0)
    assert history.unfinished(**TARGET) == (second, {"generation": 12}), "an event alone leaves it as it is"
    history.write(second, state={"generation": 13}, outcome="converged", now_s=5.0)
    assert states(url) == 1
    assert history.unfinished(**TARGET) == (first, {"generation": 2})
    history.write(first, outcome="100 generations", now_s=6.0)
    assert states(url) == 0
    assert [(row.outcome, row.finished_s) for row in history.campaigns()] == [
        ("converged", 5.0),
        ("100 generations", 6.0),
    ]


def test_a_campaign_that_is_ended_by_itself_leaves_no_state_and_the_others_theirs(history: History, url: str) -> None:
    first, second = begin(history), begin(history)
    for campaign in (first, second):
        history.write(campaign, state={"generation": 1}, now_s=1.0)
    history.end_campaign(first, now_s=2.0, outcome="left")
    assert states(url) == 1
    assert history.unfinished(**TARGET) == (second, {"generation": 1})


def test_a_campaign_s_row_is_found_by_its_number(history: History) -> None:
    first, second = begin(history), begin(history)
    expected = {"started_s": 1_000.0, "finished_s": None, "outcome": None, "options": {"mode": "paper"}}
    assert history.campaign(first) == CampaignRow(id=first, **expected, **TARGET)  # type: ignore[arg-type]
    assert history.campaign(second + 1) is None
    assert [row.id for row in history.campaigns(limit=1)] == [second]


def test_only_the_same_proxy_s_campaign_is_continued(history: History) -> None:
    history.write(begin(history), state={}, now_s=1.0)
    assert history.unfinished(target="http://another:9090", policy="gorgo") is None


def test_weights_of_an_older_campaign_are_found_by_its_number(history: History) -> None:
    first = begin(history)
    history.record(first, generation(0, weights={"w_rtt": 0.7}))
    second = history.begin_campaign(now_s=1.0, target="t", policy="gorgo-ms", options={})
    history.record(second, generation(0, weights={"w_rtt": 0.9}))
    assert history.weights_of("best") == ("gorgo-ms", {"w_rtt": 0.9})
    assert history.weights_of("0", first) == ("gorgo", {"w_rtt": 0.7})
    with pytest.raises(HistoryError, match="no campaign has one"):
        history.weights_of("1")
    with pytest.raises(HistoryError, match="campaign 2 has none"):
        history.weights_of("1", second)


def test_weights_are_looked_for_in_older_campaigns_too(history: History) -> None:
    first, second = begin(history), begin(history)
    for number in (0, 1):
        history.record(first, generation(number, weights={"w_rtt": 0.5 + number}))
    history.record(second, generation(0, accepted=False, weights={"w_rtt": 0.9}))
    assert history.weights_of("best") == ("gorgo", {"w_rtt": 1.5})
    assert history.weights_of("1") == ("gorgo", {"w_rtt": 1.5})
    assert history.weights_of("0") == ("gorgo", {"w_rtt": 0.9})


def test_a_history_without_a_campaign_says_that_it_is_empty(history: History) -> None:
    assert history.generations() == []
    with pytest.raises(HistoryError, match="the history is empty"):
        history.weights_of("best")


def test_best_is_the_last_accepted_and_a_number_is_that_generation(history: History) -> None:
    campaign = begin(history)
    for number, accepted in enumerate([True, True, False]):
        history.record(campaign, generation(number, accepted=accepted, weights={"w_rtt": 0.1 + number}))
    assert history.weights_of("best") == ("gorgo", {"w_rtt": 1.1})
    assert history.weights_of("2") == ("gorgo", {"w_rtt": 2.1})


@pytest.mark.parametrize("wanted", ["best", "7", "-1", "worst"])
def test_weights_that_are_not_there_are_a_clear_error(history: History, wanted: str) -> None:
    with pytest.raises(HistoryError, match=wanted):
        history.weights_of(wanted)


def test_a_second_reader_sees_what_the_first_wrote(history: History, url: str) -> None:
    history.record(begin(history), generation())
    other = History(url)
    assert other.generations() == [generation()]
    other.close()


def test_migrations_make_the_tables_that_the_models_describe(history: History, url: str) -> None:
    engine = open_engine(url)
    with engine.execution_options(begin="BEGIN").connect() as connection:
        found = inspect(connection)
        tables = {name: {column["name"] for column in found.get_columns(name)} for name in found.get_table_names()}
        nullable = {
            (name, column["name"])
            for name in found.get_table_names()
            for column in found.get_columns(name)
            if column["nullable"]
        }
    tables.pop("alembic_version")
    assert tables == {table.name: set(table.columns.keys()) for table in TableBase.metadata.sorted_tables}
    assert nullable == {
        (table.name, column.name)
        for table in TableBase.metadata.sorted_tables
        for column in table.columns
        if column.nullable
    }
    engine.dispose()


def test_a_password_is_not_in_an_error() -> None:
    with pytest.raises(HistoryError) as caught:
        History("postgresql://gorgo:secret@127.0.0.1:1/nowhere")
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://a@b/c", "sqlite://", "sqlite:////no/such/folder/h.db", "oracle+x://h"]
)
def test_a_url_of_no_database_says_what_is_expected(url: str) -> None:
    with pytest.raises(HistoryError):
        History(url)


def test_two_histories_may_be_opened_at_once(url: str) -> None:
    first, second = History(url), History(url)
    one, other = begin(first), begin(second)
    assert one != other
    first.close()
    second.close()


def test_sqlite_is_set_up_to_survive_a_kill(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/history.sqlite3"
    History(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()


def test_a_state_that_is_saved_after_the_end_continues_nothing(history: History) -> None:
    campaign = begin(history)
    history.end_campaign(campaign, now_s=2.0, outcome="left")
    history.write(campaign, state={"generation": 1}, now_s=3.0)
    assert history.unfinished(**TARGET) is None


def test_a_state_says_when_it_was_saved(history: History, url: str) -> None:
    first, second = begin(history), begin(history)
    history.write(first, state={}, now_s=3.0)
    history.write(second, state={}, now_s=4.0)
    engine = open_engine(url)
    with engine.execution_options(begin="BEGIN").connect() as connection:
        saved = connection.execute(select(StateTable.campaign_id, StateTable.saved_s)).all()
    engine.dispose()
    assert {int(row[0]): row[1] for row in saved} == {first: 3.0, second: 4.0}


def test_an_event_says_when_it_was(history: History) -> None:
    history.record_event("freeze", now_s=5.0, reason="by hand")
    assert history.events() == [EventRow(at_s=5.0, kind="freeze", weights=None, reason="by hand")]


def test_a_listing_gives_the_last_thousand_unless_said(history: History) -> None:
    campaign = begin(history)
    history.write(campaign, events=[event(float(place)) for place in range(1001)], now_s=1.0)
    found = history.events()
    assert [found[0].at_s, found[-1].at_s, len(found)] == [1.0, 1000.0, 1000]


@pytest.mark.parametrize(("number", "words"), [("9" * 9, "no generation"), ("9" * 10, "names no weights")])
def test_a_generation_s_number_has_at_most_nine_digits(history: History, number: str, words: str) -> None:
    begin(history)
    with pytest.raises(HistoryError, match=words):
        history.weights_of(number)


def test_every_constraint_has_the_name_that_the_first_migration_gave_it() -> None:
    tables = TableBase.metadata.sorted_tables
    constraints = {str(found.name) for table in tables for found in table.constraints}
    assert constraints | {str(found.name) for table in tables for found in table.indexes} == {
        "pk_campaign",
        "pk_generation",
        "fk_generation_campaign_id",
        "uq_generation_campaign_id",
        "pk_event",
        "fk_event_campaign_id",
        "ix_event_campaign_id",
        "pk_state",
        "fk_state_campaign_id",
    }
    assert TableBase.metadata.naming_convention == {
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }


def test_a_word_has_64_characters() -> None:
    widths = {
        getattr(column.type, "length", None) for table in TableBase.metadata.sorted_tables for column in table.columns
    }
    assert (widths, WORD_CHARACTERS) == ({None, 64}, 64)


CAMPAIGN = {
    "id": 1,
    "started_s": 5.0,
    "finished_s": None,
    "outcome": None,
    "target": "t",
    "policy": "gorgo",
    "options": {"alpha": 0.05},
}
EVENT = {"at_s": 5.0, "kind": "freeze", "weights": None, "reason": "r"}
GENERATION = asdict(generation())
#: The last second of the year 9999.
LAST_S = 253_402_300_799.0


@pytest.mark.parametrize(
    ("kind", "values", "change"),
    [
        (CampaignRow, CAMPAIGN, {"started_s": 0.0}),
        (CampaignRow, CAMPAIGN, {"started_s": 0}),
        (CampaignRow, CAMPAIGN, {"started_s": LAST_S, "finished_s": LAST_S}),
        (CampaignRow, CAMPAIGN, {"outcome": "converged", "finished_s": 0.0}),
        (CampaignRow, CAMPAIGN, {"options": {}}),
        (EventRow, EVENT, {"at_s": LAST_S, "weights": {}}),
        (EventRow, EVENT, {"at_s": 0.0, "weights": {"w_rtt": 1}}),
        (Generation, GENERATION, {"started_s": 0.0, "finished_s": LAST_S}),
        (Generation, GENERATION, {"accepted": False, "objective_ms": None, "weights_version": None}),
    ],
)
def test_what_a_field_can_have_is_a_row(kind: type[Any], values: dict[str, Any], change: dict[str, Any]) -> None:
    assert asdict(row_of(kind, values | change)) == values | change


@pytest.mark.parametrize(
    ("kind", "values", "name", "value"),
    [
        (CampaignRow, CAMPAIGN, "id", True),
        (CampaignRow, CAMPAIGN, "id", 1.0),
        (CampaignRow, CAMPAIGN, "id", None),
        (CampaignRow, CAMPAIGN, "started_s", -0.001),
        (CampaignRow, CAMPAIGN, "started_s", LAST_S + 1.0),
        (CampaignRow, CAMPAIGN, "started_s", None),
        (CampaignRow, CAMPAIGN, "started_s", True),
        (CampaignRow, CAMPAIGN, "finished_s", -1.0),
        (CampaignRow, CAMPAIGN, "finished_s", LAST_S + 1.0),
        (CampaignRow, CAMPAIGN, "target", None),
        (CampaignRow, CAMPAIGN, "policy", 7),
        (CampaignRow, CAMPAIGN, "outcome", 7),
        (CampaignRow, CAMPAIGN, "options", None),
        (CampaignRow, CAMPAIGN, "options", []),
        (CampaignRow, CAMPAIGN, "options", {"alpha": float("nan")}),
        (EventRow, EVENT, "at_s", -1.0),
        (EventRow, EVENT, "at_s", LAST_S + 1.0),
        (EventRow, EVENT, "kind", None),
        (EventRow, EVENT, "weights", {"w\n": 1.0}),
        (EventRow, EVENT, "weights", {"w": "1"}),
        (Generation, GENERATION, "finished_s", LAST_S + 1.0),
        (Generation, GENERATION, "accepted", 1),
        (Generation, GENERATION, "n", False),
        (Generation, GENERATION, "weights", None),
        (Generation, GENERATION, "objective_ms", "1"),
    ],
)
def test_what_a_field_cannot_have_is_refused_by_its_name(
    kind: type[Any], values: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=name if name != "options" else "options|JSON"):
        row_of(kind, values | {name: value})


def test_weights_are_numbers_by_printable_names() -> None:
    assert weights_in({"a": 1, "b": 0.5}) == {"a": 1, "b": 0.5}
    refused: tuple[object, ...] = (None, [], {"a": None}, {"a": True}, {"\ud800": 1.0})
    for wrong in refused:
        with pytest.raises(ValueError, match="expected numbers by name"):
            weights_in(wrong)


@pytest.mark.parametrize(("length", "shown"), [(58, "'" + "x" * 58 + "'"), (59, "'" + "x" * 56 + "...")])
def test_a_long_value_is_cut_after_sixty_characters(length: int, shown: str) -> None:
    with pytest.raises(ValueError, match="weights are") as caught:
        weights_in("x" * length)
    assert str(caught.value) == f"weights are {shown}; expected numbers by name"


# Terms of leaders: rows of a leader that was replaced are refused.
def begun(history: History) -> int:
    return history.begin_campaign(now_s=1.0, target="http://a http://b", policy="gorgo", options={})


def test_each_claim_has_a_higher_term_and_leaves_the_state(history: History) -> None:
    number = begun(history)
    history.write(number, state={"phase": "warming", "term": 0}, now_s=2.0, term=0)
    assert [history.claim(number), history.claim(number)] == [1, 2]
    assert history.unfinished(target="http://a http://b", policy="gorgo") == (number, {"phase": "warming", "term": 2})


def test_a_leader_that_was_replaced_writes_nothing_more(history: History) -> None:
    number = begun(history)
    history.write(number, state={"term": 0}, now_s=2.0, term=0)
    term = history.claim(number)
    with pytest.raises(LeadershipLost, match=f"taken over campaign {number}"):
        history.write(number, generations=[generation()], state={"term": 0}, now_s=3.0, term=0)
    assert history.generations(number) == []
    history.write(number, generations=[generation()], state={"term": term}, now_s=3.0, term=term)
    assert len(history.generations(number)) == 1


def test_an_ended_campaign_takes_no_rows_of_a_leader(history: History) -> None:
    number = begun(history)
    history.write(number, outcome="100 generations", now_s=2.0, term=0)
    with pytest.raises(LeadershipLost):
        history.write(number, generations=[replace(generation(), number=9)], now_s=3.0, term=5)


# --- How a database is opened, and what its transactions lock.


def test_every_connection_to_sqlite_is_safe_against_a_power_cut_and_waits_five_seconds(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")
    with reading(engine) as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


@pytest.mark.parametrize(("transaction", "locks"), [(writing, True), (reading, False)])
def test_the_write_lock_is_taken_at_the_start_of_a_write_and_by_no_read(
    transaction: Any, locks: bool, tmp_path: Path
) -> None:
    path = tmp_path / "h.sqlite3"
    engine = open_engine(f"sqlite:///{path}")
    with writing(engine):
        pass  # the file is there now, with its write-ahead log
    with closing(sqlite3.connect(path, timeout=0.0, isolation_level=None)) as other, transaction(engine):
        if locks:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
        else:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    History(f"sqlite:///{tmp_path}/h.sqlite3").close()
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")

    def write() -> None:
        with writing(engine) as connection:
            connection.exec_driver_sql("INSERT INTO event (at_s, kind, reason) VALUES (1, 'freeze', 'r')")
            connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(HistoryError, match="no such table"):
        write()
    with reading(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM event").scalar() == 0


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://gorgo@host/tuner", "postgresql+psycopg"),
        ("postgresql+psycopg://gorgo@host/tuner", "postgresql+psycopg"),
        ("postgresql+pg8000://gorgo@host/tuner", "postgresql+pg8000"),
    ],
)
def test_postgresql_is_reached_by_psycopg_unless_said_within_five_seconds(
    url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(database, "create_engine", lambda url, **options: made.append((url.drivername, options)))
    open_engine(url)
    assert made == [(driver, {"poolclass": NullPool, "connect_args": {"connect_timeout": 5}})]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_memory_is_no_history(url: str) -> None:
    with pytest.raises(HistoryError, match="memory is no history"):
        open_engine(url)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("database is locked", "another process writes to it and does not end; the tuner tries again"),
        ("database disk image is malformed", "the file is damaged; move it away, a new one is made"),
        ("Could not decode to UTF-8 column", "the file is damaged; move it away, a new one is made"),
        ("file is not a database", "this is another kind of file; name another one"),
        ("attempt to write a readonly database", "the file or its folder is read-only"),
        ("database or disk is full", "the disk is full; what was written before is safe"),
        ("disk I/O error", "the disk or a limit on file sizes refuses it; what was written before is safe"),
        ("unable to open database file", "the file or its folder cannot be opened"),
        ("something else", None),
    ],
)
def test_each_failure_of_a_database_has_its_advice(text: str, hint: str | None, tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/h.sqlite3")
    with pytest.raises(HistoryError) as raised, writing(engine):
        raise OperationalError("SELECT 1", {}, sqlite3.OperationalError(f"{text}\nand more"))
    assert str(raised.value) == f"{engine.url}: {text}" + ("" if hint is None else f" ({hint})")


def test_a_connection_that_broke_is_said() -> None:
    failure = OperationalError("SELECT 1", {}, sqlite3.OperationalError("gone"), connection_invalidated=True)
    assert database._reason(failure) == "gone (the connection broke)"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "^'nonsense' is no database URL; expected sqlite:///FILE or postgresql://...$"),
        ("mysql://u:secret@h/d", r"^mysql://u:\*\*\*@h/d: "),
        ("sqlite:////nowhere/at/all.sqlite3", "^sqlite:////nowhere/at/all.sqlite3: there is no folder /nowhere/at$"),
    ],
)
def test_a_url_that_names_no_history_is_shown_without_its_password(url: str, words: str) -> None:
    with pytest.raises(HistoryError, match=words):
        open_engine(url)


def test_waits_for_a_database_are_five_seconds() -> None:
    assert (database.BUSY_TIMEOUT_S, database.CONNECT_TIMEOUT_S) == (5.0, 5)


# --- A database in trouble says so, and what was written stays.


ASSETS = Path(__file__).parent / "assets"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


def filled(path: Path) -> tuple[History, int]:
    history = History(f"sqlite:///{path}")
    campaign = history.begin_campaign(now_s=1.0, target="t", policy="gorgo", options={})
    history.record(campaign, generation())
    return history, campaign


def fill(history: History, campaign: int) -> None:
    for number in range(1, 400):
        history.record(campaign, generation(number, reason="x" * 1000))


def read_everything(history: History) -> None:
    for read in (history.generations, history.campaigns, history.events):
        read()
    history.unfinished(target="t", policy="gorgo")


def test_a_file_of_another_kind_is_refused_and_left_alone(path: Path) -> None:
    path.write_text("a diary, not a database\n" * 100)
    with pytest.raises(HistoryError, match="another kind of file"):
        History(f"sqlite:///{path}")
    assert path.read_text().startswith("a diary")


@pytest.mark.parametrize(
    ("statements", "lacking"),
    [
        (["CREATE TABLE users (id INTEGER)"], "alembic_version, campaign, event, generation"),
        (["CREATE TABLE campaign (id INTEGER)"], "alembic_version, event, generation"),
        (
            [
                "CREATE TABLE alembic_version (version_num TEXT)",
                "INSERT INTO alembic_version VALUES ('0001')",
                *(f"CREATE TABLE {name} (id INTEGER)" for name in ("campaign", "event", "generation")),
            ],
            "campaign.finished_s, campaign.options",
        ),
    ],
    ids=["another program's", "one with a table of the same name", "one with Alembic and the same tables"],
)
def test_a_database_of_another_program_is_refused_and_not_a_byte_of_it_changes(
    path: Path, statements: list[str], lacking: str
) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    for opened in (History, History.existing):
        with pytest.raises(HistoryError, match=f"history.sqlite3: not a history of the tuner.*lacks {lacking}"):
            opened(f"sqlite:///{path}")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("INSERT INTO alembic_version VALUES ('0001')", "has 2 versions (0001, 0002); expected one"),
        ("DROP TABLE alembic_version", "not a history of the tuner, or a damaged one"),
        (
            "UPDATE alembic_version SET version_num = 'abc'",
            "schema abc, which a newer version of gorgo or another program",
        ),
    ],
)
def test_a_history_whose_version_is_wrong_is_named(path: Path, statement: str, said: str) -> None:
    filled(path)[0].close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    for opened in (History, History.existing):
        with pytest.raises(HistoryError, match=r"history\.sqlite3: .*" + re.escape(said)):
            opened(f"sqlite:///{path}")


def test_a_question_makes_no_database(path: Path) -> None:
    url = f"sqlite:///{path}"
    assert read_history(url, campaign=None, limit=9) == (None, [], [])
    with pytest.raises(HistoryError, match="no campaign 3: the history is empty"):
        read_history(url, campaign=3, limit=9)
    with pytest.raises(HistoryError, match="no generation 'best': the history is empty"):
        weights_of("best", url)
    assert [*path.parent.iterdir()] == []
    path.touch()
    assert read_history(url, campaign=None, limit=9) == (None, [], [])
    assert path.read_bytes() == b""


def test_a_campaign_that_is_not_there_is_said_with_the_newest(path: Path) -> None:
    history, campaign = filled(path)
    history.close()
    with pytest.raises(HistoryError, match=f"no campaign 9: the newest is {campaign}"):
        read_history(f"sqlite:///{path}", campaign=9, limit=9)


def test_a_damaged_file_is_refused_with_advice(path: Path) -> None:
    history, _ = filled(path)
    history.close()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)
    with pytest.raises(HistoryError, match=r"malformed|damaged"):
        History(f"sqlite:///{path}").generations()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("generation.weights", '{"w_rtt" 0.5}'),  # a byte of JSON turned over
        ("generation.weights", "[" * 100_000),
        ("generation.weights", '["w_rtt"]'),
        ("generation.weights", '{"w_rtt": "0.5"}'),
        ("generation.weights", '{"w_rtt": 1%s}' % ("0" * 400)),
        ("generation.weights", '{"\\ud800": 1}'),
        ("generation.reason", b"\xff\x00"),
        ("generation.finished_s", "soon"),
        ("generation.finished_s", 1e300),
        ("generation.objective_ms", 9e999),
        ("generation.objective_ms", b"\xff"),
        ("campaign.started_s", -1.0),
        ("campaign.policy", b"\xff"),
        ("campaign.options", "7"),
        ("campaign.options", '{"alpha": NaN}'),
        ("event.at_s", "x"),
        ("state.state", "[]"),
    ],
)
def test_a_row_that_is_none_is_said_with_advice(path: Path, column: str, value: object) -> None:
    history, campaign = filled(path)
    history.record_event("freeze", now_s=1.0, reason="by hand", campaign=campaign)
    history.write(campaign, state={"number": 1}, now_s=1.0)
    table, name = column.split(".")
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {table} SET {name} = ?", (value,))
    connection.close()
    with pytest.raises(HistoryError, match=r"history\.sqlite3: .*\(the file is damaged; move it away"):
        read_everything(history)


def test_a_schema_whose_bytes_are_no_text_is_damage(path: Path) -> None:
    history, _ = filled(path)
    history.close()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE generation", b"CREATE TABLE \xffeneration"))
    with pytest.raises(HistoryError, match="the file is damaged"):
        History(f"sqlite:///{path}")


@pytest.mark.parametrize("number", ["9" * 30, "9" * 5000])
def test_a_number_that_no_database_holds_is_no_generation(path: Path, number: str) -> None:
    history, _ = filled(path)
    with pytest.raises(HistoryError, match="names no weights"):
        history.weights_of(number)
    with pytest.raises(HistoryError, match="too large"):
        history.generations(10**30)


def test_a_path_that_is_no_text_or_goes_round_is_said(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    for name in (os.fsdecode(b"\xff/history"), "round", "round/history", os.fsdecode(b"\xff")):
        (tmp_path / os.fsdecode(b"\xff")).mkdir(exist_ok=True)
        (tmp_path / os.fsdecode(b"\xff") / "history").write_text("a diary, not a database\n" * 100)
        with pytest.raises(HistoryError, match=r"kind of file|cannot be opened|there is no folder"):
            History(f"sqlite:///{tmp_path}/{name}")


def test_a_locked_file_is_waited_for_within_a_bound_and_then_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    history, campaign = filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(HistoryError, match="another process"):
        history.record(campaign, generation(1))
    assert len(history.generations()) == 1, "reading goes on"
    other.execute("ROLLBACK")
    other.close()
    history.record(campaign, generation(1))
    assert len(history.generations()) == 2


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may write anywhere")
def test_a_read_only_file_says_so(path: Path) -> None:
    history, _ = filled(path)
    history.close()
    for file in path.parent.glob("history*"):
        file.chmod(0o444)
    path.parent.chmod(0o555)
    call = f"History('sqlite:///{path}').record_event('unfreeze', now_s=1.0, reason='r')"
    program = f"from tuner.history import History; {call}"
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    for folder in list(path.parents)[1:4]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run([*drop, sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    path.parent.chmod(0o755)
    assert "HistoryError" in done.stderr
    assert "read-only" in done.stderr or "cannot be opened" in done.stderr


def test_a_full_disk_is_said_and_earlier_rows_stay(path: Path) -> None:
    history, campaign = filled(path)
    engine = history._engine
    from sqlalchemy import event

    def small(connection: sqlite3.Connection, _entry: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    event.listen(engine, "connect", small)
    with pytest.raises(HistoryError, match="disk is full"):
        fill(history, campaign)
    event.remove(engine, "connect", small)
    assert history.generations()[0] == generation()


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("*.sqlite3")), ids=lambda path: path.stem)
def test_files_of_earlier_versions_are_upgraded_with_their_rows(asset: Path, path: Path) -> None:
    shutil.copyfile(asset, path)
    history = History(f"sqlite:///{path}")
    rows = history.generations()
    assert [row.number for row in rows] == [0, 1, 2]
    assert rows[1].weights == {"w_rtt": 0.276, "w_queue": 0.5}
    assert [row.accepted for row in rows] == [True, True, False]
    campaign = history.campaigns()[0].id
    history.record(campaign, generation(3))
    history.write(campaign, state={"generation": 3}, now_s=9.0)
    assert history.generations()[-1] == generation(3)
    assert history.events()[0].kind == "freeze"


def test_there_is_a_file_of_every_schema() -> None:
    versions = Path(database.__file__).parent / "migrations" / "versions"
    schemas = {file.name[1:5] for file in versions.glob("v*.py")}
    assert {file.stem.removeprefix("schema-") for file in ASSETS.glob("*.sqlite3")} == schemas


def test_a_file_of_a_newer_version_is_refused_untouched(path: Path) -> None:
    history, _ = filled(path)
    history.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(HistoryError, match="newer version"):
        History(f"sqlite:///{path}")


_WRITER = """
import sys
from tests.tuner.history.examples import generation
from tuner.history import History
history = History(sys.argv[1])
campaign = history.begin_campaign(now_s=1.0, target="t", policy="gorgo", options={})
for number in range(100_000):
    history.record(campaign, generation(number))
    history.write(campaign, state={"generation": number}, now_s=1.0)
    print(number, flush=True)
"""


@pytest.mark.parametrize("lines", [3, *(pytest.param(lines, marks=pytest.mark.system) for lines in (1, 10, 40))])
def test_a_killed_writer_leaves_every_row_that_it_had_told(path: Path, lines: int) -> None:
    root = Path(__file__).parents[3]
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, f"sqlite:///{path}"], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(lines)]
    writer.kill()
    writer.wait()
    writer.stdout.close()
    history = History(f"sqlite:///{path}")
    found = [row.number for row in history.generations()]
    assert found[: len(told)] == told
    assert found == list(range(len(found)))
    unfinished = history.unfinished(target="t", policy="gorgo")
    assert unfinished is not None
    assert unfinished[1]["generation"] in (found[-1], found[-1] - 1)
