"""Names of the constraints, which later migrations need."""

from __future__ import annotations

from tuner.history.models import WORD_CHARACTERS, TableBase


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
