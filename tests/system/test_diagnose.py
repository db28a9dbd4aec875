"""`gorgo diagnose` on two vLLM on the CPU: healthy ones have no finding, and a seeded fault is named."""

from __future__ import annotations

from pathlib import Path

import httpx

from gorgo.cli.diagnosis import diagnose
from tests.cli.diagnose.lab import gathered
from tests.system.vllm_server import VllmServer


def test_two_healthy_vllm_have_no_finding(vllm_servers: tuple[VllmServer, VllmServer], tmp_path: Path) -> None:
    urls = {name: one.url for name, one in zip(("left", "right"), vllm_servers, strict=True)}
    for url in urls.values():  # its first request compiles kernels, for longer than a probe waits
        first = {"model": "tiny", "prompt": "One.", "max_tokens": 8}
        httpx.post(f"{url}/v1/completions", json=first, timeout=120).raise_for_status()
    found = gathered(tmp_path, urls)
    assert diagnose(found.evidence) == []
    assert found.tokens <= 50
    left, _ = found.evidence.replicas
    assert left.found_engine == "vllm"
    assert left.probe is not None
    assert left.probe.cached_tokens_cold == 0
    assert (left.probe.cached_tokens_warm or 0) > 0.5 * (left.probe.prompt_tokens or 0)


def test_one_vllm_under_two_names_is_named(vllm_servers: tuple[VllmServer, VllmServer], tmp_path: Path) -> None:
    url = vllm_servers[0].url
    found = gathered(tmp_path, {"left": url, "right": url.replace("127.0.0.1", "localhost")})
    assert [finding.fault for finding in diagnose(found.evidence)] == ["one-engine-twice"]
