"""Requests that were lost, and to which fault: what two invariants share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.faults import Applied
from tests.chaos.load import Note
from tests.chaos.questions import Ending
from tests.chaos.schedule import RECOVERY_S

if TYPE_CHECKING:
    from tests.chaos.invariants import Run

#: Requests that may be lost to a replica before the proxy has seen that it fails fast.
LOST_FIRST = 5
#: The same behind Envoy, which passes a wrong answer on as it comes: the picker knows of each from the access log,
#: 50 ms after its end, and chooses the replica again meanwhile.
LOST_FIRST_BEHIND_ENVOY = 10


def fast_failures(run: Run) -> tuple[str, list[str]]:
    """Return the figures of all fast failures, and each request that was lost to one beyond the first."""
    counts, wrong = [], []
    first = LOST_FIRST_BEHIND_ENVOY if run.behind_envoy else LOST_FIRST
    for applied, lost in lost_fast(run):
        counts.append(len(lost))
        others = [note for note in lost if well_throughout(run, note.asked_s, note.ended_s)]
        wrong += [
            f"{note.question.request_id}: lost to {applied.planned.target} ({applied.planned.name})"
            for note in others[first:]
        ]
    return f"{len(counts)} fast failures, at most {max(counts, default=0)} lost", wrong


def lost_fast(run: Run) -> list[tuple[Applied, list[Note]]]:
    """Each failure that is fast, with the requests that reached it and did not end well, in order."""
    found = []
    for applied in run.applied:
        if not applied.planned.fails_fast:
            continue
        passed = run.passed.get(applied.planned.target, ())
        there = {name for name, at_s in passed if applied.began_s <= at_s <= applied.ended_s}
        lost = [
            note
            for note in run.notes
            if note.question.request_id in there and note.verdict.ending not in (Ending.COMPLETE, Ending.LEFT)
        ]
        found.append((applied, sorted(lost, key=lambda note: note.asked_s)))
    return found


def lost_before_content(run: Run) -> list[Note]:
    """Return the requests without any content that a router could have sent elsewhere.

    Envoy cannot where a replica's head has been passed on, and does not where the replica has answered 4xx.
    """
    if not run.behind_envoy:
        return [note for note in run.notes if note.verdict.ending is Ending.REFUSED or _cut_before_content(note)]
    passed_on = {note.question.request_id for _, lost in lost_fast(run) for note in lost}
    refused = (note for note in run.notes if note.verdict.ending is Ending.REFUSED)
    return [note for note in refused if note.question.request_id not in passed_on]


def _cut_before_content(note: Note) -> bool:
    return note.verdict.ending is Ending.CUT and not note.verdict.content


def well_throughout(run: Run, from_s: float, to_s: float) -> list[str]:
    """Replicas that nothing was wrong with, nor a short while before."""
    within = [each for each in run.applied if each.began_s <= to_s and from_s - RECOVERY_S <= each.ended_s]
    ill = {name for each in within for name in each.planned.lays_low(run.replicas)}
    return [name for name in run.replicas if name not in ill]
