from __future__ import annotations

import pytest

from gorgo.core.tokens import MAX_MODELS, BytesPerToken


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


def test_overlong_names_share_one_place() -> None:
    ratios = BytesPerToken()
    ratios.learn("m" * 1000, text_bytes=2_000, prompt_tokens=1_000)
    assert ratios.ratio(None) == ratios.ratio("n" * 1000) == 3.0
