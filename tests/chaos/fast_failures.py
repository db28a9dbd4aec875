"""`python -m tests.chaos.fast_failures [--at COMMIT] [--lanes N]`: requests lost to a replica that fails fast.

Two replicas behind one `gorgo serve`, both default settings and real processes: one is well, the other fails in one way
from the start, or after 20 s. A steady load runs for a minute of the failure; lost is what did not come back whole and
right. Prints JSON, a row per failure. With --at the proxy is that of another commit of this repository.

Several fleets run beside each other, one per lane; each failure has a proxy of its own.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic

import yaml

from gorgo.lab.demo import Processes
from tests.chaos.failing import FastFailure
from tests.chaos.gate import HOST, Gate
from tests.chaos.load import Load, Note
from tests.chaos.questions import MODEL, Ending, Question, draw_questions
from tests.documents import ROOT
from tests.ports import free_ports

#: Judged time of a failure, and the time before it in the second variant.
FAILING_S, BEFORE_S = 60.0, 20.0
PER_S = 4.0
SEED = 15
WELL, FAILING = "well", "failing"
WRONG_PATH = "url that ends in /v1"
START, MIDDLE = "from the start", "from the middle"
#: Lanes share the cores; a process may take long to start.
LANES, START_S = 9, 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """What one failure cost in one variant. `sent` counts what reached the failing replica since it failed."""

    fault: str
    begins: str
    requests: int
    lost: int
    sent: int


class Lane:
    """Two engines, a gate before one of them, and one proxy after the other.

    Parameters
    ----------
    processes:
        Stops what a lane has started.
    folder:
        Configuration and logs.
    """

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes = processes
        self._folder = folder
        self._ports = dict(zip((WELL, FAILING), free_ports(2), strict=True))
        self._gate = Gate(FAILING, self._ports[FAILING])
        self._proxies = 0

    async def __aenter__(self) -> Lane:
        self._write(self._folder / "engines.yaml", wrong_path=False)
        for name, port in self._ports.items():
            words = ["engine", "--replica", name, "--config", str(self._folder / "engines.yaml"), "--port", str(port)]
            await self._start(name, words, "listening on")
        await self._gate.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._gate.close()

    async def measure(self, fault: str, begins: str, questions: Sequence[Question], failing_s: float) -> Row:
        """Return what the failure costs in that time."""
        config = self._folder / "regions.yaml"
        before_s = BEFORE_S if begins == MIDDLE else 0.0
        if begins == START:
            self._begin(fault, config)
        else:
            self._write(config, wrong_path=False)
        self._proxies += 1
        name = f"serve-{self._proxies}"
        url = await self._start(name, ["serve", "--config", str(config), "--seed", "0"], r"listening on (http://\S+)")
        process = self._processes._running[name]
        load = Load(url, [question for question in questions if question.at_s < before_s + failing_s])
        loading = asyncio.create_task(load.run())
        began_s = monotonic() + before_s
        if begins == MIDDLE:
            await asyncio.sleep(before_s)
            self._begin(fault, config)
            process.send_signal(signal.SIGHUP)
        await loading
        self._gate.failure = None
        await asyncio.to_thread(self._processes.finish, name)
        sent = sum(at_s >= began_s for _, at_s in self._gate.passed)
        self._gate.passed.clear()
        return _row(fault, begins, [note for note in load.notes if note.asked_s >= began_s], sent)

    def _begin(self, fault: str, config: Path) -> None:
        self._write(config, wrong_path=fault == WRONG_PATH)
        self._gate.failure = None if fault == WRONG_PATH else FastFailure(fault)

    def _write(self, path: Path, *, wrong_path: bool) -> None:
        port = self._gate.ports[0] if self._gate.ports else self._ports[FAILING]
        urls = {WELL: f"http://{HOST}:{self._ports[WELL]}", FAILING: f"http://{HOST}:{port}"}
        urls[FAILING] += "/v1" if wrong_path else ""
        document = {
            "proxy": {"region": "here", "bind": f"{HOST}:0", "admin_bind": f"{HOST}:0"},
            "regions": [{"name": "here"}],
            "replicas": [{"name": name, "region": "here", "url": url, "models": [MODEL]} for name, url in urls.items()],
            "simulation": {"rtt_ms": {"here": 2}, "seed": 0, "profile": "1xH100-Llama-3.1-8B"},
        }
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    async def _start(self, name: str, words: Sequence[str], pattern: str) -> str:
        """Start a command of the measured checkout, which PYTHONPATH names; -P keeps this one out."""
        self._processes.start_command(name, [sys.executable, "-P", "-m", "gorgo", *words])
        found = await asyncio.to_thread(self._processes.wait_for_line, name, pattern, timeout_s=START_S)
        return found[found.re.groups]


def _row(fault: str, begins: str, notes: Sequence[Note], sent: int) -> Row:
    lost = sum(note.verdict.ending is not Ending.COMPLETE for note in notes)
    return Row(fault, begins, len(notes), lost, sent)


async def measure_all(
    wanted: Sequence[tuple[str, str]], *, lanes: int, tree: Path, folder: Path, failing_s: float = FAILING_S
) -> list[Row]:
    """Measure each failure, by its name and when it begins, with the proxy of the checkout `tree`; rows in order."""
    left = list(reversed(wanted))
    found: dict[tuple[str, str], Row] = {}
    drawn = draw_questions(SEED, seconds=BEFORE_S + FAILING_S, per_s=PER_S)
    questions = [replace(question, leaves_after_s=None) for question in drawn]
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "GORGO_ADMIN_TOKEN": "token-of-the-tests",
        "PYTHONUNBUFFERED": "1",
    }

    async def run_lane(number: int) -> None:
        place = folder / str(number)
        place.mkdir()
        with Processes(place, environ) as processes:
            async with Lane(processes, place) as lane:
                while left:
                    one = left.pop()
                    found[one] = await lane.measure(*one, questions, failing_s)
                    print(found[one], file=sys.stderr)

    async with asyncio.TaskGroup() as running:
        for number in range(min(lanes, len(wanted))):
            running.create_task(run_lane(number))
    return [found[one] for one in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fast_failures", description=__doc__)
    parser.add_argument("--at", metavar="COMMIT", help="measure the proxy of this commit; default: this checkout")
    parser.add_argument("--lanes", type=int, default=LANES, help="fleets beside each other")
    parser.add_argument("--fault", action="append", help="only this one; repeatable")
    wanted = parser.parse_args(arguments)
    faults = wanted.fault or [WRONG_PATH, *(each.value for each in FastFailure)]
    cells = [(fault, begins) for fault in faults for begins in (START, MIDDLE)]
    with tempfile.TemporaryDirectory(prefix="gorgo-fast-failures-") as scratch:
        tree = ROOT if wanted.at is None else _checkout(wanted.at, Path(scratch) / "tree")
        rows = asyncio.run(measure_all(cells, lanes=wanted.lanes, tree=tree, folder=Path(scratch)))
    print(json.dumps({"of": wanted.at, "rows": [asdict(row) for row in rows]}))
    return 0


def _checkout(commit: str, folder: Path) -> Path:
    """Return a folder with the files of a commit."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
