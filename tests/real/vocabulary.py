"""The vocabulary of the tiny models: bytes, and the syllables in which this project's traces are written.

Byte-level BPE as GPT-2 defines it, so that any text works. Each syllable of `gorgo.lab.traces.text`, with or without a
space before it, is one token: a prompt of n trace tokens is n engine tokens in every engine that loads this vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, START, END)

#: ChatML without a default system message: the text of a prompt is the text of its messages.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in order of their ids, merges in order of rank, and the tokens that the tiny model is made to say."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    spoken: frozenset[int]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def vocabulary() -> Vocabulary:
    """The one vocabulary; 835 tokens."""
    space = byte_letters()[0x20]
    open_syllables = [first + vowel for first, vowel in product("bdfgklmnprstvwyz", "aeio")]
    merges = [(syllable[0], syllable[1]) for syllable in open_syllables]
    merges += [(syllable, last) for syllable in open_syllables for last in "nrst"]
    merges += [(space, syllable + last) for syllable in open_syllables for last in "nrst"]
    tokens = (*SPECIAL, *byte_letters(), *(left + right for left, right in merges))
    spoken = frozenset(number for number, token in enumerate(tokens) if len(token) == 4 and token[0] == space)
    return Vocabulary(tokens=tokens, merges=tuple(merges), spoken=spoken)


def byte_letters() -> tuple[str, ...]:
    """GPT-2's letter for each byte: itself where that prints, else the next letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(hidden)) for byte in range(256))
