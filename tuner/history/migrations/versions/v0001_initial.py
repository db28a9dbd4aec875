"""Campaigns, generations and events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "campaign",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("started_s", sa.Float, nullable=False),
        sa.Column("finished_s", sa.Float),
        sa.Column("outcome", sa.Text),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_campaign"),
    )
    op.create_table(
        "generation",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("campaign_id", sa.Integer, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("started_s", sa.Float, nullable=False),
        sa.Column("finished_s", sa.Float, nullable=False),
        sa.Column("weights", sa.JSON, nullable=False),
        sa.Column("sigma", sa.Float),
        sa.Column("mode", sa.String(64), nullable=False),
        sa.Column("optimizer", sa.String(64), nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("objective_ms", sa.Float),
        sa.Column("incumbent_objective_ms", sa.Float),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_generation"),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaign.id"], name="fk_generation_campaign_id"),
        sa.UniqueConstraint("campaign_id", "number", name="uq_generation_campaign_id"),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("campaign_id", sa.Integer),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("weights", sa.JSON),
        sa.Column("reason", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaign.id"], name="fk_event_campaign_id"),
    )
    op.create_index("ix_event_campaign_id", "event", ["campaign_id"])
