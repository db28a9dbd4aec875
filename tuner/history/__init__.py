"""The history: every campaign, generation and event, in SQLite or PostgreSQL, append only."""

from tuner.history.store import DEFAULT_DATABASE, CampaignRow, EventRow, History

__all__ = ["DEFAULT_DATABASE", "CampaignRow", "EventRow", "History"]
