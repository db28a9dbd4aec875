"""What the commands make of an answer that is not a proxy's of this version: words, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from gorgo.cli import app

LEFT_OUT = "left out"
PINNED = {
    "policy": "gorgo",
    "weights": {},
    "version": 1,
    "out_of_range": [],
    "durable": True,
    "frozen": {"since": "now", "by": None, "reason": None},
}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what every call gets."""

    def answer(text: str | bytes) -> None:
        content = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(200, content=content))

    return answer


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["status", "--json"],
        ["freeze"],
        ["freeze", "--json"],
        ["unfreeze"],
        ["rank"],
        ["drain", "a"],
        ["set", "m_rtt=1"],
        ["policy"],
        ["policy", "gorgo"],
        ["explain"],
        ["explain", "id", "--json"],
        ["reload"],
    ],
    ids=" ".join,
)
def test_other_answer_is_reported_with_the_question_whether_it_is_the_address(answered: Any, words: list[str]) -> None:
    for text in ('{"a": NaN}', "[]", "[" * 100_000, b"\xff"):
        answered(text)
        result = CliRunner().invoke(app, [*words, "--url", "http://127.0.0.1:9090"])
        assert (result.exit_code, result.stdout) == (1, ""), text[:9]
        assert result.stderr.startswith("gorgo: http://127.0.0.1:9090")
        assert "?" in result.stderr


@pytest.mark.parametrize(
    "wrong",
    [{"weights": []}, {"weights": {"w": "x"}}, {"durable": LEFT_OUT}, {"frozen": None}, {"out_of_range": LEFT_OUT}],
)
def test_what_cannot_be_exported_leaves_no_file(answered: Any, tmp_path: Path, wrong: Mapping[str, Any]) -> None:
    answered(json.dumps({key: value for key, value in {**PINNED, **wrong}.items() if value != LEFT_OUT}))
    result = CliRunner().invoke(app, ["freeze", "--export", str(tmp_path / "found.json")])
    assert result.exit_code == 1
    assert "unexpected answer" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("samples", [None, 5, [1], ["x"], [{}], [{"seq": "x"}]])
def test_samples_that_are_none_are_told(answered: Any, samples: Any) -> None:
    answered(json.dumps({"boot_id": "b", "last_seq": 9, "samples": samples}))
    result = CliRunner().invoke(app, ["rank"])
    assert result.exit_code == 1
    assert "unexpected answer" in result.stderr
