"""Counts of tokens before any engine has counted: of texts, images, audio and video."""

from __future__ import annotations

import json
import random
import struct
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.core.messages.request import Outcome
from gorgo.core.prompt.fingerprint import MAX_MODELS as MAX_MODELS_FINGERPRINT
from gorgo.core.prompt.fingerprint import BytesPerToken, Fingerprinter, simulated_tokens
from gorgo.core.prompt.media import (
    MAX_ENTRIES,
    MAX_MODELS,
    MAX_PART_TOKENS,
    MediaParts,
    MediaTokens,
    image_size,
    image_tokens,
    media_of,
)
from gorgo.core.prompt.parse import read_prompt
from gorgo.lab.engine_server.streams import cache_key, token_count
from tests.core.routers import COMPLETED, a_request, dispatched, finished, make_router, submitted

# --- Tokens of images, audio and video: by the header of their data, by the published formulas, and as reported.


SEGMENT = b"\xff\xe1" + struct.pack(">H", 30_000) + bytes(29_998)


def png(width: int, height: int, fill: bytes = b"") -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(9) + fill


def jpeg(width: int, height: int, *, segments: bytes = b"") -> bytes:
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + segments + frame + b"\xff\xd9"


def webp(form: bytes, data: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 99) + b"WEBP" + form + struct.pack("<I", 50) + data + bytes(20)


IMAGES = {
    "png": png(640, 480),
    "gif": b"GIF89a" + struct.pack("<HH", 640, 480) + bytes(10),
    "jpeg": jpeg(640, 480),
    "jpeg behind a thumbnail": jpeg(640, 480, segments=SEGMENT + SEGMENT),
    "webp": webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 640, 480)),
    "webp lossless": webp(b"VP8L", b"\x2f" + (639 | 479 << 14).to_bytes(4, "little")),
    "webp extended": webp(b"VP8X", bytes(4) + (639).to_bytes(3, "little") + (479).to_bytes(3, "little")),
}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
def test_the_size_of_an_image_is_read_from_its_header(data: bytes) -> None:
    assert image_size(data) == (640, 480)
    for part in (
        {"type": "image_url", "image_url": {"url": url(data)}},
        {"type": "image_url", "image_url": url(data)},
        {"type": "input_image", "image_url": url(data)},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}},
    ):
        assert media_of(part, None) == MediaParts("image", (640 * 480).bit_length(), 1, 23 * 18)


@pytest.mark.parametrize(
    "data", [png(0, 480), png(640, 480)[:20], jpeg(640, 480, segments=SEGMENT * 3), jpeg(640, 480)[:8], b"BM", b""]
)
def test_an_image_without_a_size_counts_as_one_of_unknown_size(data: bytes) -> None:
    assert media_of({"type": "image_url", "image_url": {"url": url(data)}}, None) == MediaParts("image", 0, 1, 1024)


@pytest.mark.parametrize(
    "value", ["https://a/b.png", "data:image/png;base64", "data:text/plain,AAAA", "$", None, 7, {}]
)
def test_what_is_no_data_has_no_size(value: Any) -> None:
    assert media_of({"type": "image_url", "image_url": {"url": value}}, None) == MediaParts("image", 0, 1, 1024)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_survived(data: bytes) -> None:
    for head in (b"", b"\xff\xd8", b"RIFF....WEBPVP8 ", b"GIF8", b"\x89PNG\r\n\x1a\n"):
        size = image_size(head + data)
        assert size is None or min(size) > 0
        found = media_of({"type": "image_url", "image_url": {"url": url(head + data)}}, None)
        assert found is not None
        assert 0 < found.tokens <= MAX_PART_TOKENS


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        (None, (28, 28), 1),
        ("Qwen/Qwen2.5-VL-7B-Instruct", (1024, 768), 37 * 28),
        ("Qwen/Qwen3-VL-8B", (1024, 768), 32 * 24),
        ("mistralai/Pixtral-12B", (1024, 768), 64 * 48),
        ("gpt-4o", (1024, 1024), 85 + 4 * 170),
        ("gpt-4o", (2048, 4096), 85 + 6 * 170),
        ("gpt-4o", (100, 100), 85 + 170),
        ("OpenGVLab/InternVL3-8B", (448, 448), 256),
        ("OpenGVLab/InternVL3-8B", (896, 896), 256 * 5),
        ("google/gemma-3-12b-it", (4000, 3000), 256),
        ("llava-1.5-7b", (4000, 3000), 576),
        (None, (100_000, 100_000), MAX_PART_TOKENS),
    ],
)
def test_an_image_has_the_tokens_of_its_model_s_published_formula(
    model: str | None, size: tuple[int, int], tokens: int
) -> None:
    assert image_tokens(*size, model) == tokens


def test_audio_has_the_tokens_of_its_duration() -> None:
    head = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHII", 16, 1, 1, 16_000, 32_000) + bytes(16)
    wav = {
        "type": "input_audio",
        "input_audio": {"data": b64encode(head + bytes(10 * 32_000)).decode(), "format": "wav"},
    }
    found = media_of(wav, None)
    assert found is not None
    assert (found.kind, found.size) == ("audio", 4)
    assert 250 <= found.tokens <= 251
    mp3 = media_of({"type": "audio_url", "audio_url": {"url": url(bytes(160_000), "audio/mp3")}}, None)
    assert mp3 == MediaParts("audio", 4, 1, 251)  # with the padding of base64
    assert media_of({"type": "video_url", "video_url": {"url": "https://a/b"}}, None) == MediaParts("video", 0, 1, 4096)


def test_a_part_of_another_type_is_no_media() -> None:
    assert media_of({"type": "document"}, None) is media_of({"type": 7}, None) is media_of({}, None) is None


# -- learned
PHOTO, ICON = MediaParts("image", 20, 1, 1000), MediaParts("image", 10, 1, 10)


def test_a_model_s_reports_teach_the_tokens_of_a_class_and_of_its_kind() -> None:
    learned = MediaTokens()
    for _ in range(1000):
        learned.on_reported("m", [PHOTO], tokens=500, text_tokens=50)
    learned.on_reported("m", [ICON], tokens=40, text_tokens=50)
    assert learned.estimate("m", [PHOTO]) == pytest.approx(500)
    assert learned.estimate("m", [ICON]) == pytest.approx(40)
    assert learned.estimate("m", [MediaParts("image", 21, 1, 2000)]) == pytest.approx(1000, rel=0.05)
    assert learned.estimate("m", [MediaParts("audio", 4, 1, 250)]) == 250
    assert learned.estimate("other", [PHOTO, ICON]) == 1010


def test_an_image_of_unknown_size_has_the_mean_of_its_model() -> None:
    learned, unknown = MediaTokens(), MediaParts("image", 0, 2, 2048)
    assert learned.estimate("m", [unknown]) == 2048
    learned.on_reported("m", [MediaParts("image", 20, 3, 3000)], tokens=1200, text_tokens=10)
    assert learned.estimate("m", [unknown]) == 800
    learned.on_reported("m", [unknown], tokens=3000, text_tokens=10)
    assert learned.estimate("m", [unknown]) == 3000
    assert learned.estimate("m", [PHOTO]) == 400


def test_several_classes_a_long_text_and_absurd_counts_teach_nothing() -> None:
    learned = MediaTokens()
    learned.on_reported("m", [PHOTO, ICON], tokens=5000, text_tokens=0)
    learned.on_reported("m", [PHOTO], tokens=100, text_tokens=10_000)
    learned.on_reported("m", [PHOTO], tokens=-5, text_tokens=0)
    learned.on_reported("m", [PHOTO], tokens=1e9, text_tokens=0)
    assert learned.estimate("m", [PHOTO]) == 1000


def test_a_report_of_a_prompt_with_an_image_teaches_the_image_and_not_the_text() -> None:
    router = make_router("a")
    for number in range(3):
        request = replace(a_request(f"r{number}", model="m"), media=(PHOTO,), text_bytes=400)
        attempt = dispatched(submitted(router, request, now=1.0 + number))
        usage = Outcome(COMPLETED.result, status=200, prompt_tokens=2100, output_tokens=5)
        finished(router, attempt.attempt_id, usage, now=1.5 + number)
    assert router.token_ratios.ratio("m") == 4.0
    assert router.media_tokens.estimate("m", [PHOTO]) == pytest.approx(2000)


# -- in a prompt
def chat_with(data: bytes, text: str = "what is this?") -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url(data)}}
    return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": text}]}]}


def test_two_images_of_one_size_share_no_block_and_one_image_shares_its_own() -> None:
    chance, fingerprinter = random.Random(1), Fingerprinter(key=7)
    one, other = (png(1024, 1024, chance.randbytes(1000)) for _ in range(2))
    blocks = [
        fingerprinter(read_prompt("/v1/chat/completions", chat_with(data, text))).blocks
        for data, text in ((one, "what is this?"), (one, "and where?"), (other, "what is this?"))
    ]
    first, again, second = ([each[n : n + 8] for n in range(0, len(each), 8)] for each in blocks)
    assert len(first) == 1369 * 4 // 256
    assert first == again
    assert not set(first) & set(second)


# -- after a restart
def test_what_is_learned_outlives_the_process_as_json() -> None:
    before, after = MediaTokens(), MediaTokens()
    for _ in range(300):
        before.on_reported("m", [PHOTO], tokens=2000, text_tokens=50)
    before.on_reported(None, [MediaParts("audio", 0, 2, 500)], tokens=90, text_tokens=50)
    after.restore(json.loads(json.dumps(before.entries())))
    assert after.entries() == before.entries()
    for model, parts in (("m", PHOTO), ("m", ICON), (None, MediaParts("audio", 0, 1, 250)), ("other", PHOTO)):
        assert after.estimate(model, [parts]) == before.estimate(model, [parts])


def test_few_classes_of_many_outlive_the_process_the_newest() -> None:
    learned = MediaTokens()
    for number in range(MAX_MODELS):
        for size in range(1, 9):
            learned.on_reported(f"m{number}", [MediaParts("image", size, 1, 10)], tokens=20, text_tokens=0)
    entries = learned.entries()
    assert len(entries) == MAX_ENTRIES
    assert entries[-1][0] == f"m{MAX_MODELS - 1}"


def test_a_name_that_is_longer_than_any_model_s_is_not_kept() -> None:
    learned = MediaTokens()
    learned.on_reported("m" * 10_000, [PHOTO], tokens=2000, text_tokens=0)
    assert {entry[0] for entry in learned.entries()} == {None}
    assert learned.estimate("m" * 10_000, [PHOTO]) == 2000


@pytest.mark.parametrize(
    "entries",
    [
        {},
        [["m", "image", 20, 1.0, 1000.0]],
        [[7, "image", 20, 1.0, 1000.0, 2000.0]],
        [["m" * 257, "image", 20, 1.0, 1000.0, 2000.0]],
        [["m", "smell", 20, 1.0, 1000.0, 2000.0]],
        [["m", ["image"], 20, 1.0, 1000.0, 2000.0]],
        [["m", "image", 2.5, 1.0, 1000.0, 2000.0]],
        [["m", "image", -1, 1.0, 1000.0, 2000.0]],
        [["m", "image", 20, 0.0, 1000.0, 2000.0]],
        [["m", "image", 20, 1.0, 0.0, 2000.0]],
        [["m", "image", 20, 1.0, 1000.0, float("nan")]],
        [["m", "image", 20, 1.0, 1000.0, 1e9]],
        [["m", "image", 20, 1.0, 1000.0, "2000"]],
    ],
)
def test_what_no_process_can_have_learned_is_refused(entries: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        MediaTokens().restore(entries)


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
    for number in range(MAX_MODELS_FINGERPRINT + 1):
        ratios.learn(str(number), text_bytes=2_000, prompt_tokens=1_000)
    assert (ratios.ratio("0"), ratios.ratio("1")) == (4.0, 3.0)


def test_a_model_that_is_learned_again_is_not_the_next_to_be_forgotten() -> None:
    ratios = BytesPerToken()
    for number in [*range(MAX_MODELS_FINGERPRINT), 0, MAX_MODELS_FINGERPRINT]:
        ratios.learn(str(number), text_bytes=2_000, prompt_tokens=1_000)
    assert [ratios.ratio("0"), ratios.ratio("1")] == pytest.approx([8_000 / 3_000, 4.0])


def test_overlong_names_share_one_place() -> None:
    ratios = BytesPerToken()
    ratios.learn("m" * 256, text_bytes=1_000, prompt_tokens=1_000)
    assert (ratios.ratio("m" * 256), ratios.ratio(None), ratios.ratio("m" * 257)) == (2.5, 4.0, 4.0)
    ratios.learn("m" * 1000, text_bytes=2_000, prompt_tokens=1_000)
    assert ratios.ratio(None) == ratios.ratio("n" * 1000) == 3.0
