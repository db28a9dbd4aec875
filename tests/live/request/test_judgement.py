"""What is read of an engine's failure: Retry-After, in seconds or as a date, and its own text."""

from __future__ import annotations

import json
from email.utils import formatdate
from time import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.live.request.parse import TEXT_CHARS, engine_text, failure_of

DATE = (b"Date", b"Wed, 21 Oct 2026 07:28:00 GMT")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"120", 120.0),
        (b"Wed, 21 Oct 2026 07:29:30 GMT", 90.0),
        (b"Wednesday, 21-Oct-26 07:28:01 GMT", 1.0),
        (b"Wed Oct 21 07:28:05 2026", 5.0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"soon", None),
        (b"-1", None),
        (b"1" * 10, None),
        (b"Wed, 99 Oct 2026 99:99:99 GMT", None),
        (b"Wed, 21 Oct 99999 07:28:00 GMT", None),
        (b"\xff" * 29, None),
        (b"Wed, 21 Oct 2026 07:29:30 GMT" * 100, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_after_the_replicas_own(value: bytes, seconds: float | None) -> None:
    failure = failure_of(429, [DATE, (b"Retry-After", value)])
    assert failure is not None
    assert failure.retry_after_s == seconds


def test_a_date_of_a_replica_without_one_of_its_own_counts_from_this_clock() -> None:
    later = formatdate(time() + 60, usegmt=True).encode()
    failure = failure_of(503, [(b"retry-after", later)])
    assert failure is not None
    assert failure.retry_after_s is not None
    assert 50 < failure.retry_after_s <= 60


ASKED = json.dumps(
    {
        "model": "qwen",
        "messages": [
            {"role": "user", "content": "My PIN is 4711, and my name\nis Zoe"},
            {"role": "user", "content": "Zoe!"},
        ],
    }
).encode()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b'{"error": {"message": "CUDA out of memory", "code": 500}}', "CUDA out of memory"),
        (b'{"object": "error", "message": "EngineDeadError"}', "EngineDeadError"),
        (b'{"detail": "no worker"}', "no worker"),
        (b'{"error": "no worker"}', "no worker"),
        (b'data: {"error": {"message": "no worker"}}\n\ndata: [DONE]\n\n', "no worker"),
        (b"no worker\nTraceback: more", "no worker"),
        (b"no\tworker  here\x1b[2J\x00", "no worker here?[2J?"),
        (b'{"error": {"message": "bad\\u0007 bell"}}', "bad? bell"),
        (b'{"error": {"message": "cannot serve my pin is 4711 today"}}', "cannot serve [...] today"),
        (b'{"error": {"message": "failed: Zoe! is odd"}}', "failed: [...] is odd"),
        (
            b'{"error": {"message": "batch of [\'a prompt of another client that is long\'] failed"}}',
            "batch of [...] failed",
        ),
        (b'{"error": {"message": "\\"a prompt of another client that is long enough\\" failed"}}', "[...] failed"),
        (b"x" * 500, "x" * 237 + "..."),
        (b"<html>bad gateway</html>", None),
        (b'{"error": {"message": 3}}', None),
        (b'{"error": {"message": ""}}', None),
        (b'{"half": ', None),
        (b"\xff\xfe\x00", "???"),
        (b"", None),
        (b"[" * 16000, None),
    ],
)
def test_engine_s_own_text_is_bounded_cleaned_and_without_any_of_the_prompt(answer: bytes, text: str | None) -> None:
    found = engine_text(answer, ASKED)
    assert found == text or (found is not None and text == "???" and found.isprintable())
    assert found is None or (len(found) <= TEXT_CHARS and "4711" not in found and "Zoe" not in found)


@pytest.mark.parametrize("request_body", [b"", b"no JSON", b'{"messages": "' + b"x" * 300_000 + b'"}'])
def test_engine_s_text_is_not_shown_where_the_prompt_is_not_known(request_body: bytes) -> None:
    assert engine_text(b'{"error": {"message": "CUDA out of memory"}}', request_body) is None


@given(st.text(min_size=12, max_size=300), st.text(max_size=40), st.text(max_size=40))
def test_no_twelve_characters_of_a_prompt_come_back(prompt: str, before: str, after: str) -> None:
    asked = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    found = engine_text(json.dumps({"error": {"message": f"{before}{prompt}{after}"}}).encode(), asked) or ""
    assert not [n for n in range(len(prompt) - 11) if prompt[n : n + 12] in found and "[...]" not in prompt]
