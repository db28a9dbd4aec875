"""A database in trouble says so, and what was written stays."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from gorgo.errors import HistoryError
from tests.tuner.history.examples import generation
from tuner.commands import read_history, weights_of
from tuner.history import History, database

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
