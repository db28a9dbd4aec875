"""What the commands make of an answer that is not a proxy's of this version: words, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from gorgo.cli import app
from tests.live.admin.page.made import status

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


A, B, C = "http://a:9090", "http://b:9090", "http://c:9090"
ALL = ["--url", A, "--url", B, "--url", C]


class Fleet:
    """Proxies by address, each with weights and a freeze; those of `down` do not answer."""

    def __init__(self) -> None:
        self.weights = {url: {"w_rtt": 0.5, "w_queue": 0.1} for url in (A, B, C)}
        self.frozen: dict[str, dict[str, Any] | None] = dict.fromkeys(self.weights)
        self.bodies: list[dict[str, Any]] = []
        self.down: set[str] = set()
        self.volatile: set[str] = set()

    def request(self, method: str, address: str, *, json: dict[str, Any] | None, **_: Any) -> httpx.Response:
        url = next(url for url in self.weights if address.startswith(url))
        if url in self.down:
            raise httpx.ConnectError("connection refused")
        if address.endswith("/admin/model"):
            return httpx.Response(404)
        return httpx.Response(200, json=self.answer(method, url, address.removeprefix(url), json or {}))

    def answer(self, method: str, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/admin/status":
            shown: dict[str, Any] = status().as_dict()
            routing = {"policy": "gorgo", "weights": self.weights[url], "frozen": self.frozen[url]}
            return shown | {"routing": shown["routing"] | routing}
        assert (method, path) in (("POST", "/admin/freeze"), ("POST", "/admin/unfreeze"))
        self.bodies.append(body)
        self.weights[url] = body.get("weights") or self.weights[url]
        if self.frozen[url] is None:
            self.frozen[url] = {"since": "now", "by": body["by"], "reason": body["reason"]}
        if path == "/admin/unfreeze":
            self.frozen[url] = None
        shown = {"policy": "gorgo", "version": 1, "weights": self.weights[url], "frozen": self.frozen[url]}
        return shown | {"out_of_range": [], "durable": url not in self.volatile}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()
    monkeypatch.setattr(httpx, "request", fleet.request)
    monkeypatch.setenv("LOGNAME", "eve")
    return fleet


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_freeze_gives_all_proxies_the_weights_of_the_first(fleet: Fleet) -> None:
    fleet.weights[B] = {"w_rtt": 0.7, "w_queue": 0.1}  # put by a tuner between two calls
    result = run("freeze", *ALL, "--reason", "held-out week")
    assert result.exit_code == 0, result.output
    assert fleet.weights[A] == fleet.weights[B] == fleet.weights[C]
    assert "weights" not in fleet.bodies[0], "those in force"
    assert fleet.bodies[1]["policy"] == "gorgo"
    frozen = "policy gorgo w_rtt=0.5 w_queue=0.1, version 1, frozen since now by eve: held-out week"
    assert result.stdout.splitlines() == [f"{url}: {frozen}" for url in (A, B, C)]


def test_weights_of_a_file_go_to_all_and_are_exported_once(fleet: Fleet, tmp_path: Path) -> None:
    file, out = tmp_path / "found.json", tmp_path / "out.json"
    file.write_text(json.dumps({"gorgo_weights": 1, "policy": "gorgo", "weights": {"w_rtt": 0.2, "w_queue": 0.3}}))
    result = run("freeze", *ALL, "--weights", str(file), "--export", str(out))
    assert result.exit_code == 0, result.output
    assert [body["weights"] for body in fleet.bodies] == [{"w_rtt": 0.2, "w_queue": 0.3}] * 3
    assert json.loads(out.read_text())["weights"] == {"w_rtt": 0.2, "w_queue": 0.3}


@pytest.mark.parametrize("down", [A, B])
def test_a_proxy_without_an_answer_keeps_the_others_from_nothing_and_is_named(fleet: Fleet, down: str) -> None:
    fleet.down = {down}
    result = run("freeze", *ALL)
    assert result.exit_code == 1
    assert [url for url in fleet.frozen if fleet.frozen[url]] == [url for url in (A, B, C) if url != down]
    said = result.stderr.splitlines()
    assert said[0].startswith(f"gorgo: {down}/admin/freeze: connection refused")
    assert said[1:] == ["gorgo: 1 of 3 proxies failed; the command can be repeated"]
    fleet.down = set()
    assert run("freeze", *ALL).exit_code == 0
    assert all(fleet.frozen.values())


def test_a_freeze_of_what_is_frozen_says_that_its_reason_was_not_taken(fleet: Fleet) -> None:
    assert run("freeze", "--url", B, "--reason", "before").exit_code == 0
    result = run("freeze", *ALL, "--reason", "after")
    assert result.exit_code == 0
    assert result.stderr == (
        f"gorgo: {B} was frozen before with these weights: its freeze stays, and this reason was not taken\n"
    )
    assert fleet.frozen[B] == {"since": "now", "by": "eve", "reason": "before"}
    assert run("freeze", "--url", B).stderr == "", "no reason was given"


def test_a_freeze_that_ends_with_its_process_names_the_proxy(fleet: Fleet) -> None:
    fleet.volatile = {B}
    said = run("freeze", *ALL).stderr
    assert said == f"gorgo: {B} runs without --state: the freeze ends with its process\n"


def test_an_unfreeze_reaches_all(fleet: Fleet) -> None:
    assert run("freeze", *ALL).exit_code == 0
    result = run("unfreeze", *ALL, "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)) == [A, B, C]
    assert not any(fleet.frozen.values())


def test_the_status_of_several_proxies_ends_with_what_differs(fleet: Fleet) -> None:
    same = run("status", *ALL)
    assert same.exit_code == 0, same.output
    lines = same.stdout.splitlines()
    assert [line for line in lines if line.startswith("http")] == [f"{url}:" for url in (A, B, C)]
    assert lines[-1] == "3 proxies: the same weights, not frozen"
    assert run("freeze", "--url", B).exit_code == 0
    fleet.weights[C] = {"w_rtt": 0.7, "w_queue": 0.1}
    differing = run("status", *ALL).stdout.splitlines()[-1]
    assert differing == f"3 proxies: ! other weights at {C} than at {A}, ! frozen at {B} alone"
    assert list(json.loads(run("status", *ALL, "--json").stdout)) == [A, B, C]


def test_a_status_with_one_proxy_down_shows_the_others_and_fails(fleet: Fleet) -> None:
    fleet.down = {A}
    result = run("status", *ALL)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "2 proxies: the same weights, not frozen"
    assert f"{A}/admin/status: connection refused" in result.stderr
    fleet.down = {A, B, C}
    none = run("status", *ALL, "--json")
    assert (none.exit_code, none.stdout) == (1, "")


def test_one_proxy_at_a_time_is_watched() -> None:
    refused = run("status", "--watch", *ALL)
    assert refused.exit_code == 2
    assert "--watch: expected one --url" in " ".join(refused.stderr.replace("│", " ").split())
