"""The tables at the end: what was done and what came of it, what clients saw, what held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import Applied
from tests.chaos.invariants import SHOWN, Finding, Run
from tests.chaos.load import Note
from tests.chaos.questions import Ending
from tests.chaos.schedule import Kind

_ERRORS = (Ending.REFUSED, Ending.CUT, Ending.WRONG)


def print_report(run: Run, findings: Sequence[Finding], console: Console) -> None:
    console.print(_faults(run))
    console.print(_endings(run))
    console.print(_invariants(findings))
    for finding in findings:
        for violation in finding.violations[:SHOWN]:
            console.print(f"VIOLATION {finding.name}: {violation}", markup=False, soft_wrap=True)
        if len(finding.violations) > SHOWN:
            console.print(f"  and {len(finding.violations) - SHOWN} more", markup=False)


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left")
    return table


def _faults(run: Run) -> Table:
    table = _table("fault", "times", "s", "requests there", "errors seen by clients", right=(1, 2, 3))
    notes = {note.question.request_id: note for note in run.notes}
    why = {line["request_id"]: line.get("error") for line in run.log if line["event"] == "request"}
    names = sorted({each.planned.name for each in run.applied}, key=_order)
    for name in names:
        applied = [each for each in run.applied if each.planned.name == name]
        lasted_s = sum(each.ended_s - each.began_s for each in applied)
        touched = {request_id for each in applied for request_id in touched_by(each, run, notes)}
        seen = Counter(
            f"{_words(notes[request_id])} ({why.get(request_id)})"
            for request_id in touched
            if notes[request_id].verdict.ending in _ERRORS
        )
        shown = ", ".join(f"{count} x {words}" for words, count in seen.most_common()) or "none"
        table.add_row(name, str(len(applied)), f"{lasted_s:.0f}", str(len(touched)), shown)
    return table


def touched_by(applied: Applied, run: Run, notes: dict[str, Note]) -> set[str]:
    """Requests that were sent to where the fault was, and not over when it began; in a blackout, all there were."""
    planned = applied.planned
    if planned.kind is Kind.BLACKOUT:
        alive = (each for each in notes.values() if each.ended_s >= applied.began_s)
        return {each.question.request_id for each in alive if each.asked_s <= applied.ended_s}
    gates = run.replicas if planned.kind is Kind.TUNER else planned.takes(run.replicas)
    return {
        request_id
        for name in gates
        for request_id, at_s in run.passed.get(name, ())
        if at_s <= applied.ended_s and request_id in notes and notes[request_id].ended_s >= applied.began_s
    }


def _endings(run: Run) -> Table:
    table = _table("how requests ended", "requests", "share", "slowest, s", right=(1, 2, 3))
    for words, count in Counter(map(_words, run.notes)).most_common():
        slowest_s = max(note.ended_s - note.asked_s for note in run.notes if _words(note) == words)
        table.add_row(words, str(count), f"{count / len(run.notes):.2%}", f"{slowest_s:.1f}")
    return table


def _invariants(findings: Sequence[Finding]) -> Table:
    table = _table("invariant", "figures", "holds")
    for finding in findings:
        table.add_row(finding.name, finding.figures, _holds(finding))
    return table


def _holds(finding: Finding) -> str:
    if not finding.judged:
        return "not judged"
    return f"NO: {len(finding.violations)}" if finding.violations else "yes"


def _words(note: Note) -> str:
    code = f" {note.verdict.code}" if note.verdict.code else ""
    return f"{note.verdict.ending.value}{code}"


def _order(name: str) -> int:
    return next(number for number, kind in enumerate(Kind) if name.startswith(kind.value))
