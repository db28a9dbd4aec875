"""Text of a simulated engine: four ASCII bytes per token, the same answer to the same prompt.

Owns the words and the rule that one token is four bytes of UTF-8 text. The words stand on one long tape; an answer is a
stretch of it that starts at a place given by the prompt, so that a token, a text or a cache key is one slice. An answer
in JSON is cut into tokens in the same way; its last token may be shorter.
"""

from __future__ import annotations

from hashlib import blake2b
from math import sqrt
from zlib import crc32

from gorgo.core.prompt.fingerprint import TEXT_TOKEN_BYTES, simulated_tokens

TOKEN_BYTES = TEXT_TOKEN_BYTES

_CONSONANTS = b"bdfgklmnprstvz"
_VOWELS = b"aeiou"
#: A prime, so that the tape does not repeat in step with anything.
_WORDS = 977


def token_count(text: bytes) -> int:
    """Tokens of a text: four bytes each, the last one perhaps shorter. An empty prompt still has one."""
    return max(1, -(-len(text) // TOKEN_BYTES))


def cache_key(text: bytes, adapter: str | None = None) -> bytes:
    """The text as whole tokens, the last one filled up; the first one differs for each adapter."""
    return simulated_tokens(text, adapter)


def vector(text: bytes) -> list[float]:
    """A small unit vector that depends on the text alone, for `/v1/embeddings`."""
    raw = [byte - 127.5 for byte in blake2b(text, digest_size=16).digest()]
    length = sqrt(sum(value * value for value in raw))
    return [value / length for value in raw]


class Tape:
    """All answers of up to `longest` tokens.

    Example
    -------
    >>> tape = Tape(longest=100)
    >>> start = tape.start(b"Hello")
    >>> tape.text(start, 3) == tape.token(start, 1) + tape.token(start, 2) + tape.token(start, 3)
    True
    """

    def __init__(self, *, longest: int) -> None:
        words = [_word(number) for number in range(_WORDS)]
        self._bytes = b"".join(words) * (longest // _WORDS + 2)
        self._places = {word: number * TOKEN_BYTES for number, word in enumerate(words)}

    def start(self, prompt: bytes) -> int:
        """Where the answer to `prompt` begins, in bytes: behind its last word, if that is one of the tape's.

        So an engine that is given the beginning of an answer goes on with it, as a model would.
        """
        place = self._places.get(prompt[-TOKEN_BYTES:])
        if place is not None:
            return (place + TOKEN_BYTES) % (_WORDS * TOKEN_BYTES)
        return crc32(prompt) % _WORDS * TOKEN_BYTES

    def token(self, start: int, number: int) -> bytes:
        """The `number`th token, counted from one."""
        at = start + number * TOKEN_BYTES
        return self._bytes[at - TOKEN_BYTES : at]

    def text(self, start: int, tokens: int) -> bytes:
        """The first `tokens` tokens together."""
        return self._bytes[start : start + tokens * TOKEN_BYTES]

    def ids(self, start: int, tokens: int) -> list[int]:
        """Token ids of that text."""
        first = start // TOKEN_BYTES
        return [number % _WORDS for number in range(first, first + tokens)]


class WordAnswer:
    """An answer of `tokens` words of a tape."""

    def __init__(self, tape: Tape, prompt: bytes, tokens: int) -> None:
        self._tape = tape
        self._start = tape.start(prompt)
        self.tokens = tokens
        self.key = tape.text(self._start, tokens)

    def token(self, number: int) -> bytes:
        return self._tape.token(self._start, number)

    def text(self, tokens: int) -> bytes:
        return self._tape.text(self._start, tokens)

    def ids(self, tokens: int) -> list[int]:
        return self._tape.ids(self._start, tokens)


class JsonAnswer:
    """An answer of given text, cut off after `limit` tokens."""

    def __init__(self, data: bytes, limit: int) -> None:
        self._data = data
        self.tokens = min(limit, token_count(data))
        self.key = cache_key(self.text(self.tokens))

    @property
    def is_whole(self) -> bool:
        return self.tokens * TOKEN_BYTES >= len(self._data)

    def token(self, number: int) -> bytes:
        return self._data[(number - 1) * TOKEN_BYTES : number * TOKEN_BYTES]

    def text(self, tokens: int) -> bytes:
        return self._data[: tokens * TOKEN_BYTES]

    def ids(self, tokens: int) -> list[int]:
        return list(range(tokens))


def _word(number: int) -> bytes:
    """Three letters and a space, different for each number."""
    middle, rest = number % len(_VOWELS), number // len(_VOWELS)
    first, last = rest % len(_CONSONANTS), rest // len(_CONSONANTS) % len(_CONSONANTS)
    return bytes((_CONSONANTS[first], _VOWELS[middle], _CONSONANTS[last])) + b" "
