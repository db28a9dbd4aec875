"""Stored results: what the commands behind the documents' figures printed, and where, when and from which code.

Owns the files of docs/figures/, one per figure, and the recorder that writes them. A command's standard output is
stored as JSON if it is JSON, else as its lines. What a page shows of it is `table`'s business.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gorgo.config.atomic import PUBLIC, write_atomically
from tests.bench.relay.measure import describe_machine
from tests.documents import DOCS, ROOT

FOLDER = DOCS / "figures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command: its settings are its words. `machine` ends with the load average before it began."""

    command: str
    date: str
    seconds: float
    machine: str
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Results of one figure, all made by the code of `commit`."""

    commit: str
    runs: Sequence[Run]

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> Stored:
        return cls(commit=document["commit"], runs=[Run(**run) for run in document["runs"]])

    @property
    def results(self) -> list[Any]:
        return [run.result for run in self.runs]


def stored_names() -> list[str]:
    """Names of all files in the folder."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_stored(name: str) -> Stored:
    return Stored.of_json(json.loads((FOLDER / f"{name}.json").read_bytes()))


def record(name: str, commands: Sequence[str]) -> None:
    """Run each command in the root of the repository, and store what they print; a failed one stores nothing."""
    commit = _commit()
    stored = Stored(commit=commit, runs=[_run(command) for command in commands])
    FOLDER.mkdir(exist_ok=True)
    write_atomically(FOLDER / f"{name}.json", _document(stored).encode(), mode=PUBLIC)


def _run(command: str) -> Run:
    print(f"figures: {command}", file=sys.stderr)  # noqa: T201 - a recorder says what it runs
    machine, date, begun_s = describe_machine(), datetime.now(UTC).date().isoformat(), time.monotonic()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds = round(time.monotonic() - begun_s, 1)
    return Run(command=command, date=date, seconds=seconds, machine=machine, result=_parsed(done.stdout))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def _commit() -> str:
    """The commit of the working tree; changed code is of no commit. Pages and views make no result."""
    changed = ["git", "diff", "HEAD", "--quiet", "--", ".", ":!docs", ":!*.md", ":!tests/figures"]
    if subprocess.run(changed, cwd=ROOT, check=False).returncode:
        raise SystemExit("figures: commit the code first: a result names the commit that made it")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return head.stdout[:7]


def _document(stored: Stored) -> str:
    """JSON with a line per item of a result, so that a diff names what has changed."""
    runs = ",\n".join(_run_document(run) for run in stored.runs)
    return f'{{\n"commit": {_json(stored.commit)},\n"runs": [\n{runs}\n]\n}}\n'


def _run_document(run: Run) -> str:
    head = asdict(run)
    result = head.pop("result")
    shown = ",\n".join(map(_json, result)) if isinstance(result, list) else _json(result)
    about = "".join(f"{_json(key)}: {_json(value)},\n" for key, value in head.items())
    return (
        f'{{\n{about}"result": [\n{shown}\n]\n}}' if isinstance(result, list) else f'{{\n{about}"result": {shown}\n}}'
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
