"""Images, audio and video in prompts: the tokens that each part takes, before an engine has counted them and after.

Owns the formulas that engines publish, as priors, the size of a part by the first bytes of its data, and what a model's
reports teach. Nothing is decoded but a header, and what the client only links to has no size here. Leaves to
`core.prompt.parse` which parts of a body are media.

Theory of operation. A part has a class: its kind and its size to a power of two. A model's `prompt_tokens`, less those
of the text, are the tokens of its parts; a prompt whose parts are all of one class teaches that class. One that is not
learned yet has the factor of its kind: a model whose images take twice the prior takes twice for all sizes.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from gorgo.core.lru import Lru
from gorgo.core.numeric import is_number
from gorgo.core.record import record

#: Tokens of one part at most: the bound of Qwen's processors, the largest that is published.
MAX_PART_TOKENS = 16_384
#: Tokens of a part of unknown size: a photograph of a megapixel, ten seconds of speech, a short clip.
UNKNOWN_TOKENS = {"image": 1_024, "audio": 250, "video": 4_096}
#: Qwen's and Voxtral's encoders lie between 12.5 and 25 tokens a second.
AUDIO_TOKENS_PER_S = 25.0
#: Of a frame a second at 480p by Qwen's formula.
VIDEO_TOKENS_PER_S = 300.0
#: Bytes a second of compressed data, whose headers do not say how long it takes: MP3 at 128 kbit/s, video at 2 Mbit/s.
_BYTES_PER_S = {"audio": 16_000, "video": 250_000}
#: Decoded of a part: the header of every format but JPEG, whose size stands behind what cameras write.
_HEAD_BYTES, _JPEG_BYTES = 64, 64 * 1024
#: Segments of a JPEG that are passed over.
_MAX_SEGMENTS = 64
#: Models whose media are learned; clients name them, so that the length of a name is bounded too. Each has a few dozen
#: classes at most.
MAX_MODELS = 256
MAX_NAME = 256
#: Classes that outlive the process: those of the models of several fleets, in some 300 KB of the state file at most.
MAX_ENTRIES = 1_000
#: Older parts fade: once so many are counted, all of them count half.
MEMORY_PARTS = 256
#: A report teaches where the media are at least this share of the text, whose own estimate is off by some per cent.
MIN_SHARE = 0.125


@record
class MediaParts:
    """The parts of one class in a prompt.

    Parameters
    ----------
    kind:
        `image`, `audio` or `video`.
    size:
        Bits of its pixels or seconds; 0 where unknown.
    parts:
        Their number.
    tokens:
        Their tokens by the prior, in sum.
    """

    kind: str
    size: int
    parts: int
    tokens: int


@dataclass(slots=True)
class _Learned:
    parts: float = 0.0
    prior: float = 0.0
    tokens: float = 0.0

    def add(self, media: MediaParts, tokens: float) -> None:
        self.parts += media.parts
        self.prior += media.tokens
        self.tokens += tokens
        if self.parts > MEMORY_PARTS:
            self.parts, self.prior, self.tokens = self.parts / 2, self.prior / 2, self.tokens / 2


class MediaTokens:
    """Tokens of media by model and class.

    Example
    -------
    >>> learned, photo = MediaTokens(), MediaParts("image", 20, 1, 1_000)
    >>> learned.on_reported("m", [photo], tokens=2_000, text_tokens=50)
    >>> learned.estimate("m", [MediaParts("image", 18, 2, 500)]), learned.estimate("other", [photo])
    (1000.0, 1000.0)
    """

    def __init__(self) -> None:
        self._models = Lru[str | None, dict[tuple[str, int | None], _Learned]](MAX_MODELS)

    def estimate(self, model: str | None, media: Sequence[MediaParts]) -> float:
        """Return the tokens of all parts of a prompt."""
        learned = self._models.get(None if model is not None and len(model) > MAX_NAME else model) or {}
        return sum((_tokens(learned, each) for each in media), 0.0)

    def on_reported(self, model: str | None, media: Sequence[MediaParts], *, tokens: float, text_tokens: float) -> None:
        """Take in that the parts had `tokens` tokens, beside a text of about `text_tokens`.

        Parts of several classes teach nothing: their shares are unknown.
        """
        if (
            len(media) != 1
            or tokens < MIN_SHARE * text_tokens
            or not 0 < tokens <= 4 * MAX_PART_TOKENS * media[0].parts
        ):
            return
        (only,) = media
        learned = self._of(model)
        learned.setdefault((only.kind, only.size), _Learned()).add(only, tokens)
        if only.size:  # of an unknown size the prior is no formula
            learned.setdefault((only.kind, None), _Learned()).add(only, tokens)

    def entries(self) -> list[list[Any]]:
        """Return what is learned as JSON: lists of model, kind, size, parts, tokens by the prior, tokens.

        The newest models, the latest last. A size of `None` stands for all known sizes of the kind.
        """
        return [
            [model, kind, size, each.parts, each.prior, each.tokens]
            for model, learned in self._models.items()
            for (kind, size), each in learned.items()
        ][-MAX_ENTRIES:]

    def restore(self, entries: object) -> None:
        """Take in `entries` of a former process. Raises `ValueError` for any other value."""
        for entry in lists_of(entries, 6):
            model, kind, size, *sums = entry
            is_class = kind in tuple(UNKNOWN_TOKENS) and (size is None or (type(size) is int and 0 <= size <= 64))
            if not (is_class and is_name(model) and all(map(is_number, sums)) and _are_possible(*sums)):
                raise ValueError(f"{entry}: expected model, kind, size, parts, tokens by the prior, tokens")
            self._of(model)[kind, size] = _Learned(*map(float, sums))

    def _of(self, model: str | None) -> dict[tuple[str, int | None], _Learned]:
        if model is not None and len(model) > MAX_NAME:
            model = None
        learned = self._models.use(model)
        if learned is None:
            learned = {}
            self._models.put(model, learned)
        return learned


def _are_possible(parts: float, prior: float, tokens: float) -> bool:
    """Return whether reports can have these sums: each part has a token or more by the prior, and a bound by both."""
    most = 1.01 * MAX_PART_TOKENS * parts  # sums are rounded
    return 1 <= parts <= prior <= most and 0 < tokens <= 4 * most


def is_name(value: object) -> bool:
    """Return whether a value of JSON is the name of a model, or stands for requests without one."""
    return value is None or (isinstance(value, str) and len(value) <= MAX_NAME)


def lists_of(value: object, length: int) -> list[list[Any]]:
    """Return a value of JSON that is a list of lists of `length`. Raises `ValueError` for any other."""
    if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == length for each in value):
        raise ValueError(f"expected lists of {length} values")
    return value


def _tokens(learned: Mapping[tuple[str, int | None], _Learned], media: MediaParts) -> float:
    entry = learned.get((media.kind, media.size)) or learned.get((media.kind, None))
    if entry is None:
        return media.tokens
    return media.tokens * entry.tokens / entry.prior if media.size else media.parts * entry.tokens / entry.parts


def media_of(part: Mapping[str, object], model: object) -> MediaParts | None:
    """Return what a part of a message is as media, in any dialect; `None` for any other part.

    >>> media_of({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "qwen2.5-vl-7b")
    MediaParts(kind='image', size=0, parts=1, tokens=1024)
    """
    name = part.get("type")
    if not isinstance(name, str):
        return None
    kind = next((kind for kind in UNKNOWN_TOKENS if kind in name), None)
    return None if kind is None else measured(kind, _data_in(part, name, kind), model)


def measured(kind: str, data: str | None, model: object) -> MediaParts:
    """Return one part of `kind` with its tokens by the prior, by the beginning of its `data`: a URL or base64."""
    start = _start_of(data)
    if data is None or start is None:
        return MediaParts(kind, 0, 1, UNKNOWN_TOKENS[kind])
    head = _decoded(data, start, _HEAD_BYTES)
    if kind == "image":
        size = image_size(_decoded(data, start, _JPEG_BYTES) if head[:2] == b"\xff\xd8" else head)
        if size is None:
            return MediaParts(kind, 0, 1, UNKNOWN_TOKENS[kind])
        return MediaParts(kind, (size[0] * size[1]).bit_length(), 1, image_tokens(*size, model))
    duration_s = (len(data) - start) * 3 // 4 / (_wav_bytes_per_s(head) or _BYTES_PER_S[kind])
    per_s = AUDIO_TOKENS_PER_S if kind == "audio" else VIDEO_TOKENS_PER_S
    return MediaParts(kind, max(1, ceil(duration_s)).bit_length(), 1, _bounded(duration_s * per_s))


def joined(media: Sequence[MediaParts]) -> tuple[MediaParts, ...]:
    """Return the parts of each class as one entry."""
    classes: dict[tuple[str, int], MediaParts] = {}
    for each in media:
        same = classes.get((each.kind, each.size))
        parts, tokens = (0, 0) if same is None else (same.parts, same.tokens)
        classes[each.kind, each.size] = MediaParts(each.kind, each.size, parts + each.parts, tokens + each.tokens)
    return tuple(classes.values())


def image_tokens(width: int, height: int, model: object) -> int:
    """Return the tokens of an image by the formula of the model's family.

    Patches of 28 pixels (Qwen2-VL and 2.5-VL) where the name says nothing; 32 (Qwen3-VL), 16 (Pixtral), tiles of 448
    (InternVL) or of 512 pixels (OpenAI's), or as many for each image (Gemma 3, LLaVA 1.5).

    >>> image_tokens(1024, 1024, None), image_tokens(1024, 1024, "gpt-4o"), image_tokens(1024, 1024, "gemma-3-27b-it")
    (1369, 765, 256)
    """
    name = model.lower() if isinstance(model, str) else ""
    if name.startswith(("gpt-", "chatgpt-", "o1", "o3", "o4")):
        return _bounded(_openai_tiles(width, height))
    if "internvl" in name:
        tiles = min(12, max(1, round(width * height / 448**2)))
        return 256 * (tiles + (tiles > 1))
    for family, tokens in (("gemma-3", 256), ("llava-1.5", 576)):
        if family in name:
            return tokens
    pixels = 32 if "qwen3-vl" in name else 16 if "pixtral" in name else 28
    return _bounded(ceil(width / pixels) * ceil(height / pixels))


def _openai_tiles(width: int, height: int) -> int:
    """Return 85 tokens and 170 for each tile of 512 pixels, once the image fits 2,048 and its shorter side 768."""
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (scale * min(width, height)))
    return 85 + 170 * ceil(scale * width / 512) * ceil(scale * height / 512)


def image_size(head: bytes) -> tuple[int, int] | None:
    """Return width and height of an image by its first bytes: PNG, GIF, WebP or JPEG; `None` for any other.

    >>> image_size(b"GIF89a" + bytes([64, 1, 200, 0]))
    (320, 200)
    """
    size: tuple[int, int] | None = None
    if head[:8] == b"\x89PNG\r\n\x1a\n" and len(head) >= 24:
        size = struct.unpack_from(">II", head, 16)
    elif head[:4] == b"GIF8" and len(head) >= 10:
        size = struct.unpack_from("<HH", head, 6)
    elif head[:4] == b"RIFF" and head[8:12] == b"WEBP" and len(head) >= 30:
        size = _webp_size(head)
    elif head[:2] == b"\xff\xd8":
        size = _jpeg_size(head)
    return size if size is not None and min(size) > 0 else None


def _webp_size(head: bytes) -> tuple[int, int] | None:
    form = head[12:16]
    if form == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if form == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Return the size in the start of frame, which stands behind other segments."""
    offset = 2
    for _ in range(_MAX_SEGMENTS):
        if offset + 9 > len(head) or head[offset] != 0xFF:
            return None
        marker = head[offset + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, offset + 5)
            return width, height
        offset += 2 + int.from_bytes(head[offset + 2 : offset + 4], "big")
    return None


def _wav_bytes_per_s(head: bytes) -> int | None:
    if head[:4] != b"RIFF" or head[8:16] != b"WAVEfmt " or len(head) < 32:
        return None
    return int.from_bytes(head[28:32], "little") or None


def _data_in(part: Mapping[str, object], name: str, kind: str) -> str | None:
    """Return the URL or the base64 of a part: under its type's name, its kind's, or as Anthropic's source."""
    for key in (name, f"{kind}_url", "source", kind):
        value = part.get(key)
        for source in (value.get("url"), value.get("data")) if isinstance(value, dict) else (value,):
            if isinstance(source, str):
                return source
    return None


def _start_of(data: str | None) -> int | None:
    """Return where base64 begins in a data URL or in bare base64; `None` for a link."""
    if data is None or "://" in data[:32]:
        return None
    if not data.startswith("data:"):
        return 0
    comma = data.find(",", 0, 256)
    return None if comma < 0 or ";base64" not in data[:comma] else comma + 1


def _decoded(data: str, start: int, size: int) -> bytes:
    """Return the first bytes of base64; empty for what is none."""
    text = data[start : start + -(-size // 3) * 4]
    try:
        return b64decode(text[: len(text) // 4 * 4])
    except ValueError:
        return b""


def _bounded(tokens: float) -> int:
    return max(1, min(MAX_PART_TOKENS, ceil(tokens)))
