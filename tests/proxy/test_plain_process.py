"""`gorgo serve --plain` as a process in which httptools and uvloop cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.proxy.fakes import DONE, ROLE, answer, chat, delta, running, stream
from tests.proxy.served import environ, served

#: What Python runs: `gorgo`, without the two.
WITHOUT = "import sys; sys.modules['httptools'] = sys.modules['uvloop'] = None; from gorgo.cli import main; main()"
REGIONS = """
proxy: {{region: here, policy: round-robin}}
regions: [{{name: here}}]
replicas: [{{name: r0, region: here, url: "{url}", engine: sglang}}]
"""


async def test_plain_serves_answers_and_streams_without_httptools_and_uvloop(tmp_path: Path) -> None:
    chunks = (ROLE, delta("one"), delta("two"), DONE)
    async with running(answer(200, b'{"choices": [{"message": {"content": "hi"}}]}'), stream(*chunks)) as replica:
        (tmp_path / "regions.yaml").write_text(REGIONS.format(url=replica.url))
        async with served(tmp_path, "--plain", program=("-c", WITHOUT)) as proxy:
            whole = await proxy.client.post("/v1/chat/completions", content=chat())
            streamed = await proxy.client.post("/v1/chat/completions", content=chat(stream=True))
            weights = await proxy.weights()
            proxy.process.terminate()
            assert await proxy.process.wait() == 0
    assert (whole.status_code, whole.content) == (200, b'{"choices": [{"message": {"content": "hi"}}]}')
    assert (streamed.status_code, streamed.content) == (200, b"".join(chunks))
    assert whole.headers["x-gorgo-replica"] == "r0"
    assert weights["policy"] == "round-robin"
    assert [seen.body for seen in replica.seen] == [chat(), chat(stream=True)]


def test_without_them_and_without_plain_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "regions.yaml").write_text(REGIONS.format(url="http://127.0.0.1:9"))
    command = (sys.executable, "-c", WITHOUT, "serve", "--config", str(tmp_path / "regions.yaml"))
    found = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=30, check=False)
    assert found.returncode == 2
    assert "httptools" in found.stderr
    assert "gorgo serve --plain" in found.stderr
