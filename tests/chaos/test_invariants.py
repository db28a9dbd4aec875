"""Each invariant holds for a good record and fails for one in which just that is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.chaos.faults import Applied, HistorySeen
from tests.chaos.invariants import RSS_LOOKS, Run, judge_run, starved_s, tally
from tests.chaos.load import Note
from tests.chaos.observe import Look, Watch
from tests.chaos.questions import Ending, Question, Verdict
from tests.chaos.report import print_report
from tests.chaos.schedule import Kind, Planned

REPLICAS = ("a", "b", "c")
INSIDE: dict[str, Any] = {
    "violation": None,
    "index": {"blocks": 10, "nodes": 3},
    "in_flight": 0,
    "queued": 0,
    "exchanges": 0,
    "draining": 0,
    "active": dict.fromkeys(REPLICAS, 0),
    "open_responses": dict.fromkeys(REPLICAS, 0),
    "connections": dict.fromkeys(REPLICAS, 2),
    "tasks": {"Watcher.run": 3},
}


def look(
    at_s: float = 0.0, *, rss_kb: int = 90_000, descriptors: int = 20, fault: str | None = None, **inside: Any
) -> Look:
    return Look(at_s, rss_kb, descriptors, INSIDE | inside, fault)


def note(number: int, verdict: Verdict, *, status: int = 200, asked_s: float = 0.0, ended_s: float = 2.0) -> Note:
    question = Question(f"r{number}", 0.0, "/generate", True, b"", "", "")
    return Note(question, asked_s, ended_s, verdict, "a", status)


def line(number: int, status: int = 200, **fields: Any) -> dict[str, Any]:
    return {"event": "request", "request_id": f"r{number}", "status": status} | fields


def applied(kind: Kind, target: str, began_s: float, ended_s: float, variant: str = "") -> Applied:
    return Applied(Planned(kind, variant, target, began_s, ended_s - began_s), began_s, ended_s)


def good() -> Run:
    """A right answer, a cut, a refusal while nobody was well, a client that left."""
    notes = [
        note(0, Verdict(Ending.COMPLETE, content=9)),
        note(1, Verdict(Ending.CUT, "upstream_failed", content=3)),
        note(2, Verdict(Ending.REFUSED, "503 no_replica"), status=503, asked_s=50.0, ended_s=52.0),
        note(3, Verdict(Ending.LEFT)),
    ]
    return Run(
        seed=1,
        replicas=REPLICAS,
        questions=[each.question for each in notes],
        notes=notes,
        applied=[
            applied(Kind.KILL, "a", 0.0, 4.0),
            applied(Kind.BLACKOUT, "a", 49.0, 53.0),
            applied(Kind.SLOW, "b", 1.0, 3.0),
            applied(Kind.TUNER, "sidecar", 5.0, 6.0),
            applied(Kind.REFUSING, "c", 100.0, 110.0, "404 to everything"),
        ],
        watch=Watch(
            [look()] * 3,
            [look(float(n), in_flight=2) for n in range(3 * RSS_LOOKS)],
            [look()],
        ),
        log=[line(0, retries=1), line(1, 502), line(2, 503), line(3, 499), {"event": "config_refused"}],
        said={"serve-1": "ready"},
        histories=[HistorySeen([(1, 1, 0, "{}")]), HistorySeen([(1, 1, 0, "{}"), (2, 1, 1, "{}")])],
        sidecar_exit=0,
        reloads=2,
        refusals=1,
        fleet=[{"name": name, "state": "healthy"} for name in REPLICAS],
        passed={"c": [(f"r{number}", 101.0) for number in range(100, 110)]},
    )


def printed(run: Run) -> list[str]:
    """Lines of the report."""
    text = StringIO()
    print_report(run, judge_run(run), Console(width=150, file=text))
    return [line.strip() for line in text.getvalue().splitlines()]


def broken(run: Run) -> list[str]:
    """Names of the invariants that do not hold."""
    return [finding.name for finding in judge_run(run) if finding.violations]


def test_a_good_record_has_no_violation() -> None:
    assert broken(good()) == []


Break = Callable[[Run], object]

ONCE = "every request ends exactly once"
RIGHT = "complete and hash-checked, or a well-formed error"
AGREES = "the proxy's log agrees with its clients"
LOST = "nothing without content is lost while a replica is well"
FAST = "none but the first 5 lost to a fast failure"
SHED = "nobody is turned away for load"
OWN = "no fault of the code's own"
LEDGER = "ledger back to zero"
INDEX = "index, ledger and clocks consistent"
LEAK = "no task, connection or descriptor leaked"
MEMORY = "memory flat"
HISTORY = "weights history usable"
STATE = "state file valid"
CONFIGURATION = "configuration followed, everybody back in"
FELT = "the faults were felt"


def refuse(run: Run, **changes: Any) -> None:
    """The refusal, otherwise."""
    run.notes[2] = replace(run.notes[2], **changes)


def shed(run: Run) -> None:
    refuse(run, status=429)
    run.log[2] = line(2, 429)


def lose_fast(run: Run, count: int) -> None:
    """Wrong answers of the replica that fails fast."""
    for number in range(100, 100 + count):
        lost = note(number, Verdict(Ending.WRONG, reason="404"), status=404, asked_s=101.0, ended_s=101.5)
        run.notes.append(lost)
        run.questions = [*run.questions, lost.question]
        run.log.append(line(number, 404))


def after(run: Run, **inside: Any) -> None:
    """As it stays, for as long as one looks."""
    run.watch.after[:] = [look(**inside)] * 3


def grow(run: Run) -> None:
    run.watch.during = [replace(each, rss_kb=90_000 + 300 * n) for n, each in enumerate(run.watch.during)]


def history(run: Run, *rows: tuple[object, ...]) -> None:
    run.histories.append(HistorySeen(list(rows)))


BREAKS: list[tuple[str, str, Break]] = [
    (ONCE, "an answer that nobody noted", lambda run: run.notes.pop(0)),
    (ONCE, "an answer noted twice", lambda run: run.notes.append(run.notes[0])),
    (ONCE, "a request that the proxy forgot", lambda run: run.log.pop(1)),
    (ONCE, "a request that the proxy ended twice", lambda run: run.log.append(line(0))),
    (ONCE, "one of a client that left, ended twice", lambda run: run.log.append(line(3, 499))),
    (RIGHT, "a wrong answer", lambda run: run.notes.__setitem__(0, note(0, Verdict(Ending.WRONG, reason="hash")))),
    (AGREES, "an error that the log calls a success", lambda run: run.log.__setitem__(1, line(1, 200))),
    (AGREES, "a success that the log calls an error", lambda run: run.log.__setitem__(0, line(0, 502, retries=1))),
    (LOST, "a refusal when all was well", lambda run: refuse(run, asked_s=80.0, ended_s=81.0)),
    (LOST, "a refusal while another one was killed", lambda run: refuse(run, asked_s=1.0, ended_s=3.0)),
    (
        LOST,
        "a stream cut before its content",
        lambda run: run.notes.__setitem__(1, note(1, Verdict(Ending.CUT, "upstream_failed", content=0))),
    ),
    (FAST, "a sixth request lost to a replica that fails fast", lambda run: lose_fast(run, 6)),
    (SHED, "a 429", shed),
    (OWN, "an internal error", lambda run: run.log.append({"event": "internal_error", "error": "KeyError"})),
    (OWN, "a traceback", lambda run: run.said.update({"tune-1": "Traceback (most recent call last):\n"})),
    (LEDGER, "a reservation", lambda run: after(run, in_flight=1)),
    (LEDGER, "a request that is still queued", lambda run: after(run, queued=1)),
    (LEDGER, "an exchange that never ended", lambda run: after(run, exchanges=1)),
    (LEDGER, "a replica that never left", lambda run: after(run, draining=1)),
    (LEDGER, "an attempt that never ended", lambda run: after(run, active={"a": 1})),
    (LEDGER, "an answer that was never closed", lambda run: after(run, open_responses={"a": 1})),
    (INDEX, "an index that miscounts", lambda run: run.watch.during.append(look(violation="PrefixIndex.check"))),
    (LEAK, "a descriptor", lambda run: after(run, descriptors=21)),
    (
        LEAK,
        "connections to a replica",
        lambda run: after(run, descriptors=31, connections={"a": 13, "b": 2, "c": 2}),
    ),
    (LEAK, "a task", lambda run: after(run, tasks={"Watcher.run": 3, "Exchange._watch": 1})),
    (MEMORY, "memory that grows", grow),
    (HISTORY, "a damaged database", lambda run: run.histories.append(HistorySeen(fault="malformed"))),
    (HISTORY, "a lost row", lambda run: history(run, (1, 1, 0, "{}"))),
    (HISTORY, "a gap", lambda run: history(run, *run.histories[-1].rows, (3, 1, 3, "{}"))),
    (HISTORY, "nothing written", lambda run: run.histories.__setitem__(slice(None), [HistorySeen()])),
    (HISTORY, "a sidecar that fails when asked to stop", lambda run: setattr(run, "sidecar_exit", 1)),
    (STATE, "a state file that is none", lambda run: run.watch.during.append(look(fault="line 1: not JSON"))),
    (CONFIGURATION, "a bad file that was taken", lambda run: run.log.pop()),
    (CONFIGURATION, "a replica that did not come back", lambda run: run.fleet.pop()),
    (CONFIGURATION, "a replica that is still out", lambda run: run.fleet[0].update(state="ejected")),
    (CONFIGURATION, "a replica that still drains", lambda run: run.fleet[0].update(state="draining")),
    (FELT, "a schedule that hit nobody", lambda run: run.log.__setitem__(0, line(0))),
]


@pytest.mark.parametrize(("name", "what", "change"), BREAKS, ids=[what for _, what, _ in BREAKS])
def test_what_is_broken_is_found_and_nothing_else(name: str, what: str, change: Break) -> None:
    run = good()
    change(run)
    assert broken(run) == [name], what


def test_the_first_requests_lost_to_a_fast_failure_are_no_violation_nor_are_those_while_none_is_well() -> None:
    run = good()
    lose_fast(run, 5)
    assert broken(run) == []
    lose_fast(run := good(), 6)
    run.applied.append(applied(Kind.BLACKOUT, "a", 100.0, 110.0))
    assert broken(run) == []


def test_a_wrong_answer_of_another_replica_is_not_excused_by_a_fast_failure() -> None:
    run = good()
    lose_fast(run, 1)
    run.passed = {"b": run.passed["c"]}
    assert broken(run) == [RIGHT]


def test_a_prompt_under_which_two_replicas_broke_off_has_no_third_one_and_with_one_it_has_a_second() -> None:
    run = good()
    refuse(run, verdict=Verdict(Ending.REFUSED, "502 poison_prompt"), status=502, asked_s=1.0, ended_s=3.0)
    run.log[2] = line(2, 502)
    assert broken(run) == [LOST]
    run.applied.append(applied(Kind.RESET, "b", 2.0, 3.0))
    assert broken(run) == []


def test_what_probes_open_for_a_moment_is_no_leak() -> None:
    run = good()
    run.watch.after[:] = [look(descriptors=21), look(open_responses={"a": 1})]
    assert broken(run) == []


def test_a_run_too_short_to_judge_memory_does_not_count_it_as_held() -> None:
    assert tally(judge_run(good())) == "15 of 15 judged invariants hold"
    run = good()
    run.watch.during = run.watch.during[: 3 * RSS_LOOKS - 1]
    (memory,) = (finding for finding in judge_run(run) if not finding.judged)
    assert (memory.name, memory.figures) == (MEMORY, f"{3 * RSS_LOOKS - 1} looks are too few (grew by 0.0 MB)")
    assert tally(judge_run(run)) == "14 of 14 judged invariants hold; 1 not judged (memory flat)"
    shed(run)
    assert tally(judge_run(run)) == "13 of 14 judged invariants hold; 1 not judged (memory flat)"
    (row,) = (line for line in printed(run) if line.startswith(MEMORY))
    assert row.endswith("not judged")


def test_a_machine_that_gives_processes_no_time_judges_nobody() -> None:
    run = good()
    assert starved_s(run) is None
    run.watch.during = [replace(each, took_s=0.5) for each in run.watch.during]
    assert starved_s(run) == 0.5


def test_every_invariant_is_shown_to_fail() -> None:
    assert {name for name, _, _ in BREAKS} == {finding.name for finding in judge_run(good())}
