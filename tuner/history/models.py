"""The tables, as SQLAlchemy 2 sees them. The migrations make them; a test compares the two.

Numbers that are unknown are NULL. JSON columns hold small objects: weights by name, a campaign's options and state.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

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
