"""The exact tokens of a prompt, where its model's tokenizer is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gorgo.core.record import record


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
        Own hashes of its full blocks, by tokens per block (`core.prefix.kv_chain`).
    boundaries:
        Tokens at the end of each message, ascending; empty if they are not known exactly.
    """

    model: str | None
    tokens: int
    kv_hashes: Mapping[int, Sequence[int]]
    boundaries: Sequence[int] = ()
