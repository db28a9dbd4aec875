from __future__ import annotations

import pytest

from gorgo.apps.engine_server.text import cache_key, token_count
from gorgo.core.prompt.simulated_tokens import simulated_tokens


@pytest.mark.parametrize("text", [b"", b"a", b"abcd", b"abcde", "Grüße 東京".encode()])
def test_tokens_are_those_that_a_simulated_engine_caches(text: bytes) -> None:
    assert simulated_tokens(text) == cache_key(text)
    assert simulated_tokens(text, "sql") == cache_key(text, "sql") != cache_key(text, "other")
    assert len(simulated_tokens(text)) == 4 * token_count(text)
