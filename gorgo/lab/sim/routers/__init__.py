"""Routers of one run: their shells, and what carries their reports."""
