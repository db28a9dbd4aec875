"""A text to its token ids, cached by segment: a longer conversation encodes its new messages alone.

Owns the cut and the cache. Theory of operation. A special token ends all that is encoded together, so a text may be cut
before each of them (`FileTokenizer.separators`). The cut is at the one that begins each message, so a segment is a
message. The key is a digest of the segment; the value, its ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import count

from gorgo.core.lru import Lru
from gorgo.live.tokens.encoded import EncodedPrompt
from gorgo.live.tokens.tokenizer import FileTokenizer

#: Bytes of ids in memory: eight million tokens, some 300 conversations of 24,000.
MAX_CACHED_BYTES = 32 << 20
#: Memory of an entry beside its ids.
_ENTRY_BYTES = 200
_numbers = count()


@dataclass(slots=True)
class Cut:
    """A text in segments, with the ids of those that are known.

    `missing` are the segments to encode, by place.
    """

    keys: list[bytes]
    ids: list[bytes | None]
    missing: dict[int, str]

    @property
    def missing_chars(self) -> int:
        """Characters to encode."""
        return sum(map(len, self.missing.values()))


class SegmentCache:
    """Segments of one tokenizer.

    Parameters
    ----------
    tokenizer:
        Encodes what is not cached.
    separator:
        Special token before which a text is cut; `None`: nowhere.
    max_bytes:
        Bound on memory; the longest unused segments are evicted.
    """

    def __init__(
        self, tokenizer: FileTokenizer, *, separator: str | None = None, max_bytes: int = MAX_CACHED_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._cached = Lru[bytes, bytes](max_bytes, weigh=_memory)
        #: Names the tokenizer among all of the process, those before a reload included.
        self.origin = next(_numbers).to_bytes(8, "little")

    def cut(self, text: str) -> Cut:
        """Return a text in segments; raises `UnicodeEncodeError` for half a surrogate pair."""
        parts = [text] if self._separator is None else text.split(self._separator)
        # Processors compute SHA-256 in half the time of BLAKE2. A part without other letters is encoded in no time.
        keys = [sha256(part.encode()).digest() for part in parts]
        # The first one may be encoded in another way: it begins the text.
        keys[0] = b"first" + keys[0]
        ids = [self._cached.use(key) for key in keys]
        missing: dict[int, str] = {}
        for place, known in enumerate(ids):
            if known is None:
                begin = self._separator if place and self._separator is not None else ""
                missing[place] = begin + parts[place]
        return Cut(keys, ids, missing)

    def encode(self, texts: Iterable[str]) -> list[bytes]:
        """Return the packed ids of segments. Touches no cache: another thread may call it."""
        return [self._tokenizer.encode(text) for text in texts]

    def complete(self, cut: Cut, encoded: Iterable[bytes]) -> EncodedPrompt:
        """Return the packed ids by segment, with those of the missing ones, which are cached."""
        for place, ids in zip(cut.missing, encoded, strict=True):
            cut.ids[place] = ids
            if cut.keys[place] not in self._cached:
                self._cached.put(cut.keys[place], ids)
        return EncodedPrompt([ids for ids in cut.ids if ids is not None], cut.keys, self.origin)

    def check(self) -> None:
        """Assert the bound."""
        self._cached.check()


def _memory(ids: bytes) -> int:
    return len(ids) + _ENTRY_BYTES
