"""The tuner beside a demo's proxy: the command itself, as a process, and what its history says at the end.

Owns the command line. The paper's protocol, because it moves within half a minute; what it finds in so short a time is
no finding.
"""

from __future__ import annotations

from pathlib import Path

from gorgo.apps.demo.fleet import DemoFleet

#: A quarter of the paper's window and hop: a generation every second or two of the demo's trace.
WINDOW, HOP = 32, 8
#: As many samples are needed anyway before there is something to compare with.
WARM_UP_S = 1.0
POLL_S = 0.5
NAME = "tune"


def start_tuner(fleet: DemoFleet, folder: Path, *, seed: int) -> None:
    """Starts it, and returns once its campaign has begun. The token is in the environment of the fleet's processes."""
    words = ["tune", "--url", fleet.admin_url, "--mode", "paper", "--window", str(WINDOW), "--hop", str(HOP)]
    words += ["--warm-up-s", str(WARM_UP_S), "--poll-s", str(POLL_S), "--seed", str(seed)]
    fleet.processes.start(NAME, [*words, "--database", database(folder)])
    fleet.processes.wait_for_line(NAME, r"^campaign \d+ on ")


def end_tuner(fleet: DemoFleet, folder: Path) -> str:
    """Ends it and gives its history as a table; `history.json` stays in the folder."""
    fleet.processes.finish(NAME)
    fleet.processes.start("history", ["history", "--database", database(folder), "--out", str(folder)])
    return fleet.processes.wait("history")


def database(folder: Path) -> str:
    return f"sqlite:///{folder.resolve()}/history.sqlite3"
