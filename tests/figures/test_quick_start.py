"""The quick start as it is typed for its stored result."""

from __future__ import annotations

from tests.figures.quick_start import READY, steps


def test_quick_start_is_the_readmes_without_installing_and_waits_before_the_replay() -> None:
    before, wait, replay = (step.typed.splitlines() for step in steps())
    assert [line.split()[1] for line in before if line.startswith("gorgo")] == ["check", *["engine"] * 3, "serve"]
    assert any(line.startswith("export GORGO_ADMIN_TOKEN=") for line in before)
    assert wait == READY.splitlines()
    assert replay == ["gorgo replay chat-small --limit 50 --url http://127.0.0.1:8080 2> /dev/null"]
