"""The tokenizer of a model, from its `tokenizer.json`: extra `tokens`, imported only if the configuration names one.

Owns the ids of a text, the special tokens at which a text may be cut (`FileTokenizer`), and the cache of segments
(`SegmentCache`). Leaves chat templates to `model_tokens`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gorgo.core.lru import Lru
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.encoded_prompt import EncodedPrompt, EncodingFailedError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


#: Twice the largest file of a published model, whose vocabulary has 256,000 entries.
MAX_FILE_BYTES = 64 << 20
_EXPECTED = "a tokenizer.json, or the word simulated"


def require_extra() -> None:
    """Raise `MissingExtra` without the extra `tokens`."""
    # Before the library reads it: a prompt is encoded by the thread that calls, and by no pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"models[].tokenizer needs {error.name}, which is not installed: pip install 'gorgo-router[tokens]'"
        ) from error


def read_tokenizer(path: Path) -> FileTokenizer:
    """Return the tokenizer of a file. Raises `InvalidValueError`, or `MissingExtra` without the extra `tokens`."""
    require_extra()
    from tokenizers import Tokenizer

    data = read_file(path, limit=MAX_FILE_BYTES, place="models[].tokenizer", expected=_EXPECTED)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001 - the library raises the base class for every fault of a file
        reason = str(error)[:200]
        raise InvalidValueError("models[].tokenizer", f"{str(path)!r}: {reason}", _EXPECTED) from None
    return FileTokenizer(tokenizer)


def read_file(path: Path, *, limit: int, place: str, expected: str) -> bytes:
    """Return a file's content. Raises `InvalidValueError` for one that cannot be read or has over `limit` bytes."""
    try:
        if path.is_fifo():
            raise InvalidValueError(place, f"{str(path)!r} is a pipe", expected)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidValueError(place, f"{str(path)!r}: {reason}", expected) from None
    if len(data) > limit:
        raise InvalidValueError(place, f"{str(path)!r}: over {limit:,} bytes", expected)
    return data


class FileTokenizer:
    """Encodes text as an engine with the same file does.

    Parameters
    ----------
    tokenizer:
        As read; truncation and padding of the file are switched off, since engines do so too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        #: Packed ids that the engine puts before and after a plain prompt, such as that of the beginning of a text.
        self.prefix, self.suffix = self._affixes()

    def encode(self, text: str) -> bytes:
        """Return the packed ids of a text, without `prefix` and `suffix`. Other threads run meanwhile.

        Raises `EncodingFailedError` for a text that this tokenizer has no token for.
        """
        try:
            # The batch call alone releases the interpreter, and the fast one leaves out offsets.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises the base class; its message may quote the text
            raise EncodingFailedError(type(error).__name__) from None
        return token_bytes(encoding.ids)

    def separators(self, texts: Iterable[str]) -> list[str]:
        """Return the special tokens within `texts` at which any text may be cut without a change of its ids.

        The parts of a text between such tokens are encoded apart. A token that takes in blanks before it, is compared
        after normalization, or overlaps with another one is none.
        """
        joined = "\n".join(texts)
        exact = [token for token in self._added.values() if not token.normalized]
        return [
            token.content
            for token in exact
            if token.content in joined
            and not (token.lstrip or token.single_word)
            and not any(_overlap(token.content, other.content) for other in exact if other is not token)
        ]

    def _affixes(self) -> tuple[bytes, bytes]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return token_bytes(whole[:start]), token_bytes(whole[start + len(plain) :])
        return b"", b""


def _overlap(one: str, other: str) -> bool:
    """Return whether a text can have both with a common character."""
    if not other or one in other or other in one:
        return True
    longest = min(len(one), len(other)) - 1
    return any(one.endswith(other[:size]) or other.endswith(one[:size]) for size in range(1, longest + 1))


# A text to its token ids, cached by segment: a longer conversation encodes its new messages alone.
#
# Owns the cut and the cache. Theory of operation. A special token ends all that is encoded together, so a text may be
# cut before each of them (`FileTokenizer.separators`). The cut is at the one that begins each message, so a segment is
# a message. The key is a digest of the segment; the value, its ids.


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
