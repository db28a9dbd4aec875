"""One request inside the engine model: its lengths, progress and tokens.

Owns the record; `model` moves it through its stages.
"""

from __future__ import annotations

from enum import Enum

from gorgo.sim.engine.kv_cache import CacheNode


class Stage(Enum):
    """Where a request is in its life."""

    NEW = "new"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    ABORTED = "aborted"


#: The stages as names of their own: in Python 3.11 a member of an Enum takes eight times as long to read.
NEW, WAITING, PREFILLING, DECODING, FINISHED, ABORTED = Stage


class EngineRequest:
    """A request and its progress in one engine. Callers may subclass it.

    Parameters
    ----------
    key:
        The prompt as cache items (four bytes a token in a served engine). A prompt that does not end on an item has
        tokens behind the last one, which are never cached.
    prompt_tokens, output_tokens:
        Lengths; exactly `output_tokens` (at least one) are generated.
    output_key:
        The output as items; may be empty, then the output is never cached.
    """

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "contents",
        "emitted",
        "first_token_s",
        "handle",
        "key",
        "output_key",
        "output_tokens",
        "prefilled_tokens",
        "private_tokens",
        "prompt_tokens",
        "reserved_tokens",
        "stage",
        "submitted_s",
    )

    def __init__(self, key: bytes, *, prompt_tokens: int, output_tokens: int, output_key: bytes = b"") -> None:
        assert min(prompt_tokens, output_tokens) >= 1, "an engine computes and emits at least one token"
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.output_key = output_key
        self.stage = NEW
        self.submitted_s = 0.0
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens = 0
        #: Prompt tokens whose KV exists, cached ones included.
        self.prefilled_tokens = 0
        self.emitted = 0
        self.private_tokens = 0
        self.reserved_tokens = 0
        self.handle: CacheNode | None = None
        #: Of an engine with blocks: the content of each full one, computed once.
        self.contents: tuple[int, ...] | None = None

    @property
    def finished(self) -> bool:
        return self.emitted == self.output_tokens
