"""The tuner beside a demo's proxy: the command itself, as a process, and what its history says at the end.

Owns the command line. The paper's protocol, because it moves within half a minute; what it finds in so short a time is
no finding.
"""

from __future__ import annotations

from pathlib import Path

from gorgo.apps.demo.fleet import DemoFleet

#: A quarter of the paper's window and hop: a generation every second or two of the demo's trace. The warm-up is short
#: because the first window needs as many samples anyway.
SETTINGS = "{window: 32, hop: 8, warm_up_s: 1, poll_s: 0.5}\n"
NAME = "tune"


def start_tuner(fleet: DemoFleet, folder: Path, *, seed: int) -> None:
    """Starts it, and returns once its campaign has begun. The token is in the environment of the fleet's processes."""
    settings = folder / "tune.yaml"
    settings.write_text(SETTINGS)
    words = ["tune", "--url", fleet.admin_url, "--mode", "paper", "--settings", str(settings), "--seed", str(seed)]
    fleet.processes.start(NAME, [*words, "--database", database(folder)])
    fleet.processes.wait_for_line(NAME, r"^campaign \d+ on ")


def end_tuner(fleet: DemoFleet, folder: Path) -> str:
    """Ends it and gives its history as a table; `history.json` stays in the folder."""
    fleet.processes.finish(NAME)
    fleet.processes.start("history", ["history", "--database", database(folder), "--out", str(folder)])
    return fleet.processes.wait("history")


def database(folder: Path) -> str:
    return f"sqlite:///{folder.resolve()}/history.sqlite3"
