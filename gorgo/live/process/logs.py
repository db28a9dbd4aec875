"""The files that a process appends lines to: request log and outcome log."""

from __future__ import annotations

from pathlib import Path

from gorgo.config.constants import BLOCK_BYTES
from gorgo.live.state import LiveState, Routing, Telemetry
from gorgo.live.telemetry.line_log import LineLog
from gorgo.live.telemetry.request_log_file import BLOCKS_PER_HASH, RequestLogFile


def open_request_log(path: Path, routing: Routing, telemetry: Telemetry) -> LineLog:
    """Return the log of finished requests."""
    block_bytes = BLOCK_BYTES * BLOCKS_PER_HASH
    log_file = RequestLogFile(path, boot_id=routing.router.boot_id, clock=routing.clock, block_bytes=block_bytes)
    log_file.open()
    return LineLog(log_file, count=telemetry.metrics.request_log)


def record_outcomes(path: Path, state: LiveState) -> LineLog:
    """Return the log of ended attempts, which the Router writes from now on."""
    from gorgo.live.telemetry.outcome_log import OutcomeLog, open_outcome_log

    log = open_outcome_log(
        path, boot_id=state.routing.router.boot_id, clock=state.routing.clock, count=state.telemetry.metrics.outcome_log
    )
    accelerators = (row.accelerator for row in state.config.replicas if row.accelerator is not None)
    state.routing.router.settings.record_outcomes(OutcomeLog(log.add, accelerators))
    return log
