"""`python -m tests.mutants`: draw faults, try each on the tests that run its line, say which no test saw.

Two processes at a time, on private copies of the tree. What is traced and found is kept in `runs/mutants`, where the
report is too; the same command goes on where it was stopped. Exit code 1 if `--known` leaves one alive.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.mutants.choice import drawn, rounds, sample, sources
from tests.mutants.faults import Equivalents, Fault, known
from tests.mutants.mutations import mutants
from tests.mutants.plugin import TRACED
from tests.mutants.reach import Records, TracedTest
from tests.mutants.report import Row, as_json, share_killed, shown
from tests.mutants.trial import Copy, Tried, Workers, copies

ROOT = Path(__file__).parents[2]
#: Test files that one process traces: few are soon kept, many save starts.
FILES_AT_ONCE = 8


def main() -> int:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress, copies(ROOT, given.workers) as made:
        texts = {path: (ROOT / path).read_text() for path in _python_files()}
        faults = _faults(given, texts, progress)
        workers, records = Workers(made, progress), Records(ROOT, given.out / "reach")
        _trace(records, workers)
        _assert_unchanged_passes(made[0], records.tests(), texts)
        if given.unchanged:
            faults = [replace(fault, text=texts[fault.path], key=f"unchanged: {fault.key}") for fault in faults]
        rows = list(_rows(faults, records, workers, texts, given.out / "verdicts.jsonl"))
    _write(rows, given, console)
    console.print(
        f"{records.without_verdict()} tests are skipped or fail on the unchanged tree: they show nothing here"
    )
    return 1 if given.known and share_killed(rows) < 1 else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--sample", type=int, default=300, help="how many faults")
    parser.add_argument("--only", default="", help="names of packages, as core,tuner")
    parser.add_argument("--known", action="store_true", help="the faults of known.toml instead of a sample")
    parser.add_argument("--survivors", action="store_true", help="those that were alive in the last report")
    parser.add_argument("--unchanged", action="store_true", help="the same tests without the faults: all must survive")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/mutants"))
    return parser.parse_args()


def _python_files() -> Iterator[str]:
    return (path.relative_to(ROOT).as_posix() for top in TRACED for path in (ROOT / top).rglob("*.py"))


def _faults(given: argparse.Namespace, texts: Mapping[str, str], progress: Progress) -> list[Fault]:
    if given.known:
        return list(known(ROOT))
    paths = sources(ROOT, filter(None, given.only.split(",")))
    found = [one for path in progress.track(paths, description="mutants") for one in mutants(path, texts[path])]
    faults = sample(drawn(found, texts, given.seed), texts, given.sample, Equivalents())
    chosen = list(progress.track(faults, total=given.sample, description="drawn"))
    if not given.survivors:
        return chosen
    last = {(one["path"], one["old"], one["new"]) for one in json.loads(_report(given).read_text())["alive"]}
    return [fault for fault in chosen if (fault.path, fault.old, fault.new) in last]


def _trace(records: Records, workers: Workers) -> None:
    stale = records.stale()
    batches = [stale[at : at + FILES_AT_ONCE] for at in range(0, len(stale), FILES_AT_ONCE)]
    for files, traced in workers.each("traced", batches, Copy.trace):
        records.write(files, traced)


def _assert_unchanged_passes(copy: Copy, tests: Sequence[TracedTest], texts: Mapping[str, str]) -> None:
    path, text = next(iter(texts.items()))
    quickest = min(tests, key=lambda test: test.seconds)
    tried = copy.attempt(Fault(path, 1, "", "", "", text, ""), [[quickest]], time.monotonic)
    if tried.verdict != "survived":
        raise SystemExit(f"{quickest.id} {tried.verdict} though nothing was changed")


def _rows(
    faults: Sequence[Fault], records: Records, workers: Workers, texts: Mapping[str, str], kept: Path
) -> Iterator[Row]:
    """Rows of what was found before on the same tree, and of what is found now, which is kept."""
    tests, tree = records.tests(), records.tree
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    before = {line["key"]: Tried(**line["tried"]) for line in lines if line["tree"] == tree}
    yield from (Row(fault, before[fault.key]) for fault in faults if fault.key in before)

    def attempt(copy: Copy, fault: Fault) -> Tried:
        return copy.attempt(fault, rounds(fault, tests, texts), time.monotonic)

    with kept.open("a") as out:
        for fault, tried in workers.each("tried", [fault for fault in faults if fault.key not in before], attempt):
            print(json.dumps({"tree": tree, "key": fault.key, "tried": asdict(tried)}), file=out, flush=True)
            yield Row(fault, tried)


def _report(given: argparse.Namespace) -> Path:
    name = "known" if given.known else f"seed-{given.seed}"
    return Path(given.out, f"{name}.json")


def _write(rows: Sequence[Row], given: argparse.Namespace, console: Console) -> None:
    path = _report(given)
    alive = [row for row in rows if row.alive]
    if not given.survivors and not given.unchanged:
        settings = {"seed": given.seed, "sample": given.sample, "only": given.only}
        whole = {**settings, "killed": share_killed(rows), "alive": as_json(alive), "all": as_json(rows)}
        path.write_text(json.dumps(whole, indent=1))
        with path.with_suffix(".txt").open("w") as out:
            Console(file=out, width=160).print(shown(rows))
    console.print(shown(rows))


if __name__ == "__main__":
    sys.exit(main())
