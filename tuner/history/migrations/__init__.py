"""Alembic's scripts, applied when a history is opened."""
