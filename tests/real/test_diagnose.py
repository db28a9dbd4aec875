"""`gorgo diagnose` on two servers of llama.cpp: healthy ones have no finding, and a seeded fault is named."""

from __future__ import annotations

from pathlib import Path

from gorgo.cli.diagnosis import diagnose
from tests.cli.diagnose.lab import gathered
from tests.real.llama_server import LlamaServer


def test_healthy_servers_have_no_finding(llama_servers: tuple[LlamaServer, LlamaServer], tmp_path: Path) -> None:
    found = gathered(tmp_path, {name: one.url for name, one in zip(("left", "right"), llama_servers, strict=True)})
    assert diagnose(found.evidence) == []
    assert found.tokens <= 50
    left, _ = found.evidence.replicas
    assert left.found_engine == "llamacpp"
    assert left.probe is not None
    assert left.probe.cached_tokens_cold == 0
    assert (left.probe.cached_tokens_warm or 0) > 0.5 * (left.probe.prompt_tokens or 0)


def test_one_server_under_two_names_and_another_kind_are_named(
    llama_servers: tuple[LlamaServer, LlamaServer], tmp_path: Path
) -> None:
    url = llama_servers[0].url
    found = gathered(tmp_path, {"left": url, "right": url.replace("127.0.0.1", "localhost")})
    assert [finding.fault for finding in diagnose(found.evidence)] == ["one-engine-twice"]
    found = gathered(tmp_path, {"left": url}, engine="vllm")
    assert [finding.fault for finding in diagnose(found.evidence)] == ["wrong-engine-kind"]
