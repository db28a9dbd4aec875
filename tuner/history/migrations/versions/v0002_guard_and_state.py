"""The guard's figures of each generation, the proxy's version of its weights, and where a campaign is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("generation") as generation:
        generation.add_column(sa.Column("weights_version", sa.Integer))
        generation.add_column(sa.Column("e2e_s_p95", sa.Float))
        generation.add_column(sa.Column("itl_ms_p95", sa.Float))
        # Rows from before did not count them.
        generation.add_column(sa.Column("errors", sa.Integer, nullable=False, server_default="0"))
        generation.add_column(sa.Column("max_share", sa.Float))
    op.create_table(
        "state",
        sa.Column("campaign_id", sa.Integer, nullable=False),
        sa.Column("saved_s", sa.Float, nullable=False),
        sa.Column("state", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("campaign_id", name="pk_state"),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaign.id"], name="fk_state_campaign_id"),
    )
