"""The fingerprint of a prompt: one 64-bit hash per full block, each for the whole prefix up to its end.

Owns the hash of blocks, which is keyed (a client must not be able to craft prompts that collide) and keeps no text
(`Fingerprinter`). It also owns the hash of a session without an id (`prefix_hash`), where prompts part although they
go on alike (`PromptHeads`), and the depths of a prompt at which routes and marks are set (`depths_of`,
`marked_depths`). Leaves the text of a prompt to `core.prompt.parse`.

Theory of operation. Each block is hashed by a multilinear function: its 32-bit words times secret 64-bit keys, summed
modulo 2^64 (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Marks of messages that start in the
block are added. The sums are mixed, then chained over the prefix as a polynomial with secret base by one cumulative
sum, and mixed again. All steps are numpy over the whole prompt: 100 kB take a fraction of the time of its JSON.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.lru import Lru
from gorgo.core.numeric import FEW, is_number
from gorgo.core.prompt.media import MAX_NAME, MediaParts, is_name, lists_of
from gorgo.core.prompt.parse import Mark, Marks, Prompt, message_ends
from gorgo.core.record import mutable_record, record

# The hash of a prompt's first 256 tokens, which stands for a session without an id.
#
# Its key is public and fixed: a restart moves no session, proxies agree, and a simulation has the same replicas. It
# only chooses replicas; the hashes of cached blocks have a secret key (`Fingerprinter`). A client gains nothing by a
# collision that it would not by a session id.


#: Bytes of the prompt that count: 256 tokens of 4 bytes.
HEAD_BYTES = 1024
#: Prompts whose heads are retained: 64 KiB, enough for several in a row of each busy client.
HEADS = 64
#: Lengths of what may stand before the same text (a date, an id, both), and of the text that shows that it is the same:
#: a sentence, not a pattern of fewer letters.
_SKIPS = (16, 48, 96, 160)
_SAME_BYTES, _LETTERS = 96, 8
_KEY = b"gorgo session affinity"


def head_of(prompt: Prompt) -> tuple[bytes, tuple[Mark, ...]]:
    """Return the first bytes of a prompt and the marks in them."""
    marks = Marks.of(prompt.message_starts)
    count = bisect_left(marks.starts, HEAD_BYTES)
    return prompt.text[:HEAD_BYTES], tuple(zip(marks.starts[:count], marks.roles[:count], strict=True))


def prefix_hash(head: bytes, marks: Iterable[Mark], *, adapter: str | None = None) -> int:
    """Return 64 bits for a prompt's beginning; one for an adapter differs from any other's.

    Example
    -------
    >>> hex(prefix_hash(*head_of(Prompt(b"You are a helpful assistant.", ((0, "system"),)))))
    '0x272b468adf3232ea'
    """
    person = b"" if adapter is None else blake2b(_text(adapter), digest_size=blake2b.PERSON_SIZE).digest()
    digest = blake2b(head, key=_KEY, person=person, digest_size=8)
    for offset, role in marks:
        digest.update(b"%d %s\0" % (offset, _text(role)))
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class PartedHeads:
    """Prompts of one model and client that part and go on with the same text: an id or a date stands before it.

    `compared` pairs of prompts in a row, of which `parted` do so; the nearest to the start parts at `at_byte`.
    """

    model: str | None
    client: str | None
    compared: int
    parted: int
    at_byte: int


class PromptHeads:
    """The first bytes of the newest prompts, in memory alone; only where they part is shown.

    Example
    -------
    >>> heads, system = PromptHeads(), b" You answer questions of pilots about the weather at their airport. " * 4
    >>> for number in range(3):
    ...     heads.add("llama", None, b"Request %03d." % number + system)
    >>> heads.parted()
    [PartedHeads(model='llama', client=None, compared=2, parted=2, at_byte=10)]
    """

    def __init__(self) -> None:
        self._newest = deque[tuple[str | None, str | None, bytes]](maxlen=HEADS)

    def add(self, model: str | None, client: str | None, head: bytes) -> None:
        """Retain the head of a prompt in the place of the oldest one."""
        self._newest.append((model, client, head))

    def parted(self) -> list[PartedHeads]:
        """Return a row per model and client with such a pair."""
        last: dict[tuple[str | None, str | None], bytes] = {}
        pairs: dict[tuple[str | None, str | None], list[int | None]] = {}
        for model, client, head in self._newest:
            before = last.get((model, client))
            if before is not None and before != head:
                pairs.setdefault((model, client), []).append(_parts_at(before, head))
            last[model, client] = head
        heads = []
        for (model, client), places in pairs.items():
            parted = [position for position in places if position is not None]
            if parted:
                heads.append(PartedHeads(model, client, len(places), len(parted), min(parted)))
        return heads


def _parts_at(first: bytes, second: bytes) -> int | None:
    """Return the byte at which two prompts part if both go on with the same text behind it; else `None`."""
    size = min(len(first), len(second))
    parting = int.from_bytes(first[:size], "big") ^ int.from_bytes(second[:size], "big")
    shared = size - (parting.bit_length() + 7) // 8
    for skipped in _SKIPS:
        piece = first[shared + skipped : shared + skipped + _SAME_BYTES]
        if len(piece) == _SAME_BYTES and len(set(piece)) > _LETTERS and piece in second[shared:]:
            return shared
    return None


def _text(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


Words = NDArray[np.uint64]

#: Blocks of one prompt: 4 MiB of text, a million tokens. The rest of a longer one is counted, but not compared: one
#: request must not replace a large part of the prefix index, nor delay others by its comparison.
MAX_BLOCKS = 16_384
#: Powers of the chain's base are stored for so many blocks at first, and twice as many whenever that is too few.
_FIRST_POWERS = 1024
_MASK = (1 << 64) - 1
#: Marks in memory: 200 kB.
_KNOWN_MARKS = 1024
#: Roles whose hashes are stored: those of the dialects.
_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
#: Shifts and factors of SplitMix64's finaliser.
_SHIFTS = (30, 27, 31)
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFT_WORDS = tuple(map(np.uint64, _SHIFTS))
_FACTOR_WORDS = tuple(map(np.uint64, _FACTORS))


@record
class Fingerprint:
    """What the Router knows of a prompt's contents.

    Parameters
    ----------
    blocks:
        8 bytes per full block up to `MAX_BLOCKS`, little-endian, in order; each hash stands for the whole prefix up to
        its block's end.
    prefix_hash:
        64-bit hash of the first 1,024 bytes and the marks in them, under the fixed key of `affinity`.
    text_bytes:
        Length of the prompt's text.
    boundaries:
        Bytes of text at the end of each message, ascending.
    """

    blocks: bytes
    prefix_hash: int
    text_bytes: int
    boundaries: tuple[int, ...] = ()


@mutable_record
class PromptSketch:
    """A prompt reduced to what its fingerprint is made of, whatever the adapter: small enough to pass on.

    `sums` has one number per block, the marks in it included; `head_marks` are the marks within `head`. `media` enter
    by `media_bytes` of the text's bytes.
    """

    sums: Words
    head: bytes
    head_marks: tuple[tuple[int, str], ...]
    text_bytes: int
    message_ends: tuple[int, ...] = ()
    media: tuple[MediaParts, ...] = ()
    media_bytes: int = 0


class Fingerprinter:
    """Hashes prompts under one key.

    Parameters
    ----------
    key:
        Secret; equal keys give equal fingerprints.
    block_bytes:
        Text per block, a multiple of 4. Smaller blocks match more exactly and cost more memory.

    Example
    -------
    >>> fingerprinter = Fingerprinter(key=7, block_bytes=4)
    >>> short, long = fingerprinter(Prompt(b"one two", ())), fingerprinter(Prompt(b"one two three", ()))
    >>> long.blocks.startswith(short.blocks), len(long.blocks)
    (True, 24)
    """

    def __init__(self, *, key: int, block_bytes: int = 256) -> None:
        if block_bytes <= 0 or block_bytes % 4:
            raise ValueError(f"block_bytes is {block_bytes}; expected a positive multiple of 4")
        self.block_bytes = block_bytes
        self._secret = blake2b(str(key).encode(), digest_size=32).digest()
        self._word_keys = self._draw("words", block_bytes // 4)
        base, self._offset_key, self._order_key = self._draw("chain and marks", 3) | np.uint64(1)
        #: Of prompts with few: many begin with the same message, so their next one starts at the same place.
        self._known_marks: dict[tuple[int, int, str], int] = {}
        # 5 modulo 8: such a base has the longest period that an odd number can have.
        self._base = (base & ~np.uint64(7)) | np.uint64(5)
        self._powers = self._powers_up_to(_FIRST_POWERS)
        #: What the places of messages add to their marks; made for more when that is too few, as the powers are.
        self._orders = np.zeros(0, dtype=np.uint64)
        self._first_powers: list[int] = self._powers[:FEW].tolist()
        self._usual_roles = {role: self._named_hash("", role) for role in _USUAL_ROLES}

    def __call__(self, prompt: Prompt, *, adapter: str | None = None) -> Fingerprint:
        """Return the fingerprint of a prompt; one for an adapter shares no block with any other's."""
        return self.hash_sketch(self.sketch(prompt), adapter=adapter)

    @property
    def key_id(self) -> str:
        """Return a name of the key and the size of blocks: fingerprints under equal ones can be compared."""
        return f"{self._named_hash('key id', str(self.block_bytes)):016x}"

    def sketch(self, prompt: Prompt) -> PromptSketch:
        """Return what is needed of a prompt for its fingerprint: a sum per block instead of its text."""
        text, marks = prompt.text, Marks.of(prompt.message_starts)
        count = min(len(text) // self.block_bytes, MAX_BLOCKS)
        sums = self._block_sums(text, count)
        starts, roles = marks.starts, marks.roles
        if len(starts) > FEW:
            self._add_marks(sums, starts, roles)
        else:
            self._add_few_marks(sums, starts, roles)
        head, head_marks = head_of(prompt)
        ends = message_ends(starts, len(text))
        return PromptSketch(sums, head, head_marks, len(text), ends, prompt.media, prompt.media_bytes)

    def hash_sketch(self, sketch: PromptSketch, *, adapter: str | None = None) -> Fingerprint:
        """Return the fingerprint of a sketch."""
        sums = sketch.sums
        if adapter is not None:
            sums = sums.copy()
            sums[:1] += np.uint64(self._named_hash("adapter", adapter))
        return Fingerprint(
            blocks=self._chain(sums) if len(sums) > FEW else self._chain_few(sums.tolist()),
            prefix_hash=prefix_hash(sketch.head, sketch.head_marks, adapter=adapter),
            text_bytes=sketch.text_bytes,
            boundaries=sketch.message_ends,
        )

    def _block_sums(self, text: bytes, count: int) -> Words:
        size = self.block_bytes // 4
        rows = np.frombuffer(text, dtype="<u4", count=count * size).reshape(count, size)
        if count <= FEW:
            few: Words = rows.astype(np.uint64).dot(self._word_keys)
            return few
        # It widens the words piece by piece: `astype` would write twice the text, of which little stays in the cache.
        sums: Words = np.einsum("ij,j->i", rows, self._word_keys)
        return sums

    def _add_marks(self, sums: Words, starts: Sequence[int], roles: Sequence[str]) -> None:
        """Add each mark to the block in which its message starts; one that starts past the last full block has none."""
        offsets = np.array(starts, dtype=np.intp)
        block = offsets // self.block_bytes
        hashes = {role: self._role_hash(role) for role in set(roles)}
        values = np.fromiter(map(hashes.__getitem__, roles), np.uint64, len(roles))
        values += offsets.view(np.uint64) * self._offset_key
        if len(roles) > len(self._orders):
            self._orders = np.arange(2 * len(roles), dtype=np.uint64) * self._order_key
        values += self._orders[: len(roles)]
        values = _mix(values)
        if starts[-1] >= len(sums) * self.block_bytes:  # offsets ascend
            inside = block < len(sums)
            block, values = block[inside], values[inside]
        np.add.at(sums, block, values)

    def _add_few_marks(self, sums: Words, starts: Sequence[int], roles: Sequence[str]) -> None:
        """Add a few marks as `_add_marks` does."""
        mark_values = self._known_marks
        for mark in zip(range(len(starts)), starts, roles, strict=True):
            block = mark[1] // self.block_bytes
            if block < len(sums):
                value = mark_values.get(mark)
                if value is None:
                    value = self._learn_mark(*mark)
                sums[block] = (int(sums[block]) + value) & _MASK

    def _learn_mark(self, order: int, offset: int, role: str) -> int:
        places = offset * int(self._offset_key) + order * int(self._order_key)
        value = _mix_one((self._role_hash(role) + places) & _MASK)
        if role in self._usual_roles:  # others may be as long as a body
            if len(self._known_marks) >= _KNOWN_MARKS:
                self._known_marks.clear()
            self._known_marks[order, offset, role] = value
        return value

    def _chain(self, sums: Words) -> bytes:
        if len(sums) > len(self._powers):
            self._powers = self._powers_up_to(2 * len(sums))
        chained: Words = np.add.accumulate(_mix(sums) * self._powers[: len(sums)])
        return _mix(chained).astype("<u8", copy=False).tobytes()

    def _chain_few(self, sums: Sequence[int]) -> bytes:
        """Chain a few sums as `_chain` does."""
        chained, hashes = 0, []
        for total, power in zip(sums, self._first_powers, strict=False):
            chained = (chained + _mix_one(total) * power) & _MASK
            hashes.append(_mix_one(chained))
        return struct.pack(f"<{len(hashes)}Q", *hashes)

    def _role_hash(self, role: str) -> int:
        usual = self._usual_roles.get(role)
        return self._named_hash("", role) if usual is None else usual

    def _named_hash(self, kind: str, name: str) -> int:
        """Return the hash of a name among those of its kind."""
        data = name.encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(data, key=self._secret, person=kind.encode(), digest_size=8).digest(), "little")

    def _draw(self, purpose: str, count: int) -> Words:
        """Secret numbers for one purpose, the same for the same key everywhere."""
        digests = (
            blake2b(f"{purpose} {number}".encode(), key=self._secret, digest_size=8).digest() for number in range(count)
        )
        return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)

    def _powers_up_to(self, count: int) -> Words:
        powers: Words = np.cumprod(np.full(count, self._base), dtype=np.uint64)
        return powers


def _mix(values: Words) -> Words:
    """Spread every bit over all others (the finaliser of SplitMix64), in place on a fresh array."""
    first, second, third = _SHIFT_WORDS
    mixed = values ^ (values >> first)
    mixed *= _FACTOR_WORDS[0]
    mixed ^= mixed >> second
    mixed *= _FACTOR_WORDS[1]
    mixed ^= mixed >> third
    return mixed


def _mix_one(value: int) -> int:
    """Return what `_mix` makes of one word."""
    first, second, third = _SHIFTS
    value = ((value ^ (value >> first)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> second)) * _FACTORS[1]) & _MASK
    return value ^ (value >> third)


# Depths of a prompt in whole blocks: every 128 tokens for routes, ends of messages for marks.


#: Tokens between two depths.
STEP_TOKENS = 128
#: Depths after which the distance doubles: a prompt of a million tokens has some hundred routes, not 8,000.
_EVEN_DEPTHS = 64
#: Routes' depths from one mark to the next within a message.
_COARSE = 4
#: Grids in memory: the tokens of a block differ by model and change a little with the learned ratio.
_MAX_GRIDS = 16


def depths_of(full_blocks: int, block_tokens: float) -> tuple[int, ...]:
    """Return the depths of a prompt, ascending, in blocks.

    They do not depend on the prompt's length, so a longer prompt with the same beginning has all of them.

    Example
    -------
    >>> depths_of(9, block_tokens=64.0)
    (2, 4, 6, 8)
    """
    grid = _grid(max(1, round(STEP_TOKENS / block_tokens)))
    return grid[: bisect_right(grid, full_blocks)]


def marked_depths(full_blocks: int, block_tokens: float, boundaries: Sequence[int], *, behind: int = 0) -> list[int]:
    """Return the depths that routers name to each other, ascending: ends of messages, every 512 tokens, the last block.

    Those up to `behind` are left out. Prompts mostly share whole messages; those that share the beginning of a long one
    lose less than 512 tokens of it. One without known messages has the depths of routes.

    Example
    -------
    >>> marked_depths(20, block_tokens=64.0, boundaries=(200, 1000))
    [3, 8, 15, 16, 20]
    >>> marked_depths(20, block_tokens=64.0, boundaries=(200, 1000), behind=8)
    [15, 16, 20]
    """
    grid = _grid(max(1, round(STEP_TOKENS / block_tokens)), _COARSE if boundaries else 1)
    depths = set(grid[bisect_right(grid, behind) : bisect_right(grid, full_blocks)])
    depths.update([int(end / block_tokens) for end in boundaries[bisect_left(boundaries, behind * block_tokens) :]])
    depths.add(full_blocks)
    ascending = sorted(depths)
    return ascending[bisect_right(ascending, behind) : bisect_right(ascending, full_blocks)]


@lru_cache(maxsize=_MAX_GRIDS)
def _grid(step: int, factor: int = 1) -> tuple[int, ...]:
    depths: list[int] = []
    depth = 0
    while (depth := depth + step) <= MAX_BLOCKS:
        depths.append(factor * depth)
        if depth >= _EVEN_DEPTHS * step:
            step *= 2
    return tuple(depths)


# The tokens of a prompt: estimated from its size, exact, or those of a simulated engine.
#
# Owns one ratio of UTF-8 bytes of prompt text per token for each model, fed by `prompt_tokens` of responses
# (`BytesPerToken`), the record of exact tokens (`ExactPrompt`), and the token ids of simulated engines
# (`simulated_tokens`). Leaves tokenizers to `gorgo.live.tokens`.


#: English prose and code under the usual vocabularies; used until a model reports its counts.
PRIOR_BYTES_PER_TOKEN = 4.0
#: Text lies between one byte a token (rare scripts, random bytes) and 16 (long runs of blanks). Beyond them the count
#: is of images or of the template, not of text, and teaches nothing.
LOW, HIGH = 1.0, 16.0
#: What the prior weighs: one long prompt outweighs it, one "hello" does not.
PRIOR_TOKENS = 1_000.0
#: Older prompts fade: once so many tokens are counted, all of them count half.
MEMORY_TOKENS = 1_000_000.0
#: A client names the model, so their number and length are bounded.
MAX_MODELS = 1_000
#: Models whose ratio outlives the process, in some 100 KB of the state file at most.
MAX_ENTRIES = 256


@dataclass(slots=True)
class _ModelRatio:
    text_bytes: float = PRIOR_BYTES_PER_TOKEN * PRIOR_TOKENS
    tokens: float = PRIOR_TOKENS


class BytesPerToken:
    """Bytes per token of each model: the mean over its requests, weighted by tokens and decaying.

    Example
    -------
    >>> ratios = BytesPerToken()
    >>> ratios.learn("tiny", text_bytes=20_000, prompt_tokens=9_000)
    >>> ratios.ratio("tiny"), ratios.ratio("another")
    (2.4, 4.0)
    """

    def __init__(self) -> None:
        self._models = Lru[str | None, _ModelRatio](MAX_MODELS)

    def ratio(self, model: str | None) -> float:
        """Return the bytes per token of `model`; the prior for a new one."""
        ratio = self._models.get(_key(model))
        return PRIOR_BYTES_PER_TOKEN if ratio is None else ratio.text_bytes / ratio.tokens

    def learn(self, model: str | None, *, text_bytes: int, prompt_tokens: int) -> None:
        """Take in that a prompt of `text_bytes` bytes had `prompt_tokens` tokens."""
        if prompt_tokens <= 0 or not LOW <= text_bytes / prompt_tokens <= HIGH:
            return
        key = _key(model)
        ratio = self._models.use(key)
        if ratio is None:
            ratio = _ModelRatio()
            self._models.put(key, ratio)
        ratio.text_bytes += text_bytes
        ratio.tokens += prompt_tokens
        if ratio.tokens > MEMORY_TOKENS:
            ratio.text_bytes /= 2
            ratio.tokens /= 2

    def entries(self) -> list[list[Any]]:
        """Return what is learned as JSON: lists of model, bytes, tokens, of the newest models, the latest last."""
        return [[model, each.text_bytes, each.tokens] for model, each in self._models.items()][-MAX_ENTRIES:]

    def restore(self, entries: object) -> None:
        """Take in `entries` of a former process. Raises `ValueError` for any other value."""
        for model, text_bytes, tokens in lists_of(entries, 3):
            if not (is_name(model) and is_number(text_bytes) and is_number(tokens) and tokens >= 1):
                raise ValueError(f"{[model, text_bytes, tokens]}: expected model, bytes, tokens")
            if not 0.99 * LOW <= text_bytes / tokens <= 1.01 * HIGH:  # sums are rounded
                raise ValueError(f"{model}: expected {LOW:g} to {HIGH:g} bytes per token")
            self._models.put(model, _ModelRatio(float(text_bytes), float(tokens)))


def _key(model: str | None) -> str | None:
    return None if model is None or len(model) > MAX_NAME else model


@record
class ExactPrompt:
    """What exact tokens tell of a prompt.

    Parameters
    ----------
    model:
        Its model with a tokenizer; `None` where the client sent token ids.
    tokens:
        Their number.
    kv_hashes:
        Own hashes of its full blocks, by tokens per block (`core.prefix.kv_source`).
    boundaries:
        Tokens at the end of each message, ascending; empty if they are not known exactly.
    """

    model: str | None
    tokens: int
    kv_hashes: Mapping[int, Sequence[int]]
    boundaries: Sequence[int] = ()


# Token ids of simulated engines: one for each four bytes of a prompt's text.


#: Bytes of text per token; also the bytes of a packed token id.
TEXT_TOKEN_BYTES = 4


def simulated_tokens(text: bytes, adapter: str | None = None) -> bytes:
    """Return the packed token ids of a prompt: its text, filled up to whole tokens. An empty prompt has one token.

    The first token differs for each adapter, so adapters share no prefix.

    Example
    -------
    >>> simulated_tokens(b"Hello")
    b'Hello\\x00\\x00\\x00'
    """
    size = max(1, -(-len(text) // TEXT_TOKEN_BYTES)) * TEXT_TOKEN_BYTES
    tokens = text.ljust(size, b"\0")
    if adapter is None:
        return tokens
    key = adapter.encode("utf-8", "replace")[:64]
    first = blake2b(tokens[:TEXT_TOKEN_BYTES], key=key, digest_size=TEXT_TOKEN_BYTES).digest()
    return first + tokens[TEXT_TOKEN_BYTES:]
