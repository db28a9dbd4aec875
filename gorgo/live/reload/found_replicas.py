"""Replicas of fleet sources that join, drain and leave while requests run."""

from __future__ import annotations

from dataclasses import replace

from gorgo.live.reload.config_diff import diff
from gorgo.live.reload.reloader import Reloader
from gorgo.live.state import LiveState


async def apply_found(state: LiveState, reloader: Reloader) -> None:
    """Bring the replicas of fleet sources into the fleet, and out of it.

    Those that leave or drain do so first: the probes of new ones may take seconds. Raises `ConfigError` for a missing
    key or file of a new one.
    """
    async with reloader.turn:
        config = reloader.current_config()
        changes = diff(state.config, config)
        new = {row.name for row in (*changes.added, *changes.replaced)}
        if new and (changes.removed or changes.updated or changes.drains):
            running = {row.name: row for row in state.config.replicas}
            rows = [running.get(row.name) if row.name in new else row for row in config.replicas]
            await reloader.apply_fleet(replace(config, replicas=tuple(row for row in rows if row is not None)))
        await reloader.apply_fleet(config)
