"""Sets of slots as integers, one bit per slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Below so many set bits a loop over them is faster than unpacking the whole mask (measured: about 20).
_FEW_BITS = 16


def set_bits(depths: NDArray[np.float64], mask: int, depth: float) -> None:
    """Write `depth` where `mask` has a bit."""
    if mask.bit_count() <= _FEW_BITS:
        for slot in slots_of(mask):
            depths[slot] = depth
        return
    size = len(depths)
    packed = np.frombuffer(mask.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    depths[np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)] = depth


def slots_of(mask: int) -> list[int]:
    """Return the slots of `mask`, lowest first."""
    slots = []
    while mask:
        low = mask & -mask
        slots.append(low.bit_length() - 1)
        mask ^= low
    return slots
