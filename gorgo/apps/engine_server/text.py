"""Text of a simulated engine: four ASCII bytes per token, the same answer to the same prompt.

Owns the words and the rule that one token is four bytes of UTF-8 text. The words stand on one long tape; an answer is a
stretch of it that starts at a place given by the prompt, so that a token, a text or a cache key is one slice.
"""

from __future__ import annotations

from hashlib import blake2b
from math import sqrt
from zlib import crc32

TOKEN_BYTES = 4

_CONSONANTS = b"bdfgklmnprstvz"
_VOWELS = b"aeiou"
#: A prime, so that the tape does not repeat in step with anything.
_WORDS = 977


def token_count(text: bytes) -> int:
    """Tokens of a text: four bytes each, the last one perhaps shorter. An empty prompt still has one."""
    return max(1, -(-len(text) // TOKEN_BYTES))


def cache_key(text: bytes) -> bytes:
    """The text as whole tokens, the last one filled up."""
    return text.ljust(token_count(text) * TOKEN_BYTES, b"\0")


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
        words = b"".join(_word(number) for number in range(_WORDS))
        self._bytes = words * (longest // _WORDS + 2)

    def start(self, prompt: bytes) -> int:
        """Where the answer to `prompt` begins, in bytes."""
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


def _word(number: int) -> bytes:
    """Three letters and a space, different for each number."""
    middle, rest = number % len(_VOWELS), number // len(_VOWELS)
    first, last = rest % len(_CONSONANTS), rest // len(_CONSONANTS) % len(_CONSONANTS)
    return bytes((_CONSONANTS[first], _VOWELS[middle], _CONSONANTS[last])) + b" "
