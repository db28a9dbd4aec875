"""Reports that a replica does not make: said once, with the flag that turns each on, and never of one that is away."""

from __future__ import annotations

import pytest

from gorgo.core.messages.request import EngineSample
from gorgo.engines.base import OpenAI
from gorgo.engines.registry import DIALECTS, dialect
from gorgo.live.upstream.target import MissingReport, Report, ReportState, ReportWatch

LOAD = EngineSample(running_requests=0.0)


def watch(name: str = "sglang") -> ReportWatch:
    return ReportWatch(dialect(name))


def silent_answers(watching: ReportWatch, count: int, *, estimated_tokens: float = 64.0) -> list[MissingReport]:
    found = [watching.on_answer(cached_tokens=None, estimated_tokens=estimated_tokens) for _ in range(count)]
    return [missing for missing in found if missing is not None]


@pytest.mark.parametrize(
    ("name", "flag"),
    [("sglang", "--enable-cache-report"), ("vllm", "--enable-prompt-tokens-details"), ("openai", None)],
)
def test_cached_tokens_that_never_come_are_missed_with_the_engines_flag(name: str, flag: str | None) -> None:
    (missing,) = silent_answers(watch(name), 20)
    assert (missing.report, missing.flag) == (Report.CACHED_TOKENS, flag)
    assert (flag or "no flag") in missing.advice


@pytest.mark.parametrize(("name", "flag"), [("sglang", "--enable-metrics"), ("llamacpp", "--metrics")])
def test_a_metrics_route_that_is_not_there_is_missed_with_the_engines_flag(name: str, flag: str) -> None:
    missing = watch(name).on_scrape(404, None)
    assert missing is not None
    assert (missing.report, missing.flag) == (Report.METRICS, flag)


def test_llama_cpp_without_its_flag_answers_501_and_is_missed() -> None:
    assert watch("llamacpp").on_scrape(501, None) is not None


def test_metrics_without_a_known_name_are_as_good_as_none() -> None:
    assert watch().on_scrape(200, EngineSample()) is not None


@pytest.mark.parametrize("status", [None, 429, 500, 502, 503, 504])
def test_an_engine_that_is_away_or_ill_says_nothing_of_its_reports(status: int | None) -> None:
    watching = watch()
    assert watching.on_scrape(status, None) is None
    assert watching.states[Report.METRICS] is ReportState.UNKNOWN


def test_what_is_missing_is_said_once() -> None:
    watching = watch()
    assert len(silent_answers(watching, 100)) == 1
    assert [watching.on_scrape(404, None) is not None for _ in range(3)] == [True, False, False]


def test_answers_in_which_nothing_was_cached_prove_nothing() -> None:
    watching = watch()
    assert not silent_answers(watching, 100, estimated_tokens=0.0)
    assert watching.states[Report.CACHED_TOKENS] is ReportState.UNKNOWN


def test_one_report_ends_the_silence() -> None:
    watching = watch()
    assert not silent_answers(watching, 4)
    watching.on_answer(cached_tokens=0, estimated_tokens=64.0)
    assert not silent_answers(watching, 4)
    assert watching.states[Report.CACHED_TOKENS] is ReportState.REPORTED


def test_an_engine_restarted_with_its_flag_is_no_longer_shown_as_silent() -> None:
    watching = watch()
    silent_answers(watching, 5)
    assert watching.as_dict()["cached_tokens"] == "missing"
    watching.on_answer(cached_tokens=128, estimated_tokens=64.0)
    watching.on_scrape(200, LOAD)
    assert watching.as_dict() == {"cached_tokens": "reported", "metrics": "reported"}


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_advice_is_one_sentence_that_names_engine_and_report(name: str) -> None:
    (missing,) = silent_answers(watch(name), 5)
    assert missing.advice.startswith(f"{name} does not report cached_tokens: ")
    assert "\n" not in missing.advice


def test_metrics_that_nobody_expects_are_not_missed() -> None:
    watch = ReportWatch(OpenAI())
    assert watch.on_scrape(404, None) is None
    assert watch.as_dict() == {"cached_tokens": "unknown", "metrics": "unknown"}
