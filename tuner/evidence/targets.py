"""Every experiment of the evidence, in the order of the table."""

from __future__ import annotations

from tuner.evidence import bad_start, bad_start_twin, hacking, next_window, no_harm, protocol, protocol_twin

EXPERIMENTS = (
    protocol.EXPERIMENT,
    no_harm.EXPERIMENT,
    bad_start.EXPERIMENT,
    next_window.EXPERIMENT,
    hacking.EXPERIMENT,
    bad_start_twin.EXPERIMENT,
    protocol_twin.EXPERIMENT,
)
