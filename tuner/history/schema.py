"""Bringing a database to the newest schema when it is opened, by Alembic's migrations.

Owns which scripts there are and the lock under which they run: two processes that start together do not migrate twice.
"""

from __future__ import annotations

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, StampStep
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from gorgo.errors import HistoryError
from tuner.history.models import TableBase

#: Of PostgreSQL's advisory lock; any number that nobody else uses.
_LOCK = 0x676F72676F


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Apply what is missing, inside the connection's transaction.

    Raises `HistoryError` for a database made by a newer version, which this one could only damage.
    """
    scripts = _scripts()
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    present = current(connection)
    known = {script.revision for script in scripts.walk_revisions()}
    if present is not None and present not in known:
        raise HistoryError(
            f"the history has schema {present}, which a newer version of gorgo made; this one knows up to "
            f"{scripts.get_current_head()}: use the newer version, or another --database"
        )

    def steps(at: tuple[str, ...], _context: MigrationContext) -> list[StampStep]:
        # Alembic's own upgrade command does the same; its types say less than it returns.
        return list(scripts._upgrade_revs(revision, at))  # type: ignore[arg-type]

    with EnvironmentContext(Config(), scripts, fn=steps, destination_rev=revision) as environment:
        # SQLite cannot alter a column in place: Alembic copies the table.
        environment.configure(connection=connection, target_metadata=TableBase.metadata, render_as_batch=True)
        environment.run_migrations()


def current(connection: Connection) -> str | None:
    """The schema's revision; None in an empty database."""
    return MigrationContext.configure(connection).get_current_revision()


def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "tuner.history:migrations")
    return ScriptDirectory.from_config(config)
