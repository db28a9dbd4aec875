"""A prompt's token ids in parts, each with a key that stands for it, and why a prompt has none."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from gorgo.core.prefix.kv_source import TOKEN_BYTES
from gorgo.core.record import record
from gorgo.errors import GorgoError

#: Bytes of a part of ids that come without text: 1,024 tokens.
PAGE_BYTES = 1024 * TOKEN_BYTES
#: Key of a part that is not cached.
UNCACHED = b""


class TemplateFailedError(GorgoError):
    """A template did not render a prompt. The message holds no text of the prompt."""


class EncodingFailedError(GorgoError):
    """A tokenizer did not encode a text. The message holds none of it."""


@record
class EncodedPrompt:
    """The packed ids of a prompt.

    Parameters
    ----------
    parts:
        In order.
    keys:
        Of each part: of one origin, equal keys stand for equal ids. `UNCACHED` for one that is not retained.
    origin:
        What the keys are of: a tokenizer's segments, or ids.
    """

    parts: Sequence[bytes]
    keys: Sequence[bytes]
    origin: bytes

    @classmethod
    def of_ids(cls, packed: bytes) -> EncodedPrompt:
        """Return ids in pages. The last one is not retained: that of a longer prompt has more."""
        parts = [packed[start : start + PAGE_BYTES] for start in range(0, len(packed), PAGE_BYTES)]
        # Processors compute SHA-256 in half the time of BLAKE2.
        keys = [sha256(part).digest() if len(part) == PAGE_BYTES else UNCACHED for part in parts]
        return cls(parts, keys, b"ids")

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parts)) // TOKEN_BYTES
