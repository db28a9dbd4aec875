"""Causes of failed requests, from errors as engines, the proxy, the simulator and the client write them."""

from __future__ import annotations

import pytest

from gorgo.errors import BadRequest
from gorgo.lab.failures import MAX_CAUSES, OTHER, cause_of, count_cause, failure_lines
from gorgo.lab.sim.engine.profiles import PROFILES

PROFILE = next(iter(PROFILES.values()))


def refusal(prompt_tokens: int, output_tokens: int) -> str:
    with pytest.raises(BadRequest) as refused:
        PROFILE.check_size(prompt_tokens, output_tokens)
    return str(refused.value)


@pytest.mark.parametrize("before", ["", 'http 400: {"error": {"message": "'])
def test_a_prompt_over_the_engines_context_is_one_cause_whatever_its_length(before: str) -> None:
    causes = {cause_of(before + refusal(tokens, 1)) for tokens in (33_000, 100_000)}
    assert causes == {"prompt over the engine's 32,768 tokens"}
    assert cause_of(before + refusal(32_000, 5_000)) == "prompt and answer over the engine's 32,768 tokens"


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (
            'http 400: {"error":{"message":"This model\'s maximum context length is 8192 tokens. However, you',
            "prompt and answer over the engine's 8,192 tokens",
            "--max-input",
        ),
        ("9 tokens do not fit the KV pool of 8 tokens.", "over the engine's KV pool of 8 tokens", "--max-input"),
        ("queue_full", "queue of the proxy full", "--load"),
        ('http 429: {"error": {"message": "", "code": "deadline_unreachable"}}', "deadline unreachable", "--load"),
        ("http 429: slow down", "refused for load (429)", "--load"),
        ("http 503: no", "HTTP 503", "gorgo status"),
        ('http 503: {"error": {"code": "no_replica"}}', "no replica could take the request", "gorgo status"),
        ("http 401: no", "key refused", "GORGO_API_KEY"),
        ('http 404: {"error": {"code": "model_not_found"}}', "unknown model", "--model"),
        ("timeout: not complete after 600 s", "no answer in time", "--load"),
        ("timeout", "no answer in time", "--load"),
        ("upstream_timeout", "no answer in time", "--load"),
        ("ClientConnectorError: Cannot connect to host", "connection refused", "is the router up?"),
        ("disconnected", "connection broken", ""),
        ("truncated: the stream ended without [DONE]", "truncated", ""),
        ("no content: the stream ended without any", "no content", ""),
        ("x" * 100, "x" * 80, ""),
    ],
)
def test_an_error_has_its_cause_and_the_cause_its_remedy(error: str, cause: str, remedy: str) -> None:
    assert cause_of(error) == cause
    (line,) = failure_lines({cause: 141}, 1500)
    assert line.startswith(f"141 of 1,500: {cause}")
    assert remedy in line
    assert ("; " in line) == bool(remedy)


def test_the_most_frequent_cause_comes_first() -> None:
    assert [line.split(" of")[0] for line in failure_lines({"a": 1, "b": 7, "c": 7}, 20)] == ["7", "7", "1"]


def test_kinds_of_causes_are_bounded() -> None:
    counts: dict[str, int] = {}
    for number in range(MAX_CAUSES + 5):
        count_cause(counts, f"kind {number}: details")
    count_cause(counts, "kind 0: others")
    assert len(counts) == MAX_CAUSES + 1
    assert (counts[OTHER], counts["kind 0"]) == (5, 2)
