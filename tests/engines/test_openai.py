"""A server of which only the API is known."""

from __future__ import annotations

from gorgo.engines.base import ReportWatch
from gorgo.engines.openai import OpenAI


def test_nothing_but_the_api_is_asked_for() -> None:
    assert OpenAI().probe_path == "/v1/models"
    assert OpenAI().metrics_path is None
    assert OpenAI().loads_path is None


def test_metrics_that_nobody_expects_are_not_missed() -> None:
    watch = ReportWatch(OpenAI())
    assert watch.on_scrape(404, None) is None
    assert watch.as_dict() == {"cached_tokens": "unknown", "metrics": "unknown"}
