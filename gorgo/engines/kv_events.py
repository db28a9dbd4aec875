"""Messages of KV cache events of SGLang and vLLM, decoded.

Owns the wire format (MessagePack) and its bounds: short plain messages are decoded at once (`decode_plain`), all others
event by event (`decode_each`). See `core.messages.kv_events` for the records and `core.prefix.kv_index` for their use.

Theory of operation. Both engines send `[time, events, rank]`, by release as an array or a map, and so each event.
Fields were added at the end, so missing ones have defaults and further ones are ignored. A message is first split into
undecoded events, and each is then decoded alone, so that a bad one is counted and the others are applied. Only fields
that have a use are decoded, each into its own type: a hostile field takes a bounded multiple of its bytes.

Hashes are signed (SGLang), unsigned (vLLM) or a digest in bytes (vLLM by option). All become the low 64 bits, which is
what vLLM does itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import DecodeError, Raw, Struct
from msgspec.msgpack import Decoder, encode

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, KvTier
from gorgo.core.prefix.kv_source import TOKEN_BYTES, token_bytes

EngineHash = int | bytes
MAX_RANK = 65_535
LOW_64_BITS = (1 << 64) - 1
#: Memory by the engines' names for it; a missing one is the GPU's. Others (disks, other machines) are not indexed.
TIERS: Mapping[str | None, KvTier] = {None: KvTier.GPU, "GPU": KvTier.GPU, "CPU": KvTier.CPU, "CPU_PINNED": KvTier.CPU}
#: Kinds of KV cache groups whose blocks are cached as long as their prefix is. Those of windows and states are not.
INDEXED_KINDS = frozenset({None, "unknown", "full_attention", "mla_attention", "sink_full_attention"})
#: A field that is missing, undecoded.
NONE = Raw(encode(None))


class ArrayBatch(Struct, array_like=True):
    ts: Raw
    events: Raw
    rank: Raw = NONE


class MapBatch(Struct):
    events: Raw
    ts: Raw = NONE
    data_parallel_rank: Raw = NONE
    attn_dp_rank: Raw = NONE

    @property
    def rank(self) -> Raw:
        return self.attn_dp_rank if bytes(self.data_parallel_rank) == bytes(NONE) else self.data_parallel_rank


class StoredFields(Struct):
    """Fields in vLLM's positions, up to the last one with a use."""

    block_hashes: Raw
    parent_block_hash: EngineHash | None = None
    token_ids: Raw = NONE
    block_size: int | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: Raw = NONE
    extra_keys: Raw = NONE
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class StoredArray(StoredFields, array_like=True, tag="BlockStored"):
    pass


class StoredMap(StoredFields, tag_field="type", tag="BlockStored"):
    cache_salt: str | None = None


class RemovedFields(Struct):
    block_hashes: Raw
    medium: str | None = None
    group_idx: int | None = None


class RemovedArray(RemovedFields, array_like=True, tag="BlockRemoved"):
    pass


class RemovedMap(RemovedFields, tag_field="type", tag="BlockRemoved"):
    pass


class ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class MapKind(Struct):
    type: str


class ArrayKind(Struct, array_like=True):
    type: str


class SaltMetadata(Struct):
    """A map that SGLang's arrays had in the place of `lora_name`."""

    cache_salt: str | None = None
    lora_name: str | None = None


ARRAY_BATCH = Decoder(ArrayBatch)
MAP_BATCH = Decoder(MapBatch)
EVENTS = Decoder(list[Raw])
ARRAY_EVENT = Decoder(StoredArray | RemovedArray | ClearedArray)
MAP_EVENT = Decoder(StoredMap | RemovedMap | ClearedMap)
ARRAY_KIND = Decoder(ArrayKind)
MAP_KIND = Decoder(MapKind)
TIME = Decoder(float | None)
RANK = Decoder(int | None)
HASHES = Decoder(list[EngineHash])
TOKENS = Decoder(list[int] | None)
TOKEN_PAIRS = Decoder(list[tuple[int, int]])
LORA = Decoder(str | SaltMetadata | None)
EXTRA_KEYS = Decoder(list[Raw] | None)
BLOCK_KEYS = Decoder(list[Raw] | None)
TEXT = Decoder(str)
KNOWN_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def is_map(message: bytes) -> bool:
    """Return whether a value is a map, by its first byte."""
    return bool(message) and (0x80 <= message[0] <= 0x8F or message[0] in (0xDE, 0xDF))


def length(value: Raw) -> int:
    """Return the items of an array, by its head; 0 for another value."""
    head = bytes(memoryview(value)[:5])
    match head[:1]:
        case b"\xdc":
            return int.from_bytes(head[1:3], "big")
        case b"\xdd":
            return int.from_bytes(head[1:5], "big")
    return head[0] & 0x0F if head and 0x90 <= head[0] <= 0x9F else 0


def is_unknown_kind(event: bytes) -> bool:
    """Return whether an event is of another kind than those above, rather than bad."""
    kind = MAP_KIND.decode(event).type if is_map(event) else ARRAY_KIND.decode(event).type
    return kind not in KNOWN_KINDS


# Short messages of plain events, decoded at once: in a third of the time that `decode_each` takes. Their form is what
# both engines send today: an array of maps with integer hashes and no keys beside tokens. A message of any other form,
# or with any bad field, is none of these.


#: The engines' names for memories: one of a few takes no memory of its own. A message with another is not plain.
_Medium = Literal["GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", "STORAGE"]

#: Longest message that is decoded at once: its values take at most some megabytes.
MAX_PLAIN_BYTES = 64 * 1024


class _Stored(Struct, tag_field="type", tag="BlockStored", gc=False):
    """`StoredFields` of a plain message: each field is of its one usual type, so that msgspec reads it in one pass."""

    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    lora_id: None = None
    medium: _Medium | None = None
    lora_name: None = None
    extra_keys: list[None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class _Removed(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: _Medium | None = None
    group_idx: int | None = None


class _Cleared(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _Batch(Struct, array_like=True, gc=False):
    ts: float | None
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None


_BATCH = Decoder(_Batch)
_CLEARED = CacheCleared()


def decode_plain(message: bytes) -> KvEventBatch | None:
    """Return the events of a short message; `None` if it is not plain.

    >>> from msgspec.msgpack import encode
    >>> decode_plain(encode([1.5, [{"type": "BlockRemoved", "block_hashes": [-1]}]])).events[0].hashes
    (18446744073709551615,)
    """
    if len(message) > MAX_PLAIN_BYTES:
        return None
    try:
        batch = _BATCH.decode(message)
        events, skipped = _decoded(batch.events)
    except (DecodeError, ValueError, OverflowError, RecursionError):
        return None
    rank = batch.rank or 0
    if not 0 <= rank <= MAX_RANK:
        return None
    return KvEventBatch(batch.ts, rank, tuple(events), skipped, merged=len(batch.events) - len(events) - skipped)


def _decoded(sent: list[_Stored | _Removed | _Cleared]) -> tuple[list[KvEvent], int]:
    """Return the events, and how many are of no use.

    Removals in a row from one cache are one event: engines remove block by block.
    """
    events: list[KvEvent] = []
    skipped = 0
    pending: _Removed | None = None
    removed: list[int] = []
    for event in sent:
        if type(event) is _Removed:
            if pending is None or event.medium != pending.medium or event.group_idx != pending.group_idx:
                if pending is not None:
                    events.append(_removed(removed, pending))
                pending, removed = event, []
            removed += event.block_hashes
            continue
        if pending is not None:
            events.append(_removed(removed, pending))
            pending = None
        if type(event) is not _Stored:
            events.append(_CLEARED)
        elif event.kv_cache_spec_kind in INDEXED_KINDS:
            events.append(_plain_stored(event))
        else:
            skipped += 1
    if pending is not None:
        events.append(_removed(removed, pending))
    return events, skipped


def _removed(hashes: list[int], event: _Removed) -> BlocksRemoved:
    return BlocksRemoved(_plain_low_bits(hashes), TIERS.get(event.medium), event.group_idx or 0)


def _plain_stored(event: _Stored) -> BlocksStored:
    ids = event.token_ids
    if ids and len(ids) != len(event.block_hashes) * (event.block_size or 0):
        raise ValueError("tokens of other blocks")
    parent = event.parent_block_hash
    return BlocksStored(
        hashes=_plain_low_bits(event.block_hashes),
        parent=None if parent is None else parent & LOW_64_BITS,
        tokens=token_bytes(ids) if ids else b"",
        block_tokens=event.block_size if ids else None,
        tier=TIERS.get(event.medium),
        group=event.group_idx or 0,
        cache_salt=event.cache_salt,
    )


def _plain_low_bits(hashes: list[int]) -> tuple[int, ...]:
    if hashes and min(hashes) < 0:
        return tuple([value & LOW_64_BITS for value in hashes])
    return tuple(hashes)


#: Longest message. A prompt of a million tokens takes 5 MB, and a message has the events of one engine step.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Most events of a message: an engine sends some per request and step. Bounds the memory of a message of empty events.
MAX_EVENTS = 262_144
#: Most tokens or blocks of an event, twice the longest prompts: each takes up to 130 bytes while it is decoded.
_MAX_ITEMS = 2_097_152
#: Longest digest (SHA-512), and longest keys of one block: the adapter, images and a salt.
_MAX_DIGEST_BYTES = 64
_MAX_KEYS_BYTES = 4096

#: What decoding raises for a bad field; RecursionError for one nested too deep.
_BAD = (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError)


def decode_message(message: bytes) -> KvEventBatch:
    """Return the events of a message.

    Raise ValueError if it is no batch of events at all; an event that is none is counted in `rejected`.

    >>> message = encode([1.5, [["BlockRemoved", [-1], "GPU"], {"type": "BlockStored"}], 3])
    >>> batch = decode_message(message)
    >>> batch.rank, batch.events[0].hashes, batch.rejected
    (3, (18446744073709551615,), 1)
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message):,} bytes: expected at most {MAX_MESSAGE_BYTES:,}")
    return decode_plain(message) or decode_each(message)


def decode_each(message: bytes) -> KvEventBatch:
    """Return the events of a message of any form, each decoded alone. Raise ValueError as `decode_message`."""
    try:
        envelope = (MAP_BATCH if is_map(message) else ARRAY_BATCH).decode(message)
        rank = RANK.decode(envelope.rank) or 0
        if length(envelope.events) > MAX_EVENTS:
            raise ValueError(f"expected at most {MAX_EVENTS:,} events")
        encoded = EVENTS.decode(envelope.events)
    except _BAD as error:
        raise ValueError(f"no batch of KV events: {error}") from error
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"no batch of KV events: a rank from 0 to {MAX_RANK} expected, not {rank}")
    return _decode_events(encoded, _time(envelope.ts), rank)


def _decode_events(encoded: list[Raw], sent_s: float | None, rank: int) -> KvEventBatch:
    events: list[KvEvent] = []
    skipped = rejected = 0
    first_error: str | None = None
    for raw in encoded:
        try:
            event = _decode_event(bytes(raw))
        except _BAD as error:
            rejected += 1
            first_error = first_error or f"{type(error).__name__}: {error}"[:200]
            continue
        if event is None:
            skipped += 1
        else:
            events.append(event)
    return KvEventBatch(sent_s, rank, tuple(events), skipped, rejected, first_error)


def _decode_event(raw: bytes) -> KvEvent | None:
    """Return the event; `None` if the index has no use for it."""
    decoder: Decoder[Any] = MAP_EVENT if is_map(raw) else ARRAY_EVENT
    try:
        event = decoder.decode(raw)
    except msgspec.ValidationError:
        if is_unknown_kind(raw):
            return None
        raise
    match event:
        case StoredFields():
            return _stored(event)
        case RemovedFields():
            return BlocksRemoved(_hashes(event.block_hashes), TIERS.get(event.medium), _group(event.group_idx))
    return CacheCleared()


def _stored(event: StoredFields) -> BlocksStored | None:
    if event.kv_cache_spec_kind not in INDEXED_KINDS:
        return None
    hashes = _hashes(event.block_hashes)
    tokens = _tokens(event.token_ids)
    if tokens and len(tokens) != len(hashes) * (event.block_size or 0) * TOKEN_BYTES:
        raise ValueError(
            f"{len(tokens) // TOKEN_BYTES} token_ids: expected {len(hashes)} blocks of {event.block_size} tokens"
        )
    lora = LORA.decode(event.lora_name)
    metadata = SaltMetadata(lora_name=lora) if lora is None or isinstance(lora, str) else lora
    adapter = metadata.lora_name or (None if event.lora_id in (None, 0) else f"#{event.lora_id}")
    salt = event.cache_salt if isinstance(event, StoredMap) else metadata.cache_salt
    extra = _extra(event.extra_keys, adapter)
    parent = None if event.parent_block_hash is None else _low_bits(event.parent_block_hash)
    if parent is None and salt is None and 0 in extra and (salt := _only_text(extra[0])) is not None:
        # vLLM has the cache salt among the keys of the first block.
        extra.pop(0)
    return BlocksStored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_tokens=event.block_size if tokens else None,
        tier=TIERS.get(event.medium),
        group=_group(event.group_idx),
        adapter=adapter,
        cache_salt=salt,
        extra={block: b"".join(keys) for block, keys in extra.items()},
    )


def _extra(raw: Raw, adapter: str | None) -> dict[int, list[bytes]]:
    """Return the extra keys of each block that has any, still encoded, less the adapter's name."""
    if length(raw) > _MAX_ITEMS:
        raise ValueError(f"extra_keys of {length(raw):,} blocks: expected at most {_MAX_ITEMS:,}")
    name = None if adapter is None else encode(adapter)
    keys_by_block = {}
    for block, keys in enumerate(EXTRA_KEYS.decode(raw) or ()):
        if len(keys) > _MAX_KEYS_BYTES:
            raise ValueError(f"extra_keys of {len(keys):,} bytes for one block: expected at most {_MAX_KEYS_BYTES:,}")
        if others := [bytes(key) for key in BLOCK_KEYS.decode(keys) or () if bytes(key) != name]:
            keys_by_block[block] = others
    return keys_by_block


def _only_text(keys: list[bytes]) -> str | None:
    if len(keys) != 1:
        return None
    try:
        return TEXT.decode(keys[0])
    except msgspec.DecodeError:
        return None


def _tokens(raw: Raw) -> bytes:
    if length(raw) > _MAX_ITEMS:
        raise ValueError(f"{length(raw):,} token_ids: expected at most {_MAX_ITEMS:,}")
    try:
        return token_bytes(TOKENS.decode(raw) or ())
    except msgspec.ValidationError:
        # Pages of pairs of tokens, under speculative decoding: a token and the next one.
        return token_bytes(token for token, _ in TOKEN_PAIRS.decode(raw))


def _hashes(raw: Raw) -> tuple[int, ...]:
    if length(raw) > _MAX_ITEMS:
        raise ValueError(f"{length(raw):,} block_hashes: expected at most {_MAX_ITEMS:,}")
    return tuple(map(_low_bits, HASHES.decode(raw)))


def _low_bits(value: EngineHash) -> int:
    if isinstance(value, int):
        return value & LOW_64_BITS
    if not 8 <= len(value) <= _MAX_DIGEST_BYTES:
        raise ValueError(f"a hash of {len(value)} bytes: expected 8 to {_MAX_DIGEST_BYTES}")
    return int.from_bytes(value[-8:], "big")


def _group(group: int | None) -> int:
    return group or 0


def _time(raw: Raw) -> float | None:
    try:
        sent_s: float | None = TIME.decode(raw)
    except _BAD:
        return None
    return sent_s
