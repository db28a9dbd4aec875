"""Engines as the proxy has learned them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gorgo.errors import TunerError
from gorgo.lab.sim.engine.profiles import find_profile
from tests.tuner.offline.small import fitted_fleet
from tuner.offline import calibrated
from tuner.offline.calibration import MAX_BYTES, read_fleet

#: What the Router assumes of an engine of which it is told nothing.
PRIOR = find_profile("2xL40S-Qwen3.5-35B-A3B-FP8-estimate")


def test_what_was_learned_replaces_the_profile_and_what_was_not_stays() -> None:
    before = fitted_fleet()
    told = {
        "replicas": [
            {"name": "us-ashburn-0", "prefill_slowdown": 2.0, "rtt_ms": 5.0, "kv_capacity_tokens": 1000.0},
            {"name": "ap-seoul-0", "prefill_slowdown": 1.0, "rtt_ms": None},
        ]
    }
    near, middle, far = calibrated(before, told, source="fleet.json").replicas
    assert near.profile.prefill_s(1000, 0.0) == pytest.approx(2 * PRIOR.prefill_s(1000, 0.0))
    assert (near.link.rtt_s, near.profile.kv_tokens) == (0.005, 1000)
    assert middle == before.replicas[1]
    assert far.link == before.replicas[2].link
    assert near.spec == before.replicas[0].spec


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "replicas: expected a list"),
        (
            {"replicas": [{"name": "elsewhere"}]},
            "^fleet.json: names none of the replicas of the configuration: us-ashburn-0, .*, ap-seoul-0$",
        ),
        ({"replicas": [{"name": "us-ashburn-0", "rtt_ms": -1}]}, "rtt_ms is -1; expected a number above 0"),
    ],
)
def test_an_answer_of_something_else_is_named(told: dict[str, object], words: str) -> None:
    with pytest.raises(TunerError, match=words):
        calibrated(fitted_fleet(), told, source="fleet.json")


def test_a_saved_answer_is_read_and_anything_else_refused(tmp_path: Path) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps({"replicas": []}))
    assert read_fleet(tmp_path / "fleet.json") == {"replicas": []}
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(TunerError, match="expected what GET /admin/fleet answers"):
        read_fleet(tmp_path / "other.json")
    with pytest.raises(TunerError, match="cannot be read"):
        read_fleet(tmp_path / "missing.json")


def test_a_saved_answer_has_at_most_sixteen_mebibytes(tmp_path: Path) -> None:
    assert MAX_BYTES == 16 * 1024 * 1024
    path = tmp_path / "fleet.json"
    path.write_bytes(b"{}".ljust(MAX_BYTES))
    assert read_fleet(path) == {}
    path.write_bytes(b"{}".ljust(MAX_BYTES + 1))
    with pytest.raises(TunerError, match=f"{path}: expected .*at most {MAX_BYTES} bytes"):
        read_fleet(path)
