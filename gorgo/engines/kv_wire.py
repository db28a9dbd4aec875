"""The fields of KV event messages of SGLang and vLLM, as both write them: as arrays and as maps.

Owns the structures that MessagePack is decoded into. See `kv_events` for what becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Raw, Struct
from msgspec.msgpack import Decoder, encode

from gorgo.core.messages.kv_events import KvTier

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
