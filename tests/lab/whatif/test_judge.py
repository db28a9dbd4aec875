"""What a log of a simulated fleet says of weights: a bad set, a good one, the same one, and what cannot be judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.tuning import DecisionCollector
from gorgo.cli.app import app
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.request import AttemptResult
from gorgo.core.training.learning import RecordedOutcome
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.datasets import load_requests
from gorgo.lab.decisions import LoggedDecision, newest_decisions, read_decisions
from gorgo.lab.sim.fleet import find_fleet
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from gorgo.lab.whatif import JudgedLog, LogFilter
from gorgo.live.telemetry.outcome_log import OutcomeLine
from gorgo.policies.registry import make_policy

HEADER = {"gorgo_outcome_log": 2, "boot_id": "b", "started_s": 1.0}


class Lines(DecisionCollector):
    """Collects the lines of a log beside the decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        slower = replace(outcome, decision=replace(outcome.decision, decided_s=SLOWER * outcome.decision.decided_s))
        super().record_outcome(slower)
        self.lines.append(OutcomeLine(slower).as_line())


#: Two minutes are as many blocks of a minute as a quarter of an hour would be.
SLOWER = 8


def logged(*, explore: float, requests: int = 1500, policy: str = "gorgo") -> Lines:
    feed = feed_of(load_requests("short-chat", TraceFilters(limit=requests), seed=0))
    job = SimJob(
        trace="short-chat",
        feed=tuple(feed),
        policy=policy,
        fleet=find_fleet("small-model"),
        limits=RouterLimits(explore=explore),
    )
    lines = Lines()
    run_once(job, controllers=(lines,))
    return lines


@pytest.fixture(scope="module")
def explored() -> Lines:
    """A log of which a quarter was by chance."""
    return logged(explore=0.25)


@pytest.fixture(scope="module")
def decisions(explored: Lines) -> Sequence[LoggedDecision]:
    return tuple(explored.decisions)


@pytest.fixture
def log(explored: Lines, tmp_path: Path) -> Path:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(json.dumps(HEADER) + "\n" + "".join(explored.lines))
    return path


def test_a_bad_weight_set_is_refuted_and_a_good_one_is_not(decisions: Sequence[LoggedDecision]) -> None:
    log = JudgedLog(decisions)
    bad = log.judge(make_policy("gorgo"), {"w_rtt": 0.05, "w_queue": 5.0})
    good = log.judge(make_policy("gorgo"), {"w_rtt": 4.0})
    assert bad.refuted is not None
    assert bad.refuted.startswith("the log refutes it: ")
    assert good.refuted is None
    assert good.unpromising is None
    assert bad.outcomes[1].changes["dr"].low > 0.0 > good.outcomes[1].changes["dr"].high


def test_the_weights_of_the_log_change_nothing(decisions: Sequence[LoggedDecision]) -> None:
    same = JudgedLog(decisions).judge(make_policy("gorgo"), {})
    assert same.support.changed == pytest.approx(0.0, abs=0.01)
    assert same.support.effective == 0.0
    assert (same.late_gain, same.late_modelled) == pytest.approx((0.0, 0.0), abs=0.01)
    assert all(not outcome.changes for outcome in same.outcomes)


def test_the_filter_refuses_what_is_worse_and_what_can_gain_nothing(decisions: Sequence[LoggedDecision]) -> None:
    refutes = LogFilter(lambda: decisions, make_policy("gorgo"))
    start = {"w_rtt": 0.5, "w_queue": 0.1}
    assert refutes({"w_rtt": 4.0, "w_queue": 0.1}, start) is None
    assert "more requests are later" in (refutes({"w_rtt": 0.05, "w_queue": 5.0}, start) or "")
    assert "0.00 of 5 points of late requests would be in time" in (
        refutes({"w_rtt": 0.5, "w_queue": 0.1000001}, start) or ""
    )


def test_the_filter_needs_no_decision_by_chance() -> None:
    """Fault: a log without exploration refuted little, and exploring made the p95 of the fleet worse."""
    made = logged(explore=0.0, requests=1000).decisions
    refutes = LogFilter(lambda: made, make_policy("gorgo"))
    start = {"w_rtt": 0.5, "w_queue": 0.1}
    assert refutes({"w_rtt": 4.0, "w_queue": 0.1}, start) is None
    assert "points more requests are predicted to be later than" in (
        refutes({"w_rtt": 0.5, "w_queue": 0.4}, start) or ""
    )
    assert "points of late requests would be in time" in (refutes({"w_rtt": 0.45, "w_queue": 0.1}, start) or "")


def test_the_filter_reads_the_log_again_for_each_incumbent_and_judges_by_its_decisions_alone(
    decisions: Sequence[LoggedDecision],
) -> None:
    reads, log = list[int](), list(decisions[:1000])

    def read() -> list[LoggedDecision]:
        reads.append(len(log))
        return log

    refutes = LogFilter(read, make_policy("gorgo"))
    start, found = {"w_rtt": 0.5, "w_queue": 0.1}, {"w_rtt": 4.0, "w_queue": 0.1}
    bad = {"w_rtt": 0.05, "w_queue": 5.0}
    assert refutes(bad, start) is not None
    assert refutes({"w_rtt": 0.5, "w_queue": 0.1000001}, start) is not None
    assert reads == [1000], "once for an incumbent"
    assert [refutes(bad, found), refutes(bad, found)] == [None, None], "no decision is its own"
    log += [replace(one, weights=found) for one in decisions[1000:]]
    assert refutes({"w_rtt": 4.0, "w_queue": 0.1000001}, found) is not None
    assert reads == [1000, 1000, 1000, 1500]


def test_the_newest_decisions_are_read_from_the_end_of_the_newest_files(
    explored: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps(HEADER) + "\n"
    older, newer = tmp_path / "log.1", tmp_path / "log"
    older.write_text(header + "".join(explored.lines[:20]))
    newer.write_text(header + "".join(explored.lines[20:30]))
    assert len(newest_decisions(newer, most=100)) == 30
    assert len(newest_decisions(newer, most=7)) == 7
    monkeypatch.setattr("gorgo.lab.decisions.TAIL_BYTES", len("".join(explored.lines[15:30])) + 200)
    tail = newest_decisions(newer, most=100)
    assert 14 <= len(tail) <= 16
    assert tail[-1].decided_s == pytest.approx(json.loads(explored.lines[29])["dispatched_s"])
    newer.write_text(header)
    older.unlink()
    assert newest_decisions(newer, most=5) == ()
    with pytest.raises(TraceError, match="No such file or directory; expected an outcome log"):
        newest_decisions(tmp_path / "none", most=5)


def test_a_log_without_exploration_supports_no_estimate() -> None:
    found = JudgedLog(logged(explore=0.0, requests=400).decisions).judge(make_policy("gorgo"), {"w_rtt": 4.0})
    assert found.support.changed > 0.1
    assert not found.support.is_enough
    assert found.refuted is None


def test_a_random_policy_is_all_exploration() -> None:
    found = JudgedLog(logged(explore=0.0, requests=600, policy="random").decisions)
    assert found.explored
    assert found.judge(make_policy("gorgo"), {}).support.is_enough


@pytest.mark.parametrize("policy", ["round-robin", "lodestar", "multi-depth", "predicted-latency", "prefix-cache"])
def test_a_policy_that_needs_more_than_the_columns_is_not_judged(
    decisions: Sequence[LoggedDecision], policy: str
) -> None:
    with pytest.raises(ConfigError, match=f"policy '{policy}' cannot choose again from a log"):
        JudgedLog(decisions).judge(make_policy(policy), {})


def test_a_log_of_few_decisions_or_of_unknown_chances_is_refused(decisions: Sequence[LoggedDecision]) -> None:
    with pytest.raises(TraceError, match="has 100 decisions; expected 200 at least"):
        JudgedLog(decisions[:100])
    with pytest.raises(TraceError, match="decisions of round-robin whose chances are not known"):
        JudgedLog(logged(explore=0.1, requests=300, policy="round-robin").decisions)


def test_a_log_is_read_as_it_was_decided(log: Path, decisions: Sequence[LoggedDecision]) -> None:
    found = read_decisions(log)
    assert len(found.decisions) == len(decisions)
    for read, made in zip(found.decisions[:50], decisions[:50], strict=True):
        assert (read.names, read.chosen, read.policy) == (made.names, made.chosen, made.policy)
        assert read.probability == pytest.approx(made.probability, abs=1e-6)
        np.testing.assert_allclose(read.table.cells, made.table.cells, rtol=1e-7, atol=1e-6)
    one = JudgedLog(found.decisions).judge(make_policy("gorgo-ms"), {})
    two = JudgedLog(decisions).judge(make_policy("gorgo-ms"), {})
    assert one.support.changed == pytest.approx(two.support.changed, abs=0.005)


def test_only_the_newest_decisions_of_a_log_are_kept(log: Path) -> None:
    found = read_decisions(log, most=100)
    assert len(found.decisions) == 100
    assert found.left_out >= 1400


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"columns": None}, "columns is null; expected a column by name"),
        ({"candidates": []}, "candidates is []; expected names of replicas"),
        ({"chosen": 99}, "chosen is 99; expected less than the number of candidates"),
        ({"probability": 1.5}, "probability is 1.5; expected above 0 and at most 1"),
        ({"weights": [1]}, "weights is [1]; expected a number by name"),
        ({"policy": 7}, "policy is 7; expected the name of a policy"),
        ({"shared": [[1.0], [2.0]]}, "shared is [[1.0], [2.0]]; expected two lists of numbers of one length"),
        ({"waited_s": -1}, "waited_s is -1; expected a number of at least 0"),
        ({"streamed": "yes"}, 'streamed is "yes"; expected true or false'),
    ],
)
def test_a_damaged_line_is_named_with_what_was_expected(
    explored: Lines, tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(json.loads(explored.lines[0]) | change) + "\n")
    with pytest.raises(TraceError) as refusal:
        read_decisions(path)
    assert f"{path}, line 2: {expected}" in str(refusal.value)


def test_a_column_with_cells_for_other_candidates_is_refused(explored: Lines, tmp_path: Path) -> None:
    line = json.loads(explored.lines[0])
    line["columns"]["rtt_s"] = [0.1]
    path = tmp_path / "log"
    path.write_text(json.dumps(HEADER) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(TraceError, match=r"columns.rtt_s is .*; expected one cell, or one for each of"):
        read_decisions(path)


def test_a_log_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(HEADER | {"gorgo_outcome_log": 1}) + "\n")
    with pytest.raises(TraceError, match="gorgo_outcome_log is 1; expected 2, which this GORGO reads"):
        read_decisions(path)


def test_a_failed_attempt_is_late_and_a_later_attempt_is_left_out(explored: Lines, tmp_path: Path) -> None:
    first = json.loads(explored.lines[0])
    failed = first | {"result": AttemptResult.FAILED_BEFORE_CONTENT.value, "censored": True}
    later = first | {"attempt": 2}
    path = tmp_path / "log"
    path.write_text("\n".join(map(json.dumps, [HEADER, first, failed, later])) + "\n")
    found = read_decisions(path)
    assert [one.failed for one in found.decisions] == [False, True]
    assert found.left_out == 1


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["whatif", *words])
    return done.exit_code, done.output


def weights_file(folder: Path, **weights: float) -> str:
    path = folder / "weights.json"
    path.write_text(json.dumps({"policy": "gorgo", "weights": weights}))
    return str(path)


def test_the_command_says_what_changes_and_that_a_bad_set_is_refuted(log: Path, tmp_path: Path) -> None:
    code, output = run(str(log), "--weights", weights_file(tmp_path, w_rtt=0.05, w_queue=5.0))
    assert code == 0
    assert output.startswith("1,500 decisions of gorgo; gorgo makes ")
    assert "late first tokens" in output
    assert "The log refutes it: more requests would be late." in output


def test_the_command_refuses_an_estimate_without_support(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(json.dumps(HEADER) + "\n" + "".join(logged(explore=0.0, requests=300).lines))
    code, output = run(str(path), "--weights", weights_file(tmp_path, w_rtt=4.0))
    assert code == 1
    assert "No decision went there by chance: no estimate. Set proxy.explore" in output
    code, output = run(str(path), "--policy", "gorgo")
    assert code == 0
    assert "No decision changes, so nothing of the traffic would." in output


def test_the_command_has_its_figures_as_json(log: Path) -> None:
    code, output = run(str(log), "--policy", "gorgo-ms", "--json")
    assert code == 0
    found = json.loads(output)
    assert (found["policy"], found["decisions"], found["twin"]) == ("gorgo-ms", 1500, None)
    assert {"late first tokens", "mean TTFT", "mean E2E"} == {one["name"] for one in found["outcomes"]}
    assert set(found["outcomes"][0]["changes"]) == {"ips", "snips", "dr"}


def test_a_weights_file_of_another_policy_and_wrong_weights_are_refused(log: Path, tmp_path: Path) -> None:
    code, output = run(str(log), "--policy", "gorgo-ms", "--weights", weights_file(tmp_path, w_rtt=1.0))
    assert (code, "weights are for the policy 'gorgo', not for 'gorgo-ms'" in output) == (2, True)
    code, output = run(str(log), "--weights", weights_file(tmp_path, w_rtt=1e9))
    assert (code, "weights.json: weight 'w_rtt' is" in output) == (2, True)
