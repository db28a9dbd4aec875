"""The tables of the history, as SQLAlchemy 2 sees them, and opening a database with them by its URL.

The migrations make the tables; a test compares the two. Numbers that are unknown are NULL. JSON columns hold small
objects: weights by name, a campaign's options and state.

SQLite is set up for a process that may be killed at any moment: write-ahead log, synced at each commit, readers beside
one writer. Every wait has a bound. Owns the words for what can be wrong with a database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from gorgo.errors import HistoryError

#: Of words that a program chose: modes, kinds, names of policies and optimizers.
WORD_CHARACTERS = 64


class TableBase(DeclarativeBase):
    """Constraints have names, so that later migrations can change them on every database."""

    metadata = MetaData(
        naming_convention={
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_name)s",
        }
    )


class CampaignTable(TableBase):
    """A `store.CampaignRow` as a row of the database."""

    __tablename__ = "campaign"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    started_s: Mapped[float] = mapped_column(Float)
    finished_s: Mapped[float | None] = mapped_column(Float)
    outcome: Mapped[str | None] = mapped_column(Text)
    target: Mapped[str] = mapped_column(Text)
    policy: Mapped[str] = mapped_column(String(WORD_CHARACTERS))
    options: Mapped[dict[str, Any]] = mapped_column(JSON)


class GenerationTable(TableBase):
    """A `campaign.generation.Generation` as a row: its columns, with the campaign that it belongs to."""

    __tablename__ = "generation"
    __table_args__ = (UniqueConstraint("campaign_id", "number"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    campaign_id: Mapped[int] = mapped_column(ForeignKey("campaign.id"))
    number: Mapped[int] = mapped_column(Integer)
    started_s: Mapped[float] = mapped_column(Float)
    finished_s: Mapped[float] = mapped_column(Float)
    weights: Mapped[dict[str, float]] = mapped_column(JSON)
    weights_version: Mapped[int | None] = mapped_column(Integer)
    sigma: Mapped[float | None] = mapped_column(Float)
    mode: Mapped[str] = mapped_column(String(WORD_CHARACTERS))
    optimizer: Mapped[str] = mapped_column(String(WORD_CHARACTERS))
    n: Mapped[int] = mapped_column(Integer)
    objective_ms: Mapped[float | None] = mapped_column(Float)
    incumbent_objective_ms: Mapped[float | None] = mapped_column(Float)
    e2e_s_p95: Mapped[float | None] = mapped_column(Float)
    itl_ms_p95: Mapped[float | None] = mapped_column(Float)
    errors: Mapped[int] = mapped_column(Integer)
    max_share: Mapped[float | None] = mapped_column(Float)
    accepted: Mapped[bool] = mapped_column()
    reason: Mapped[str] = mapped_column(Text)


class EventTable(TableBase):
    __tablename__ = "event"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    campaign_id: Mapped[int | None] = mapped_column(ForeignKey("campaign.id"), index=True)
    at_s: Mapped[float] = mapped_column(Float)
    kind: Mapped[str] = mapped_column(String(WORD_CHARACTERS))
    weights: Mapped[dict[str, float] | None] = mapped_column(JSON)
    reason: Mapped[str] = mapped_column(Text)


class StateTable(TableBase):
    """Where a campaign is, so that a restarted sidecar continues: the one row that is overwritten."""

    __tablename__ = "state"

    campaign_id: Mapped[int] = mapped_column(ForeignKey("campaign.id"), primary_key=True)
    saved_s: Mapped[float] = mapped_column(Float)
    state: Mapped[dict[str, Any]] = mapped_column(JSON)


#: Another writer holds the lock for milliseconds; five seconds is a forgotten transaction.
BUSY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5

_DAMAGED = "the file is damaged; move it away, a new one is made"
#: Of Alembic: the schema that a database has.
VERSION_TABLE = "alembic_version"


def open_engine(url: str) -> Engine:
    """Return the engine for `url`, not connected yet; raises `HistoryError` for a URL without a database."""
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() == "sqlite":
            return _sqlite(parsed)
        if parsed.get_backend_name() == "postgresql":
            return _postgresql(parsed)
    except ArgumentError:
        raise HistoryError(f"{url!r} is no database URL; expected sqlite:///FILE or postgresql://...") from None
    except (NoSuchModuleError, ModuleNotFoundError) as error:
        raise HistoryError(f"{shown(parsed)}: {error}; for PostgreSQL: pip install 'gorgo-router[postgres]'") from None
    raise HistoryError(f"{shown(parsed)}: expected sqlite:///FILE or postgresql://USER@HOST/DATABASE")


def has_file(engine: Engine) -> bool:
    """Whether there is something to read: False for a file of SQLite that is missing or empty."""
    if engine.dialect.name != "sqlite":
        return True
    path = Path(str(engine.url.database))
    try:
        return path.stat().st_size > 0
    except OSError:
        return path.is_symlink()


def refuse_foreign(url: URL, tables: Collection[str], campaign_columns: Collection[str]) -> None:
    """Raise `HistoryError` for a database with tables that are not those of a history; an empty one is none of them."""
    if not tables:
        return
    ours = {VERSION_TABLE, *TableBase.metadata.tables} - {"state"}  # the newest table; older histories lack it
    lacking = sorted(ours.difference(tables))
    if not lacking:
        lacking = [f"campaign.{name}" for name in {*CampaignTable.__table__.columns.keys()} - {*campaign_columns}]
    if lacking:
        raise HistoryError(
            f"{shown(url)}: not a history of the tuner, or a damaged one: it has tables but lacks "
            f"{', '.join(sorted(lacking))}; nothing was written; expected a history, or a new name"
        )


def shown(url: URL) -> str:
    """Without the password. A path that is no text is shown as it can be."""
    if url.database is not None:
        url = url.set(database=url.database.encode(errors="backslashreplace").decode())
    return url.render_as_string(hide_password=True)


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction; what the database says against it becomes a `HistoryError` that names it.

    SQLite's write lock is taken at the start: two writers wait for each other here and never deadlock later.
    """
    with _transaction(engine, begin="BEGIN IMMEDIATE") as connection:
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Yield one consistent view, which blocks no writer."""
    with _transaction(engine, begin="BEGIN") as connection:
        yield connection


@contextmanager
def _transaction(engine: Engine, *, begin: str) -> Iterator[Connection]:
    try:
        with engine.execution_options(begin=begin).begin() as connection:
            yield connection
    except DBAPIError as error:
        raise HistoryError(f"{shown(engine.url)}: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:  # bytes that are no text, text that is no JSON, a row that is none
        raise HistoryError(f"{shown(engine.url)}: {error} ({_DAMAGED})") from error
    except OverflowError as error:  # a number of ours that no column holds
        raise HistoryError(f"{shown(engine.url)}: {error}") from error


def _sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise HistoryError("sqlite://: expected a file, as in sqlite:///history.sqlite3; memory is no history")
    folder = Path(url.database).parent
    if not folder.is_dir():
        raise HistoryError(f"{shown(url)}: there is no folder {folder}")
    # A connection for each transaction: a file that was replaced or unlocked is seen at the next one.
    engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", partial(_prepare, url))
    event.listen(engine, "begin", _begin)
    return engine


def _postgresql(url: URL) -> Engine:
    driver = url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url
    return create_engine(driver, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_TIMEOUT_S})


def _prepare(url: URL, connection: Any, _entry: ConnectionPoolEntry) -> None:
    """Leave transactions to us, so that schema changes are in them too, and refuse a file of another program.

    The write-ahead log is a property of the file, so that the first pragma writes to it.
    """
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        tables = {row[0] for row in cursor.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        columns = {row[1] for row in cursor.execute("PRAGMA table_info(campaign)")}
        refuse_foreign(url, tables, columns)
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
    finally:
        cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options()["begin"])


def _reason(error: DBAPIError) -> str:
    said = str(error.orig).strip().splitlines()[0] if error.orig is not None else str(error)
    advice = {
        "locked": "another process writes to it and does not end; the tuner tries again",
        "malformed": _DAMAGED,
        "decode to UTF-8": _DAMAGED,
        "not a database": "this is another kind of file; name another one",
        "readonly": "the file or its folder is read-only",
        "full": "the disk is full; what was written before is safe",
        "disk I/O error": "the disk or a limit on file sizes refuses it; what was written before is safe",
        "unable to open": "the file or its folder cannot be opened",
    }
    hint = next((words for key, words in advice.items() if key in said), None)
    if hint is None and isinstance(error, OperationalError) and error.connection_invalidated:
        hint = "the connection broke"
    return said if hint is None else f"{said} ({hint})"
