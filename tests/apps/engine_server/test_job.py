"""What a body asks of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.apps.engine_server.job import CHAT, COMPLETIONS, EMBEDDINGS, GENERATE, Job, read_job
from gorgo.errors import BadRequest


def read(route: str, **body: Any) -> Job:
    return read_job(route, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("route", "body", "job"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, Job(CHAT, b"hi", 128, False, False, None)),
        (COMPLETIONS, {"prompt": "hi"}, Job(COMPLETIONS, b"hi", 16, False, False, None)),
        (GENERATE, {"text": "hi"}, Job(GENERATE, b"hi", 128, False, False, None)),
        (EMBEDDINGS, {"input": "hi", "stream": True, "max_tokens": 9}, Job(EMBEDDINGS, b"hi", 1, False, False, None)),
        (
            COMPLETIONS,
            {"prompt": "hi", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, "rid": "r"},
            Job(COMPLETIONS, b"hi", 1, True, True, "r"),
        ),
        (
            GENERATE,
            {"text": "hi", "sampling_params": {"max_new_tokens": 5}},
            Job(GENERATE, b"hi", 5, False, False, None),
        ),
        # What `/generate` reads of its own parameters is read nowhere else.
        (GENERATE, {"text": "hi", "max_tokens": 5}, Job(GENERATE, b"hi", 128, False, False, None)),
        # The newer name goes first; null is no number.
        (
            COMPLETIONS,
            {"prompt": "", "max_tokens": 9, "max_completion_tokens": 5},
            Job(COMPLETIONS, b"", 5, False, False, None),
        ),
        (COMPLETIONS, {"prompt": "", "max_tokens": None}, Job(COMPLETIONS, b"", 16, False, False, None)),
        (COMPLETIONS, {"prompt": "", "stream": 1, "rid": ""}, Job(COMPLETIONS, b"", 16, False, False, None)),
        (COMPLETIONS, {"prompt": "", "rid": 7, "stream_options": None}, Job(COMPLETIONS, b"", 16, False, False, None)),
    ],
)
def test_a_body_is_read_as_sglang_reads_it(route: str, body: dict[str, Any], job: Job) -> None:
    found = read(route, **body)
    assert (found.route, found.output_tokens, found.stream) == (job.route, job.output_tokens, job.stream)
    assert (found.include_usage, found.rid) == (job.include_usage, job.rid)
    assert job.text in found.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens must be a whole number"),
        ({"stream_options": []}, "stream_options is not an object"),
    ],
)
def test_a_wrong_amount_is_named(body: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read(COMPLETIONS, prompt="hi", **body)


@pytest.mark.parametrize(("raw", "said"), [(b"[]", "not a JSON object"), (b"{", "not JSON"), (b"\xff", "not JSON")])
def test_a_body_that_is_no_object_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        read_job(CHAT, raw)
