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
from gorgo.core.numeric import Floats
from gorgo.core.training.learning import RecordedOutcome
from gorgo.errors import ConfigError, TraceError
from gorgo.lab.datasets import load_requests
from gorgo.lab.decisions import LoggedDecision, newest_decisions, read_decisions
from gorgo.lab.sim.fleet import find_fleet
from gorgo.lab.simulate import SimJob, run_once
from gorgo.lab.simulate.feed import feed_of
from gorgo.lab.traces import TraceFilters
from gorgo.lab.whatif import (
    LEAST_SUPPORT,
    EstimatedChange,
    Estimator,
    JudgedLog,
    LogFilter,
    Weighted,
    binned_means,
    blocks_of,
    changes,
    support,
)
from gorgo.live.telemetry.outcome_log import OutcomeLine
from gorgo.policies.registry import make_policy
from tests.bench.whatif_coverage import RUNS, coverage

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


# --- Off-policy estimates on decisions whose truth is known: bias, intervals, and what has no support.


#: Replicas, and the share of decisions that goes to any of them.
K, SHARE = 4, 0.2


def world(seed: int, *, rows: int = 4000, gain: float = 0.5) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Outcomes, probabilities, chances under another policy, times, and a feature of a model.

    The log's policy takes replica 0 and the other one replica 1 on three decisions of ten, where that is better by
    `gain`. A level that is common to the decisions of half a minute is added to all outcomes.
    """
    rng = np.random.default_rng(seed)
    times_s = np.sort(rng.uniform(0.0, 1800.0, rows))
    level = rng.normal(0.0, 1.0, 61)[(times_s / 30.0).astype(int)]
    differs = rng.random(rows) < 0.3
    explores = rng.random(rows) < SHARE
    taken = np.where(explores, rng.integers(K, size=rows), 0)
    size = rng.exponential(1.0, rows)
    effect = np.where(differs & (taken == 1), -gain, np.where(taken == 0, 0.0, 0.3))
    outcomes = 10.0 + size + level + effect + rng.normal(0.0, 0.5, rows)
    probabilities = np.where(taken == 0, 1.0 - SHARE + SHARE / K, SHARE / K)
    chances = (taken == np.where(differs, 1, 0)).astype(float)
    return outcomes, probabilities, chances, times_s, size


def estimated(seed: int, **more: float) -> dict[Estimator, EstimatedChange]:
    outcomes, probabilities, chances, times_s, size = world(seed, **more)  # type: ignore[arg-type] # sizes
    edges, means = binned_means(size, outcomes)
    predicted = means[np.searchsorted(edges, size)]
    other = Weighted(chances / probabilities, predicted)
    return dict(changes(outcomes, blocks_of(times_s), predicted, other))


#: Of the other policy without exploration, over the log with it.
TRUTH = -0.3 * 0.5 - SHARE * (0.3 * (0.25 * -0.5 + 0.5 * 0.3) + 0.7 * 0.75 * 0.3)


def test_intervals_cover_the_truth_in_90_to_99_of_100_logs_although_a_minute_has_one_level() -> None:
    runs = [estimated(seed) for seed in range(100)]
    names: tuple[Estimator, ...] = ("snips", "dr")
    for name in names:
        covered = sum(run[name].low <= TRUTH <= run[name].high for run in runs)
        assert 90 <= covered <= 99, name
        assert np.mean([run[name].change for run in runs]) == pytest.approx(TRUTH, abs=0.02)


def test_intervals_of_the_doubly_robust_estimate_are_the_narrowest() -> None:
    runs = [estimated(seed) for seed in range(5)]
    names: tuple[Estimator, ...] = ("ips", "snips", "dr")
    ips, snips, dr = (sum(run[name].high - run[name].low for run in runs) for name in names)
    assert dr < snips < ips


def test_a_wrong_model_widens_the_interval_and_moves_no_estimate() -> None:
    outcomes, probabilities, chances, times_s, size = world(1, rows=40_000)
    weights = chances / probabilities
    wrong = 5.0 * size
    found = changes(outcomes, blocks_of(times_s), wrong, Weighted(weights, wrong))["dr"]
    assert found.change == pytest.approx(TRUTH, abs=2 * (found.high - found.low))
    right = changes(outcomes, blocks_of(times_s), size + 10.0, Weighted(weights, size + 10.0))["dr"]
    assert right.high - right.low < found.high - found.low


def test_two_weight_sets_are_compared_with_each_other() -> None:
    outcomes, probabilities, chances, times_s, size = world(2)
    own = (probabilities > 0.5).astype(float)
    ours, theirs = Weighted(chances / probabilities, size), Weighted(own / probabilities, size)
    blocks = blocks_of(times_s)
    found = changes(outcomes, blocks, size, ours, theirs)["dr"]
    assert found.low < -0.15 < found.high
    same = changes(outcomes, blocks, size, ours, ours)["dr"]
    assert (same.change, same.low, same.high) == (0.0, 0.0, 0.0)


def test_what_never_went_there_by_chance_has_no_support() -> None:
    probabilities = np.full(1000, 1.0)
    chances = np.where(np.arange(1000) % 5 == 0, 0.0, 1.0)
    found = support(chances, probabilities)
    assert found.changed == pytest.approx(0.2)
    assert (found.effective, found.is_enough) == (0.0, False)
    assert found.needed == np.inf


def test_support_is_the_number_of_decisions_by_chance_where_their_weights_are_equal() -> None:
    probabilities, chances = np.full(1000, 0.99), np.ones(1000)
    probabilities[:20], chances[20:220] = 0.01, 0.0
    found = support(chances, probabilities)
    assert found.effective == pytest.approx(20.0)
    assert found.changed == pytest.approx(200 / 980)
    assert found.needed == pytest.approx(LEAST_SUPPORT / 20.0)


def test_one_block_has_an_interval_without_end() -> None:
    outcomes, probabilities, chances, _, size = world(3, rows=300)
    found = changes(outcomes, blocks_of(np.zeros(300)), size, Weighted(chances / probabilities, size))["dr"]
    assert (found.low, found.high) == (-np.inf, np.inf)


# --- Whether intervals cover the truth in simulation, where queues and caches are those of earlier decisions.


@pytest.mark.system
@pytest.mark.timeout(7200)
def test_intervals_cover_the_truth_of_single_decisions_in_90_to_99_of_100_simulated_logs() -> None:
    rows = coverage()
    robust = [row.covered / row.judged for row in rows if row.estimator == "dr"]
    assert {row.judged for row in rows} == {RUNS}
    assert min(robust) >= 0.85, rows
    assert 0.90 <= np.mean(robust) <= 0.99, rows
