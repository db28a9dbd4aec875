from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gorgo.cli import app

COLUMNS = ["rank", "n", "mean ms", "p50 ms", "p95 ms"]


def sample(seq: int) -> dict[str, Any]:
    rank = 1 + seq % 3
    return {"seq": seq, "policy": "random", "shadow_policy": "gorgo-ms", "shadow_rank": rank, "ttft_ms": 100.0 * rank}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(sample(seq)) + "\n" for seq in range(30)))
    return path


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["rank", *map(str, words)])


def test_a_file_becomes_a_table_and_a_sentence(log: Path) -> None:
    result = run(log)
    assert result.exit_code == 0, result.output
    header, *rows, words = result.stdout.splitlines()
    assert header.split("  ")[0] == "rank"
    assert [line.split() for line in rows] == [[str(rank), "10", *[f"{rank}00.0"] * 3] for rank in (1, 2, 3)]
    assert words.startswith("30 requests routed by random (30), ranked by gorgo-ms")
    assert "Spearman's rho 1.000" in words


def test_json_has_the_same_figures(log: Path) -> None:
    found = json.loads(run(log, "--json").stdout)
    assert (found["n"], found["rho"], found["shadow"]) == (30, 1.0, "gorgo-ms")
    assert found["rows"][1] == {"rank": 2, "n": 10, "ttft_ms_mean": 200.0, "ttft_ms_p50": 200.0, "ttft_ms_p95": 200.0}


def test_a_log_without_ranks_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"ttft_ms": 5}\n')
    result = run(path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no request with a rank among 1; is proxy.shadow_policy set?" in result.stderr


class Proxy:
    """Answers pages of two samples, and one more whenever it is asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[str] = []
        self.boots = ["boot"]

    def __call__(self, method: str, url: str, path: str, token: str | None, body: object = None) -> dict[str, Any]:
        assert (method, url, token, body) == ("GET", "http://proxy", "secret", None)
        self.asked.append(path)
        after = int(path.split("after=")[1])
        found = [sample(seq) for seq in range(after + 1, min(after + 3, self.count + 1))]
        page = {"boot_id": self.boots.pop(0) if len(self.boots) > 1 else self.boots[0], "first_seq": 1}
        self.count += 1
        return page | {"last_seq": self.count - 1, "samples": found}


def live(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> Any:
    monkeypatch.setattr("gorgo.cli.admin.call.call_admin", proxy)
    monkeypatch.setenv("GORGO_ADMIN_TOKEN", "secret")
    return run("--url", "http://proxy", "--json")


@pytest.mark.parametrize(
    ("count", "asked", "n"), [(5, ["0", "2", "4"], 6), (4, ["0", "2"], 4), (1, ["0"], 1), (2, ["0"], 2)]
)
def test_a_proxy_is_read_by_pages_up_to_what_it_had_when_first_asked(
    count: int, asked: list[str], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(count)
    result = live(monkeypatch, proxy)
    assert result.exit_code == 0, result.output
    assert [path.split("=")[1] for path in proxy.asked] == asked
    assert json.loads(result.stdout)["n"] == n


def test_a_proxy_that_starts_again_meanwhile_is_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(5)
    proxy.boots = ["boot", "another"]
    result = live(monkeypatch, proxy)
    assert result.exit_code == 1
    assert "restarted during the reading" in result.stderr


class Endless(Proxy):
    """Has more samples than a reader takes, two to a page."""

    def __init__(self) -> None:
        super().__init__(1000)


def test_a_proxy_with_a_larger_ring_is_read_for_a_hundred_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Endless()
    result = live(monkeypatch, proxy)
    assert result.exit_code == 0, result.output
    # The page after the last is asked for, and left.
    assert [path.split("=")[1] for path in proxy.asked] == [str(2 * page) for page in range(101)]
    assert json.loads(result.stdout)["n"] == 200
