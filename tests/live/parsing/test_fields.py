"""Which bodies are read here, and that it makes no difference to what is read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gorgo.core.json_cost import QUICK_VALUES, TINY_BYTES
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.http.errors import HttpError
from gorgo.live.parsing.fields import UNCOUNTED_BYTES, read_fields, read_quick_fields

FINGERPRINTER = Fingerprinter(key=7)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: More values than another process is spared for, in a text that is long enough to be counted.
NUMBERS = [0] * (2 * QUICK_VALUES)


def chat(*texts: str, **more: Any) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a, b [c] {d}" * 4000)),
        (CHAT, chat(*["é, " * 100] * 60)),
        (CHAT, chat("a" * TINY_BYTES, logit_bias=NUMBERS)),
        (COMPLETIONS, json.dumps({"model": "m", "prompt": "a, " * 20_000, "stream": True}).encode()),
    ],
)
def test_texts_are_read_here_and_as_ever_whatever_they_and_other_fields_have(route: str, body: bytes) -> None:
    assert TINY_BYTES < len(body) <= UNCOUNTED_BYTES
    found, known = read_quick_fields(route, body, FINGERPRINTER), read_fields(route, body, FINGERPRINTER)
    assert found is not None
    assert found.values == known.values
    assert found.prompt == known.prompt
    assert found.tokens is known.tokens is None
    assert np.array_equal(found.sketch.sums, known.sketch.sums)
    assert found.sketch.message_ends == known.sketch.message_ends


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat("a", tools=NUMBERS)),
        (CHAT, chat("a", functions=NUMBERS)),
        (CHAT, chat("a" * UNCOUNTED_BYTES, tools=NUMBERS)),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"text": ""}] * 6000}]}).encode()),
        (CHAT, json.dumps({"messages": NUMBERS}).encode()),
        (COMPLETIONS, json.dumps({"prompt": NUMBERS}).encode()),
        (CHAT, b"[" + b"NaN," * (QUICK_VALUES + 1)),
    ],
)
def test_many_values_that_would_be_read_are_left_to_another_process(route: str, body: bytes) -> None:
    assert read_quick_fields(route, body, FINGERPRINTER) is None


@pytest.mark.parametrize("body", [chat("a" * TINY_BYTES)[:-1], b"[" + b" " * TINY_BYTES + b"]", b'{"messages":[]}'])
def test_what_is_no_request_is_refused_in_the_same_words(body: bytes) -> None:
    with pytest.raises(HttpError) as known:
        read_fields(CHAT, body, FINGERPRINTER)
    with pytest.raises(HttpError) as found:
        read_quick_fields(CHAT, body, FINGERPRINTER)
    assert (found.value.status, found.value.message) == (known.value.status, known.value.message)
