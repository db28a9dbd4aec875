"""The history: campaigns with their generations and events, append only, and where each campaign is.

Owns what is written and read, the rows that are handed out, the tables, and bringing a database to the newest schema.
Leaves the connection to `tuner.history.database`. Every method is one transaction, so that what it returned from is on
disk. All raise `HistoryError` when the database cannot do it; nothing that was written before is lost then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, StampStep
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, RowMapping, delete, func, insert, inspect, select, text, update

from gorgo.core.numeric import is_number
from gorgo.errors import HistoryError, LeadershipLost
from tuner.campaign.generation import Generation
from tuner.history.database import (
    VERSION_TABLE,
    WORD_CHARACTERS,
    CampaignTable,
    EventTable,
    GenerationTable,
    StateTable,
    TableBase,
    has_file,
    open_engine,
    reading,
    refuse_foreign,
    shown,
    writing,
)

# What the history hands out: frozen rows, with times as seconds since 1970 (UTC) and latencies as measured.
#
# A generation's record is the campaign's own. Each row is checked as it is read: SQLite holds anything in any column,
# and a damaged file does.


EventKind = Literal["freeze", "unfreeze", "rollback", "foreign", "restart", "stop"]
Row = TypeVar("Row")

#: Seconds since 1970 at the end of the year 9999; nothing that counts time by calendars goes beyond.
MAX_TIME_S = 253_402_300_799.0
#: Of a text: ten times the longest reason that the proxy takes.
MAX_CHARACTERS = 10_000
_TIMES = ("started_s", "finished_s", "at_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRow:
    """One run of the tuner from its start to its end; a restarted sidecar continues the same one.

    `options` are those it was started with. `finished_s` and `outcome` are None while it runs.
    """

    id: int
    started_s: float
    finished_s: float | None
    outcome: str | None
    target: str
    policy: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """An event beside the generations: a freeze, unfreeze, roll-back, foreign weights, restart or stop."""

    at_s: float
    kind: EventKind
    weights: Mapping[str, float] | None
    reason: str


def row_of(kind: type[Row], values: Mapping[str, Any] | RowMapping) -> Row:
    """The record of a row. Raises `ValueError` for a value that its field cannot have."""
    named = {column.name: str(column.type) for column in fields(kind)}  # type: ignore[arg-type]
    for name, wanted in named.items():
        value = values[name]
        bare = wanted.removesuffix(" | None")
        if not (_is(bare, value) or (value is None and bare != wanted)):
            raise ValueError(f"{name} is {_short(value)}; expected {wanted}")
        if name in _TIMES and value is not None and not 0 <= value <= MAX_TIME_S:
            raise ValueError(f"{name} is {_short(value)}; expected seconds since 1970")
    return kind(**{name: values[name] for name in named})


def weights_in(value: object) -> dict[str, float]:
    """Weights by name as a column holds them. Raises `ValueError` for anything else."""
    if not _is("Mapping[str, float]", value):
        raise ValueError(f"weights are {_short(value)}; expected numbers by name")
    assert isinstance(value, Mapping)
    return dict(value)


def _is(wanted: str, value: object) -> bool:
    match wanted:
        case "float":
            return is_number(value)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "Mapping[str, float]":
            # A name that cannot be printed is half a surrogate pair, or worse.
            return isinstance(value, Mapping) and all(name.isprintable() and is_number(value[name]) for name in value)
        case "Mapping[str, Any]":
            json.dumps(value, allow_nan=False)  # numbers that JSON does not have are a ValueError
            return isinstance(value, Mapping)
        case _:
            return isinstance(value, str) and len(value) <= MAX_CHARACTERS


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Bringing a database to the newest schema when it is opened, by Alembic's migrations, under a lock: two processes that
# start together do not migrate twice.


#: Of PostgreSQL's advisory lock; any number that nobody else uses.
_LOCK = 0x676F72676F


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Apply what is missing, inside the connection's transaction.

    Raises `HistoryError` for a database of a newer version or of another program, which this one could only damage.
    """
    url = connection.engine.url
    scripts = _scripts()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    present = current(connection)
    revisions = {script.revision for script in scripts.walk_revisions()}
    if present is not None and present not in revisions:
        raise HistoryError(
            f"{shown(url)}: the history has schema {present}, which a newer version of gorgo or another program made; "
            f"this one knows up to {scripts.get_current_head()}: use the newer version, or another --database"
        )
    if present is None:
        tables = TableBase.metadata.tables.keys() & set(inspect(connection).get_table_names())
        refuse_foreign(url, tables, ())

    def steps(at: tuple[str, ...], _context: MigrationContext) -> list[StampStep]:
        # Alembic's own upgrade command does the same; its types say less than it returns.
        return list(scripts._upgrade_revs(revision, at))  # type: ignore[arg-type]

    with EnvironmentContext(Config(), scripts, fn=steps, destination_rev=revision) as environment:
        # SQLite cannot alter a column in place: Alembic copies the table.
        environment.configure(connection=connection, target_metadata=TableBase.metadata, render_as_batch=True)
        environment.run_migrations()


def current(connection: Connection) -> str | None:
    """The schema's revision; None in an empty database. Raises `HistoryError` for several."""
    heads = MigrationContext.configure(connection).get_current_heads()
    if len(heads) > 1:
        versions = ", ".join(sorted(heads))
        raise HistoryError(
            f"{shown(connection.engine.url)}: the table {VERSION_TABLE} has {len(heads)} versions ({versions}); "
            "expected one: the file is damaged, or of another program"
        )
    return heads[0] if heads else None


def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "tuner.history:migrations")
    return ScriptDirectory.from_config(config)


DEFAULT_DATABASE = "sqlite:///gorgo-history.sqlite3"
#: Rows that a listing gives unless told otherwise: a terminal's worth of scrolling.
MAX_ROWS = 1000
#: Key of a state: the term of the leader that wrote it.
TERM = "term"
#: Of a generation's number; longer ones are none that a column of PostgreSQL holds.
MAX_DIGITS = 9


class History:
    """An open history; its schema is brought up to date first.

    Parameters
    ----------
    url:
        Any SQLAlchemy URL of SQLite or PostgreSQL.
    """

    def __init__(self, url: str = DEFAULT_DATABASE) -> None:
        self._engine = open_engine(url)
        self.bring_up_to_date()

    @classmethod
    def existing(cls, url: str = DEFAULT_DATABASE) -> History | None:
        """Return the history for a reader, which makes none: None where there is no file, or an empty database."""
        engine = open_engine(url)
        try:
            if not has_file(engine):
                return None
            with reading(engine) as connection:
                if current(connection) is None:
                    return None
        finally:
            engine.dispose()
        return cls(url)

    def bring_up_to_date(self) -> None:
        """Apply missing migrations, also to a file that replaced the opened one."""
        with writing(self._engine) as connection:
            upgrade(connection)

    @property
    def url(self) -> str:
        """Without the password."""
        return shown(self._engine.url)

    def close(self) -> None:
        self._engine.dispose()

    # -- writing

    def begin_campaign(self, *, now_s: float, target: str, policy: str, options: Mapping[str, Any]) -> int:
        """Add a campaign and return its number."""
        values = {"started_s": now_s, "target": target, "policy": policy, "options": dict(options)}
        with writing(self._engine) as connection:
            return int(
                connection.execute(insert(CampaignTable).values(values).returning(CampaignTable.id)).scalar_one()
            )

    def record(self, campaign: int, generation: Generation) -> None:
        """Append a generation; a repeated one is ignored, because a killed sidecar may send it twice."""
        with writing(self._engine) as connection:
            _append(connection, campaign, generation)

    def record_event(
        self,
        kind: EventKind,
        *,
        now_s: float,
        reason: str,
        campaign: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Append an event."""
        values = {"weights": None if weights is None else dict(weights), "campaign_id": campaign}
        with writing(self._engine) as connection:
            connection.execute(insert(EventTable).values(at_s=now_s, kind=kind, reason=reason, **values))

    def end_campaign(self, campaign: int, *, now_s: float, outcome: str) -> None:
        """Record the end of a campaign; its rows stay."""
        ended = update(CampaignTable).where(CampaignTable.id == campaign).values(finished_s=now_s, outcome=outcome)
        with writing(self._engine) as connection:
            connection.execute(ended)
            connection.execute(delete(StateTable).where(StateTable.campaign_id == campaign))

    def write(
        self,
        campaign: int,
        *,
        generations: Sequence[Generation] = (),
        events: Sequence[EventRow] = (),
        state: Mapping[str, Any] | None = None,
        outcome: str | None = None,
        now_s: float,
        term: int | None = None,
    ) -> None:
        """Write rows, the state after them and, with `outcome`, the end: in one transaction.

        A process that is killed in between never resumes from before a row that it has written. With `term`, raises
        `LeadershipLost` if a process with a higher one has claimed the campaign, and writes nothing.
        """
        with writing(self._engine) as connection:
            if term is not None:
                _refuse_superseded(connection, campaign, term)
            for generation in generations:
                _append(connection, campaign, generation)
            for one in events:
                connection.execute(insert(EventTable).values(_event(one) | {"campaign_id": campaign}))
            if state is not None or outcome is not None:
                connection.execute(delete(StateTable).where(StateTable.campaign_id == campaign))
            if outcome is not None:
                ended = update(CampaignTable).where(CampaignTable.id == campaign)
                connection.execute(ended.values(finished_s=now_s, outcome=outcome))
            elif state is not None:
                connection.execute(insert(StateTable).values(campaign_id=campaign, saved_s=now_s, state=dict(state)))

    def claim(self, campaign: int) -> int:
        """Return a higher term than any before: rows of earlier leaders of the campaign are refused from now on."""
        with writing(self._engine) as connection:
            _lock(connection, campaign)
            state = dict(_state(connection, campaign) or {})
            term = _term(state) + 1
            claimed = update(StateTable).where(StateTable.campaign_id == campaign)
            connection.execute(claimed.values(state={**state, TERM: term}))
            return term

    # -- reading

    def campaign(self, number: int) -> CampaignRow | None:
        """Return a campaign; None for an unknown number."""
        wanted = select(CampaignTable.__table__).where(CampaignTable.id == number)
        with reading(self._engine) as connection:
            record = connection.execute(wanted).mappings().one_or_none()
            return None if record is None else row_of(CampaignRow, record)

    def unfinished(self, *, target: str, policy: str) -> tuple[int, dict[str, Any]] | None:
        """Return number and state of the newest unfinished campaign of a proxy and policy."""
        open_ones = (
            select(CampaignTable.id, StateTable.state)
            .join(StateTable, StateTable.campaign_id == CampaignTable.id)
            .where(CampaignTable.target == target, CampaignTable.policy == policy, CampaignTable.finished_s.is_(None))
            .order_by(CampaignTable.id.desc())
            .limit(1)
        )
        with reading(self._engine) as connection:
            record = connection.execute(open_ones).one_or_none()
            if record is None:
                return None
            if not isinstance(record.state, dict):
                raise ValueError(f"the state of campaign {record.id} is no object")
            return int(record.id), record.state

    def campaigns(self, limit: int = MAX_ROWS) -> list[CampaignRow]:
        """Return campaigns, newest first."""
        with reading(self._engine) as connection:
            rows = connection.execute(
                select(CampaignTable.__table__).order_by(CampaignTable.id.desc()).limit(limit)
            ).mappings()
            return [row_of(CampaignRow, row) for row in rows]

    def generations(self, campaign: int | None = None, limit: int = MAX_ROWS) -> list[Generation]:
        """Return the last `limit` generations of a campaign (the newest by default), in order."""
        with reading(self._engine) as connection:
            chosen = _newest(connection) if campaign is None else campaign
            wanted = select(GenerationTable.__table__).where(GenerationTable.campaign_id == chosen)
            rows = connection.execute(wanted.order_by(GenerationTable.number.desc()).limit(limit)).mappings().all()
            return [row_of(Generation, row) for row in reversed(rows)]

    def events(self, campaign: int | None = None, limit: int = MAX_ROWS) -> list[EventRow]:
        """Return the last `limit` events of a campaign, or of all, in order."""
        wanted = select(EventTable.at_s, EventTable.kind, EventTable.weights, EventTable.reason)
        if campaign is not None:
            wanted = wanted.where(EventTable.campaign_id == campaign)
        with reading(self._engine) as connection:
            rows = connection.execute(wanted.order_by(EventTable.id.desc()).limit(limit)).mappings().all()
            return [row_of(EventRow, row) for row in reversed(rows)]

    def weights_of(self, wanted: str, campaign: int | None = None) -> tuple[str, dict[str, float]]:
        """Policy and weights of `best` (the last accepted) or of a generation's number.

        Of `campaign`, or of the newest campaign that has such a generation. Raises `HistoryError` where none has.
        """
        with reading(self._engine) as connection:
            newest = _newest(connection)
            record = connection.execute(_one_generation(wanted, campaign)).one_or_none()
            policy = None if record is None else record.policy
            weights = None if record is None else weights_in(record.weights)
            if policy is not None and not (isinstance(policy, str) and len(policy) <= WORD_CHARACTERS):
                raise ValueError(f"policy has over {WORD_CHARACTERS} characters; expected a name")
        if weights is None or policy is None:
            where = "no campaign has one" if campaign is None else f"campaign {campaign} has none"
            where = "the history is empty" if newest is None else where
            raise HistoryError(f"{self.url}: no generation {wanted!r}: {where}; `gorgo history` lists them")
        return str(policy), weights


def _lock(connection: Connection, campaign: int) -> Any:
    """Return when the campaign has ended; other writers of it wait for this transaction."""
    query = select(CampaignTable.finished_s).where(CampaignTable.id == campaign)
    return connection.execute(query.with_for_update()).scalar_one_or_none()


def _state(connection: Connection, campaign: int) -> Any:
    return connection.execute(select(StateTable.state).where(StateTable.campaign_id == campaign)).scalar_one_or_none()


def _term(state: object) -> int:
    term = state.get(TERM, 0) if isinstance(state, dict) else 0
    return term if isinstance(term, int) else 0


def _refuse_superseded(connection: Connection, campaign: int, term: int) -> None:
    ended = _lock(connection, campaign)
    if ended is not None or _term(_state(connection, campaign)) > term:
        raise LeadershipLost(f"another tuner has taken over campaign {campaign}")


def _one_generation(wanted: str, campaign: int | None) -> Any:
    query = select(GenerationTable.weights, CampaignTable.policy)
    query = query.join(CampaignTable, CampaignTable.id == GenerationTable.campaign_id)
    query = query.order_by(CampaignTable.id.desc(), GenerationTable.number.desc()).limit(1)
    if campaign is not None:
        query = query.where(CampaignTable.id == campaign)
    if wanted == "best":
        return query.where(GenerationTable.accepted)
    if wanted.isdecimal() and len(wanted) <= MAX_DIGITS:
        return query.where(GenerationTable.number == int(wanted))
    raise HistoryError(f"{wanted!r} names no weights; expected `best` or a generation's number")


def _newest(connection: Connection) -> int | None:
    newest = connection.execute(select(func.max(CampaignTable.id))).scalar_one()
    return None if newest is None else int(newest)


def _has_generation(connection: Connection, campaign: int, number: int) -> bool:
    same = select(GenerationTable.id).where(GenerationTable.campaign_id == campaign, GenerationTable.number == number)
    return connection.execute(same).first() is not None


def _append(connection: Connection, campaign: int, generation: Generation) -> None:
    values = {**asdict(generation), "weights": dict(generation.weights), "campaign_id": campaign}
    if not _has_generation(connection, campaign, generation.number):
        connection.execute(insert(GenerationTable).values(values))


def _event(event: EventRow) -> dict[str, Any]:
    return asdict(event) | {"weights": None if event.weights is None else dict(event.weights)}
