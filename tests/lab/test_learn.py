"""A model from an outcome log, with its error on what came later and what each feature adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gorgo.cli.app import app
from gorgo.core.training.candidate_table import FEATURES
from gorgo.core.training.learning import Learner, TrainingSpec
from gorgo.errors import TraceError
from gorgo.lab.learn import learn, read_outcomes, trainings
from gorgo.learning.model_file import load
from gorgo.policies.registry import POLICIES, make_policy

HEADER = {"gorgo_outcome_log": 1, "boot_id": "b", "started_s": 1.0}
NAMES = ("prompt_tokens", "rtt_s", "in_flight_requests")
SPEC = TrainingSpec("linear", NAMES)


def outcome(number: int, **changes: Any) -> dict[str, Any]:
    """A line whose time to first token is 1 ms per token, plus the round trip of the second candidate."""
    tokens = 100 + 53 * (number % 60)
    rtt_s = 0.05 + 0.01 * (number % 7)
    features: dict[str, Any] = dict.fromkeys(FEATURES, 0.0) | {"prior_s": 0.1, "in_flight_requests": number % 3}
    features |= {"prompt_tokens": float(tokens), "rtt_s": [9.0, rtt_s]}
    times = {"ttft_s": tokens / 1e3 + rtt_s, "e2e_s": tokens / 1e3 + rtt_s + 2.0, "tpot_s": 0.02}
    chosen = {
        "candidates": ["a", "b"],
        "chosen": 1,
        "dispatched_s": 1.0 + number,
        "censored": False,
        "group": number % 4,
    }
    counts = {"prompt_tokens": tokens, "output_tokens": 101, "cached_tokens": None}
    return {"request_id": f"r{number}", "features": features, **chosen, **times, **counts, **changes}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_an_accelerator_of_a_log_is_known_whatever_its_number(tmp_path: Path) -> None:
    features = outcome(1)["features"] | {"accelerator=2xL40S": [0.0, 1.0]}
    log = write(tmp_path / "log", [HEADER, outcome(1, features=features)])
    rows = read_outcomes(log, ("accelerator=L40S", "accelerator=L40")).rows
    assert rows.features.tolist() == [[1.0, 0.0]]


def test_a_log_of_earlier_versions_has_streams_alone(tmp_path: Path) -> None:
    features = {name: value for name, value in outcome(1)["features"].items() if name != "streamed"}
    log = write(tmp_path / "log", [HEADER, outcome(1, features=features), outcome(2, unstreamed=True)])
    rows = read_outcomes(log, ("prompt_tokens", "streamed")).rows
    assert (rows.unstreamed.tolist(), rows.features[0, 1]) == ([False, True], 1.0)


def test_rows_are_those_of_the_chosen_candidate(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [HEADER, outcome(1), outcome(2, ttft_s=None), outcome(3, censored=True, tpot_s=None)])
    found = read_outcomes(log, (*NAMES, "accelerator=H100"))
    assert found.rows.features.ravel().tolist() == pytest.approx([153.0, 0.06, 1.0, 0.0, 259.0, 0.08, 0.0, 0.0])
    assert found.rows.ttft_s.tolist() == pytest.approx([0.213, 0.339])
    assert found.rows.censored.tolist() == [False, True]
    assert np.isnan(found.rows.tpot_s).tolist() == [False, True]
    assert np.isnan(found.rows.cached_tokens).all()
    assert (found.left_out, found.cut_lines) == (1, 0)


def test_rotated_files_are_read_oldest_first_and_a_cut_line_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "log.1", [HEADER, outcome(1)])
    log = write(tmp_path / "log", [HEADER, outcome(2)])
    with log.open("a") as file:
        file.write('{"request_id": "cut')
    found = read_outcomes(log, NAMES)
    assert found.rows.dispatched_s.tolist() == [2.0, 3.0]
    assert found.cut_lines == 1


def test_lines_and_headers_that_a_full_disk_cut_off_in_a_row_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [json.dumps(HEADER), json.dumps(outcome(1)), '{"request', '{"gorgo_out', "", json.dumps(HEADER)]
    log.write_text("\n".join([*lines, json.dumps(outcome(2))]))
    found = read_outcomes(log, NAMES)
    assert (found.rows.dispatched_s.tolist(), found.cut_lines) == ([2.0, 3.0], 3)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([outcome(1)], "line 1: expected the header of an outcome log"),
        ([HEADER], "has no attempt with an answer or a failure"),
        (
            [HEADER | {"gorgo_outcome_log": 3}],
            "line 1: gorgo_outcome_log is 3; expected 1 or 2, which this GORGO reads",
        ),
        ([HEADER, outcome(1, ttft_s="soon")], 'line 2: ttft_s is "soon"; expected a number of at least 0'),
        ([HEADER, outcome(1, unstreamed=0)], "line 2: unstreamed is 0; expected true or false"),
        ([HEADER, outcome(1, censored=0)], "line 2: censored is 0; expected true or false"),
        ([HEADER, outcome(1, chosen=-1)], "line 2: chosen is -1; expected the place of the chosen candidate"),
        (
            [HEADER, outcome(1, chosen=2)],
            "line 2: features.rtt_s is [9.0, 0.060000000000000005]; expected a number, or",
        ),
        ([HEADER, outcome(1, features={})], "line 2: features.prompt_tokens is null; expected a number, or one per"),
        ([HEADER, outcome(1, features=3)], "line 2: features.prompt_tokens is null"),
        ([HEADER, outcome(1, group=2**63)], "line 2: group is 9223372036854775808; expected a whole number of 64 bits"),
    ],
)
def test_a_line_that_is_none_of_the_proxy_s_is_named(
    tmp_path: Path, lines: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(TraceError) as refusal:
        read_outcomes(write(tmp_path / "log", lines), NAMES)
    assert expected in str(refusal.value)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no-log: No such file or directory; expected an outcome log"):
        read_outcomes(tmp_path / "no-log", NAMES)


def test_the_error_is_that_of_rows_after_the_training_and_a_feature_adds_what_it_explains(tmp_path: Path) -> None:
    rows = read_outcomes(write(tmp_path / "log", [HEADER, *map(outcome, range(500))]), NAMES).rows
    rounds: list[int] = []
    learned = learn(rows, SPEC, seed=0, trained=lambda: rounds.append(1))
    assert (learned.trained, learned.tested, learned.model.samples) == (400, 100, 500)
    assert learned.ttft_error is not None
    assert learned.ttft_error < 0.02
    shares = {one.name: one.ttft_error or 0.0 for one in learned.features}
    assert [one.name for one in learned.features][:2] == ["prompt_tokens", "rtt_s"]
    assert shares["prompt_tokens"] > 0.3
    assert 0.01 < shares["rtt_s"] < 0.1
    assert shares["in_flight_requests"] == pytest.approx(learned.ttft_error, abs=0.005)
    assert len(rounds) == trainings(SPEC, 500, ablation=True) == 5


def test_too_few_outcomes_are_refused(tmp_path: Path) -> None:
    rows = read_outcomes(write(tmp_path / "log", [HEADER, *map(outcome, range(49))]), NAMES).rows
    with pytest.raises(TraceError, match="the log has 49 outcomes of streams; expected 50 at least"):
        learn(rows, SPEC, seed=0)


LEARNERS = [name for name in POLICIES if isinstance(make_policy(name), Learner)]


@pytest.mark.parametrize("name", LEARNERS)
def test_every_policy_that_learns_is_trained_from_a_log_and_adopts_the_model(name: str, tmp_path: Path) -> None:
    log, file = write(tmp_path / "log", [HEADER, *map(outcome, range(300))]), tmp_path / "model.npz"
    result = CliRunner().invoke(
        app, ["learn", str(log), "--policy", name, "--out", str(file), "--no-ablation", "--json"]
    )
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["policy"], shown["trained"], shown["tested"]) == (name, 240, 60)
    policy = make_policy(name)
    assert isinstance(policy, Learner)
    model = load(file, names=policy.feature_names)
    policy.adopt(model)
    assert model.kind == shown["kind"]


def test_the_command_prints_the_error_and_a_table_of_features(tmp_path: Path) -> None:
    log, file = write(tmp_path / "log", [HEADER, *map(outcome, range(120))]), tmp_path / "model.npz"
    with log.open("a") as cut:
        cut.write('{"request_id": "cut')
    result = CliRunner().invoke(app, ["learn", str(log), "--policy", "predicted-latency", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert f"{file}: " in result.stdout
    assert f"gorgo: {log}: 1 line was cut off by a full disk or a killed process and is skipped\n" in result.stderr
    assert "held-out error, 96 outcomes against the 24 after them: TTFT " in result.stdout
    names = {line.split()[0] for line in result.stdout.splitlines()[3:]}
    policy = make_policy("predicted-latency")
    assert isinstance(policy, Learner)
    assert names == {"(none)", *policy.feature_names}


def test_a_policy_that_does_not_learn_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["learn", "log", "--policy", "random", "--out", str(tmp_path / "model.npz")])
    assert result.exit_code == 2
    assert f"--policy random: does not learn; expected one of {', '.join(LEARNERS)}" in result.stderr
