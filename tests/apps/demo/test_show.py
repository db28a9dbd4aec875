from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from gorgo.apps.demo import show_demo
from tests.apps.test_results import row


def shown(*policies: str, out: Path | None = None) -> str:
    text = io.StringIO()
    show_demo([row(policy) for policy in policies], Console(file=text, width=20), out=out)
    return text.getvalue()


def test_the_end_says_that_engines_are_simulated_and_where_to_look_next() -> None:
    text = shown("gorgo", "random")
    assert "The proxy is real; engines and round trips are simulated" in text
    assert "gorgo demo --trace" in text
    assert "…" not in text


def test_what_is_kept_is_named() -> None:
    assert "runs/one: results.json" in shown("gorgo", out=Path("runs/one"))
    assert "gorgo report runs/one  " in shown("gorgo", out=Path("runs/one"))
    assert "results.json" not in shown("gorgo")


def test_no_policy_at_all_is_no_error() -> None:
    assert "Where to look next" in shown()
