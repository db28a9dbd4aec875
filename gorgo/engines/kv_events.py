"""Messages of KV cache events of SGLang and vLLM, decoded.

Owns the wire format (MessagePack) and its bounds. See `core.messages.kv_events` for the records and
`core.prefix.kv_index` for their use.

Theory of operation. Both engines send `[time, events, rank]`, by release as an array or a map, and so each event.
Fields were added at the end, so missing ones have defaults and further ones are ignored. A message is first split into
undecoded events, and each is then decoded alone, so that a bad one is counted and the others are applied. Only fields
that have a use are decoded, each into its own type: a hostile field takes a bounded multiple of its bytes.

Hashes are signed (SGLang), unsigned (vLLM) or a digest in bytes (vLLM by option). All become the low 64 bits, which is
what vLLM does itself.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder, encode

from gorgo.core.messages.kv_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch
from gorgo.core.prefix.kv_chain import TOKEN_BYTES, token_bytes
from gorgo.engines import kv_wire as wire
from gorgo.engines.kv_plain import decode_plain

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
        envelope = (wire.MAP_BATCH if wire.is_map(message) else wire.ARRAY_BATCH).decode(message)
        rank = wire.RANK.decode(envelope.rank) or 0
        if wire.length(envelope.events) > MAX_EVENTS:
            raise ValueError(f"expected at most {MAX_EVENTS:,} events")
        encoded = wire.EVENTS.decode(envelope.events)
    except _BAD as error:
        raise ValueError(f"no batch of KV events: {error}") from error
    if not 0 <= rank <= wire.MAX_RANK:
        raise ValueError(f"no batch of KV events: a rank from 0 to {wire.MAX_RANK} expected, not {rank}")
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
    decoder: Decoder[Any] = wire.MAP_EVENT if wire.is_map(raw) else wire.ARRAY_EVENT
    try:
        event = decoder.decode(raw)
    except msgspec.ValidationError:
        if wire.is_unknown_kind(raw):
            return None
        raise
    match event:
        case wire.StoredFields():
            return _stored(event)
        case wire.RemovedFields():
            return BlocksRemoved(_hashes(event.block_hashes), wire.TIERS.get(event.medium), _group(event.group_idx))
    return CacheCleared()


def _stored(event: wire.StoredFields) -> BlocksStored | None:
    if event.kv_cache_spec_kind not in wire.INDEXED_KINDS:
        return None
    hashes = _hashes(event.block_hashes)
    tokens = _tokens(event.token_ids)
    if tokens and len(tokens) != len(hashes) * (event.block_size or 0) * TOKEN_BYTES:
        raise ValueError(
            f"{len(tokens) // TOKEN_BYTES} token_ids: expected {len(hashes)} blocks of {event.block_size} tokens"
        )
    lora = wire.LORA.decode(event.lora_name)
    metadata = wire.SaltMetadata(lora_name=lora) if lora is None or isinstance(lora, str) else lora
    adapter = metadata.lora_name or (None if event.lora_id in (None, 0) else f"#{event.lora_id}")
    salt = event.cache_salt if isinstance(event, wire.StoredMap) else metadata.cache_salt
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
        tier=wire.TIERS.get(event.medium),
        group=_group(event.group_idx),
        adapter=adapter,
        cache_salt=salt,
        extra={place: b"".join(keys) for place, keys in extra.items()},
    )


def _extra(raw: Raw, adapter: str | None) -> dict[int, list[bytes]]:
    """Return the extra keys of each block that has any, still encoded, less the adapter's name."""
    if wire.length(raw) > _MAX_ITEMS:
        raise ValueError(f"extra_keys of {wire.length(raw):,} blocks: expected at most {_MAX_ITEMS:,}")
    name = None if adapter is None else encode(adapter)
    found = {}
    for place, keys in enumerate(wire.EXTRA_KEYS.decode(raw) or ()):
        if len(keys) > _MAX_KEYS_BYTES:
            raise ValueError(f"extra_keys of {len(keys):,} bytes for one block: expected at most {_MAX_KEYS_BYTES:,}")
        if others := [bytes(key) for key in wire.BLOCK_KEYS.decode(keys) or () if bytes(key) != name]:
            found[place] = others
    return found


def _only_text(keys: list[bytes]) -> str | None:
    if len(keys) != 1:
        return None
    try:
        return wire.TEXT.decode(keys[0])
    except msgspec.DecodeError:
        return None


def _tokens(raw: Raw) -> bytes:
    if wire.length(raw) > _MAX_ITEMS:
        raise ValueError(f"{wire.length(raw):,} token_ids: expected at most {_MAX_ITEMS:,}")
    try:
        return token_bytes(wire.TOKENS.decode(raw) or ())
    except msgspec.ValidationError:
        # Pages of pairs of tokens, under speculative decoding: a token and the next one.
        return token_bytes(token for token, _ in wire.TOKEN_PAIRS.decode(raw))


def _hashes(raw: Raw) -> tuple[int, ...]:
    if wire.length(raw) > _MAX_ITEMS:
        raise ValueError(f"{wire.length(raw):,} block_hashes: expected at most {_MAX_ITEMS:,}")
    return tuple(map(_low_bits, wire.HASHES.decode(raw)))


def _low_bits(value: wire.EngineHash) -> int:
    if isinstance(value, int):
        return value & wire.LOW_64_BITS
    if not 8 <= len(value) <= _MAX_DIGEST_BYTES:
        raise ValueError(f"a hash of {len(value)} bytes: expected 8 to {_MAX_DIGEST_BYTES}")
    return int.from_bytes(value[-8:], "big")


def _group(group: int | None) -> int:
    return group or 0


def _time(raw: Raw) -> float | None:
    try:
        sent_s: float | None = wire.TIME.decode(raw)
    except _BAD:
        return None
    return sent_s
