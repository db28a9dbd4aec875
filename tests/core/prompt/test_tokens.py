""""""

from __future__ import annotations

import pytest

from gorgo.core.prompt.fingerprint import MAX_MODELS, BytesPerToken, simulated_tokens
from gorgo.lab.engine_server.text import cache_key, token_count


@pytest.mark.parametrize("text", [b"", b"a", b"abcd", b"abcde", "Grüße 東京".encode()])
def test_tokens_are_those_that_a_simulated_engine_caches(text: bytes) -> None:
    assert simulated_tokens(text) == cache_key(text)
    assert simulated_tokens(text, "sql") == cache_key(text, "sql") != cache_key(text, "other")
    assert len(simulated_tokens(text)) == 4 * token_count(text)


def test_unknown_model_has_the_prior() -> None:
    assert BytesPerToken().ratio("any") == 4.0


def test_ratio_comes_to_what_the_model_shows() -> None:
    ratios = BytesPerToken()
    for _ in range(100):
        ratios.learn("m", text_bytes=20_000, prompt_tokens=8_000)
    assert ratios.ratio("m") == pytest.approx(2.5, rel=0.01)
    assert ratios.ratio(None) == 4.0


def test_short_prompts_hardly_move_it() -> None:
    ratios = BytesPerToken()
    ratios.learn("m", text_bytes=5, prompt_tokens=5)
    assert ratios.ratio("m") == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(("text_bytes", "prompt_tokens"), [(16, 1000), (1_000_000, 10), (100, 0), (0, 50), (10, -1)])
def test_what_cannot_be_text_teaches_nothing(text_bytes: int, prompt_tokens: int) -> None:
    ratios = BytesPerToken()
    ratios.learn("m", text_bytes=text_bytes, prompt_tokens=prompt_tokens)
    assert ratios.ratio("m") == 4.0


@pytest.mark.parametrize(
    ("text_bytes", "ratio"),
    [(1_000, 2.5), (16_000, 10.0), (999, 4.0), (16_001, 4.0), (0, 4.0)],
)
def test_a_token_is_one_byte_at_least_and_sixteen_at_most(text_bytes: int, ratio: float) -> None:
    """A thousand tokens beside the prior's thousand at four bytes each."""
    ratios = BytesPerToken()
    ratios.learn("m", text_bytes=text_bytes, prompt_tokens=1_000)
    assert ratios.ratio("m") == ratio


def test_once_a_million_tokens_are_counted_all_of_them_count_half() -> None:
    """The prior's 1,000 at 4 bytes and 1,000,000 at 2 are halved; then 500,500 at 6 beside 500,500."""
    ratios = BytesPerToken()
    ratios.learn("m", text_bytes=2_000_000, prompt_tokens=1_000_000)
    before = ratios.ratio("m")
    assert before == pytest.approx(2_004_000 / 1_001_000)
    ratios.learn("m", text_bytes=3_003_000, prompt_tokens=500_500)
    assert ratios.ratio("m") == pytest.approx((before + 6.0) / 2)
    kept = BytesPerToken()
    kept.learn("m", text_bytes=1_998_000, prompt_tokens=999_000)
    kept.learn("m", text_bytes=8, prompt_tokens=1)
    assert kept.ratio("m") == pytest.approx(2_002_008 / 1_000_001, rel=1e-9), "a million exactly is not yet halved"


def test_old_prompts_fade() -> None:
    ratios = BytesPerToken()
    for text_bytes in [8_000] * 2_000 + [2_000] * 2_000:
        ratios.learn("m", text_bytes=text_bytes, prompt_tokens=1_000)
    assert 2.0 <= ratios.ratio("m") < 3.6


def test_least_recently_learned_model_is_forgotten() -> None:
    ratios = BytesPerToken()
    for number in range(MAX_MODELS + 1):
        ratios.learn(str(number), text_bytes=2_000, prompt_tokens=1_000)
    assert (ratios.ratio("0"), ratios.ratio("1")) == (4.0, 3.0)


def test_a_model_that_is_learned_again_is_not_the_next_to_be_forgotten() -> None:
    ratios = BytesPerToken()
    for number in [*range(MAX_MODELS), 0, MAX_MODELS]:
        ratios.learn(str(number), text_bytes=2_000, prompt_tokens=1_000)
    assert [ratios.ratio("0"), ratios.ratio("1")] == pytest.approx([8_000 / 3_000, 4.0])


def test_overlong_names_share_one_place() -> None:
    ratios = BytesPerToken()
    ratios.learn("m" * 256, text_bytes=1_000, prompt_tokens=1_000)
    assert (ratios.ratio("m" * 256), ratios.ratio(None), ratios.ratio("m" * 257)) == (2.5, 4.0, 4.0)
    ratios.learn("m" * 1000, text_bytes=2_000, prompt_tokens=1_000)
    assert ratios.ratio(None) == ratios.ratio("n" * 1000) == 3.0
