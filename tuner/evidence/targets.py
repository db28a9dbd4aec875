"""Every experiment of the evidence, in the order of the table."""

from __future__ import annotations

from tuner.evidence import bad_start, hacking, next_window, no_harm, protocol

EXPERIMENTS = (
    protocol.EXPERIMENT,
    no_harm.EXPERIMENT,
    bad_start.EXPERIMENT,
    next_window.EXPERIMENT,
    hacking.EXPERIMENT,
)
