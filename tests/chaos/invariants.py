"""What must hold, each as a function of the record of a run: its figures, and every violation.

Pure: a record goes in, findings come out, so that a test can show of each that it fails where it should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from gorgo.core.dispatch.in_flight import MOST_KILLED
from tests.chaos.faults import Applied, HistorySeen
from tests.chaos.load import Note
from tests.chaos.observe import Look, Watch, left_over
from tests.chaos.questions import Ending, Question
from tests.chaos.schedule import RECOVERY_S, Kind

# --- Requests that were lost, and to which fault: what two invariants share.


if TYPE_CHECKING:
    pass
#: Requests that may be lost to a replica before the proxy has seen that it fails fast, for each of its processes.
LOST_FIRST = 5
#: The same behind Envoy, which passes a wrong answer on as it comes: the picker knows of each from the access log,
#: 50 ms after its end, and chooses the replica again meanwhile.
LOST_FIRST_BEHIND_ENVOY = 10


def fast_failures(run: Run) -> tuple[str, list[str]]:
    """Return the figures of all fast failures, and each request that was lost to one beyond the first."""
    counts, wrong = [], []
    first = lost_first(run)
    for applied, lost in lost_fast(run):
        counts.append(len(lost))
        others = [note for note in lost if well_throughout(run, note.asked_s, note.ended_s)]
        wrong += [
            f"{note.question.request_id}: lost to {applied.planned.target} ({applied.planned.name})"
            for note in others[first:]
        ]
    return f"{len(counts)} fast failures, at most {max(counts, default=0)} lost", wrong


def lost_first(run: Run) -> int:
    """Return how many requests a fast failure may cost."""
    return LOST_FIRST_BEHIND_ENVOY if run.behind_envoy else LOST_FIRST * run.processes


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


#: Violations that are shown in full.
SHOWN = 5
#: Growth of the median of the last third of the looks over that of the second. What grows by design then: samples
#: (10,000 are kept, about 1 kB each) and decisions (1,000); a run has several thousand requests.
RSS_GROWTH = 0.10
#: A third of fewer looks says nothing about growth: too little has come by.
RSS_LOOKS = 60
#: Of which there are some in any proxy.
_COUNTED = ("other_descriptors", "tasks", "kept")
#: The proxy answers a look within milliseconds. Where half of them take so long, processes wait for the processor for
#: about as long as they are granted for an answer, and what fails then says nothing about them.
STARVED_S = 0.2


@dataclass(frozen=True, slots=True)
class Finding:
    """One invariant: what was looked at, in figures, and what did not hold."""

    name: str
    figures: str
    violations: Sequence[str] = ()
    #: False: the run was too short to say, and `figures` says why.
    judged: bool = True


@dataclass(slots=True)
class Run:
    """Everything that is known of one run. Times as `monotonic` tells them."""

    seed: int
    replicas: Sequence[str]
    questions: Sequence[Question]
    notes: list[Note]
    applied: list[Applied]
    watch: Watch
    #: The proxy's own log, and everything that each process said.
    log: list[dict[str, Any]]
    said: dict[str, str]
    histories: list[HistorySeen]
    #: The sidecar's exit code at the end; it was asked to stop.
    sidecar_exit: int | None
    #: Configurations written that are good and that are not.
    reloads: int
    refusals: int
    #: The proxy's view of its replicas at the end.
    fleet: list[dict[str, Any]] = field(default_factory=list)
    #: Requests that came by at each gate, and when.
    passed: Mapping[str, Sequence[tuple[str, float]]] = field(default_factory=dict)
    #: Envoy and a picker stood in the place of the proxy.
    behind_envoy: bool = False
    #: Processes of the proxy.
    processes: int = 1


def ends_once(run: Run) -> Finding:
    """Every question has one note and one line in the proxy's log."""
    asked = {question.request_id for question in run.questions}
    notes = Counter(note.question.request_id for note in run.notes)
    lines = Counter(line["request_id"] for line in run.log if line["event"] == "request")
    left = {note.question.request_id for note in run.notes if note.verdict.ending is Ending.LEFT}
    wrong = [f"{name}: {notes[name]} endings" for name in asked if notes[name] != 1]
    # A client that leaves at once may never have got its request across.
    wrong += [f"{name}: {lines[name]} log lines" for name in asked if not (name in left or lines[name] == 1)]
    wrong += [f"{name}: {count} log lines" for name, count in lines.items() if count > 1 and name in left]
    return Finding("every request ends exactly once", f"{len(asked)} asked, {sum(lines.values())} in the log", wrong)


def answers_right(run: Run) -> Finding:
    """Nothing came that was wrong, but from a replica that fails fast, and what came whole has the right hash."""
    excused = {note.question.request_id for _, lost in lost_fast(run) for note in lost}
    wrong = [
        f"{note.question.request_id} ({note.question.route}, {note.replica}): {note.verdict.reason}"
        for note in run.notes
        if note.verdict.ending is Ending.WRONG and note.question.request_id not in excused
    ]
    complete = sum(note.verdict.ending is Ending.COMPLETE for note in run.notes)
    cut = sum(note.verdict.ending in (Ending.REFUSED, Ending.CUT) for note in run.notes)
    return Finding("complete and hash-checked, or a well-formed error", f"{complete} right, {cut} errors", wrong)


def statuses_agree(run: Run) -> Finding:
    """The proxy's log says of each request what its client saw."""
    lines = {line["request_id"]: line for line in run.log if line["event"] == "request"}
    wrong = []
    for note in run.notes:
        line = lines.get(note.question.request_id)
        if line is None or note.verdict.ending is Ending.LEFT:
            continue
        expected = 502 if note.verdict.ending is Ending.CUT else note.status
        # In mid-stream a code has its own status: a replica that broke off, a proxy that stops.
        if line["status"] != expected:
            wrong.append(f"{note.question.request_id}: client saw {expected}, log says {line['status']}")
    return Finding("the proxy's log agrees with its clients", f"{len(lines)} lines", wrong)


def nothing_lost(run: Run) -> Finding:
    """No error before content while some replica was well from before the question until its end.

    A prompt under which two replicas broke off has no third one: the router cannot tell it from one that kills engines.
    """
    before = lost_before_content(run)
    wrong = []
    for note in before:
        well = well_throughout(run, note.asked_s, note.ended_s)
        poison = str(note.verdict.code).endswith("poison_prompt") and len(run.replicas) - len(well) >= MOST_KILLED
        if well and not poison:
            took_s = note.ended_s - note.asked_s
            said = f"{note.verdict.code} after {took_s:.1f} s"
            wrong.append(f"{note.question.request_id}: {said}, {', '.join(well)} was well all the time")
    return Finding(
        "nothing without content is lost while a replica is well", f"{len(before)} errors before content", wrong
    )


def fast_failures_bounded(run: Run) -> Finding:
    """A replica that answers at once, and wrongly, gets no more than its first requests while another one is well."""
    first = lost_first(run)
    return Finding(f"none but the first {first} lost to a fast failure", *fast_failures(run))


def nothing_shed(run: Run) -> Finding:
    """At this load nobody is told to come back, unless nobody is there."""
    shed = [note for note in run.notes if note.status == 429]
    most = max((int(look.inside["queued"]) for look in run.watch.during), default=0)
    wrong = [f"{note.question.request_id}: {note.verdict.code}" for note in shed]
    return Finding("nobody is turned away for load", f"{len(shed)} answered 429, at most {most} queued", wrong)


def no_own_faults(run: Run) -> Finding:
    """No process lost its composure: no internal error, no traceback."""
    wrong = [str(line) for line in run.log if line.get("code") == "internal_error" or line["event"] == "internal_error"]
    wrong += [f"{name}: {_traceback(text)}" for name, text in run.said.items() if "Traceback" in text]
    return Finding("no fault of the code's own", f"{len(run.said)} processes", wrong)


def ledger_empty(run: Run) -> Finding:
    left = {name: count for name, count in left_over(run.watch).items() if name not in _COUNTED}
    most = max((look.open_things["in_flight"] for look in run.watch.during), default=0)
    figures = f"at most {most} in flight, now {run.watch.after[-1].open_things['in_flight']}"
    return Finding("ledger back to zero", figures, [f"{name}: {count}" for name, count in left.items()])


def index_consistent(run: Run) -> Finding:
    looks = _looks(run)
    wrong = [str(look.inside["violation"]) for look in looks if look.inside["violation"]]
    blocks = max(look.inside["index"]["blocks"] for look in looks)
    return Finding("index, ledger and clocks consistent", f"checked {len(looks)} times, at most {blocks} blocks", wrong)


def no_leak(run: Run) -> Finding:
    """No more tasks and descriptors than before, however long one waits; kept connections within their bound."""
    last, before = run.watch.after[-1], run.watch.before
    left = {name: count for name, count in left_over(run.watch).items() if name in _COUNTED}
    wrong = [
        f"{count} {name}, before the load {max(getattr(look, name) for look in before)} at most: {last.inside['tasks']}"
        for name, count in left.items()
    ]
    peak = max((look.descriptors for look in run.watch.during), default=0)
    figures = f"descriptors {before[-1].descriptors} -> {peak} -> {last.descriptors}, {last.kept} of them to replicas"
    return Finding("no task, connection or descriptor leaked", figures, wrong)


def memory_flat(run: Run) -> Finding:
    looks = run.watch.during
    third = len(looks) // 3
    if third < RSS_LOOKS:
        grown = looks[-1].rss_kb - looks[0].rss_kb
        why = f"{len(looks)} looks are too few (grew by {grown / 1024:.1f} MB)"
        return Finding("memory flat", why, judged=False)
    warm, late = (median(look.rss_kb for look in part) for part in (looks[third : 2 * third], looks[2 * third :]))
    growth = late / warm - 1
    figures = f"{warm / 1024:.1f} -> {late / 1024:.1f} MB ({growth:+.1%}, bound {RSS_GROWTH:.0%})"
    return Finding("memory flat", figures, [f"grew by {growth:.1%}"] if growth > RSS_GROWTH else [])


def history_usable(run: Run) -> Finding:
    """After each kill the database is whole, has every row that it had before, and campaigns go on without a gap."""
    seen = run.histories
    wrong = [each.fault for each in seen if each.fault]
    for earlier, later in pairwise(seen):
        lost = len(set(earlier.rows) - set(later.rows))
        if lost and later.fault is None:
            wrong.append(f"{lost} rows of before a kill are gone")
    if seen and not seen[-1].rows:
        wrong.append("no generation was ever written")
    numbers = [(row[1], row[2]) for row in seen[-1].rows] if seen else []
    wrong += [f"generation {now} follows {last}" for last, now in pairwise(numbers) if not _follows(last, now)]
    if run.sidecar_exit != 0:
        wrong.append(f"the sidecar ended with {run.sidecar_exit} when it was asked to stop")
    kills = sum(each.planned.kind is Kind.TUNER for each in run.applied)
    return Finding("weights history usable", f"{kills} kills, {len(numbers)} generations", wrong)


def state_valid(run: Run) -> Finding:
    looks = _looks(run)
    wrong = [look.state_fault for look in looks if look.state_fault]
    return Finding("state file valid", f"read {len(looks)} times", wrong)


def configuration_followed(run: Run) -> Finding:
    """Good files are in force, bad ones were refused, and at the end the fleet is the one of the start."""
    events = Counter(line["event"] for line in run.log)
    wrong = []
    if events["config_refused"] != run.refusals:
        wrong.append(f"{run.refusals} bad files were written, {events['config_refused']} refused")
    if sorted(row["name"] for row in run.fleet) != sorted(run.replicas):
        wrong.append(f"the fleet at the end: {[row['name'] for row in run.fleet]}")
    wrong += [f"{row['name']} is {row['state']} at the end" for row in run.fleet if row["state"] != "healthy"]
    figures = f"{run.reloads} good files, {run.refusals} bad ones, {events['config_reloaded']} reloads"
    return Finding("configuration followed, everybody back in", figures, wrong)


def faults_bite(run: Run) -> Finding:
    """A schedule that hits nobody proves nothing: errors or retries came of it."""
    retried = sum(line.get("retries", 0) > 0 for line in run.log if line["event"] == "request")
    wrong = [] if retried else ["not one request was sent to a second replica"]
    return Finding("the faults were felt", f"{len(run.applied)} faults, {retried} requests retried", wrong)


INVARIANTS: Sequence[Callable[[Run], Finding]] = (
    ends_once,
    answers_right,
    statuses_agree,
    nothing_lost,
    fast_failures_bounded,
    nothing_shed,
    no_own_faults,
    ledger_empty,
    index_consistent,
    no_leak,
    memory_flat,
    history_usable,
    state_valid,
    configuration_followed,
    faults_bite,
)


def judge_run(run: Run) -> list[Finding]:
    return [invariant(run) for invariant in INVARIANTS]


def tally(findings: Sequence[Finding]) -> str:
    """How many hold of those that were judged, and the names of the others."""
    judged = [finding for finding in findings if finding.judged]
    hold = sum(not finding.violations for finding in judged)
    others = ", ".join(finding.name for finding in findings if not finding.judged)
    not_judged = f"; {len(findings) - len(judged)} not judged ({others})" if others else ""
    return f"{hold} of {len(judged)} judged invariants hold{not_judged}"


def starved_s(run: Run) -> float | None:
    """How long half of the looks took, where that is too long for a judgement."""
    half_s = median(look.took_s for look in run.watch.during)
    return half_s if half_s > STARVED_S else None


def _looks(run: Run) -> list[Look]:
    return [*run.watch.before, *run.watch.during, *run.watch.after]


def _traceback(text: str) -> str:
    return text[text.index("Traceback") :][:2000]


def _follows(last: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """(campaign, number): the next generation of the same campaign, or the first of another one."""
    return now == (last[0], last[1] + 1) or (now[0] > last[0] and now[1] == 0)
