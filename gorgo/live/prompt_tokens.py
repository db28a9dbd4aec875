"""Exact tokens of requests: counted, hashed by block, and compared with what engines report.

Owns when a prompt is counted, and where: short new texts on the event loop, longer ones in a thread (`PromptTokens`).
Owns the cache of hashes by part as well (`BlockHashes`). Leaves the ids to `tokens`.

Theory of operation. The tokenizer releases the interpreter, so a thread encodes while the loop runs. Hashing does not,
so it takes place on the loop, and lets other tasks run after every few milliseconds. Exact tokens that are wrong match
no block of an engine: once all replicas of a model have reported other counts, it is estimated for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from time import monotonic
from typing import TYPE_CHECKING

from gorgo.config.model import ModelConfig
from gorgo.core.lru import Lru
from gorgo.core.prefix.kv_source import HASH_BYTES, TOKEN_BYTES, chain_root, packed_chain, unpacked
from gorgo.core.prompt.fingerprint import ExactPrompt, simulated_tokens
from gorgo.core.prompt.parse import bounded, token_boundaries
from gorgo.live.encoded_prompt import UNCACHED, EncodedPrompt, EncodingFailedError, TemplateFailedError
from gorgo.live.logs import log
from gorgo.live.parsing.json_body import BodyFields

if TYPE_CHECKING:
    from gorgo.live.tokens import FileTokens, ModelTokens


# Own hashes of a prompt's token blocks (`core.prefix.kv_source`), cached by part, so that a longer prompt costs its new
# part.
#
# Theory of operation. A section is what a part adds to the prompt before it: the hashes of the blocks that end in it.
# Each section has a number, and its key is the number of the section before it and the key of the part. So a number
# stands for a whole prefix, and a prompt takes one lookup per part; its ids are not read. A section whose predecessor
# was evicted is not found again, and is evicted in its turn. Neither text nor token ids are stored.


#: Most blocks hashed in one step.
STEP_BLOCKS = 64
#: Memory: 30 million tokens in messages of 400 and blocks of 16, 4 million in blocks of 1.
MAX_BYTES = 32 << 20
#: Memory of a section beside its hashes.
_SECTION_BYTES = 400


class BlockHashes:
    """The cache of one proxy, for all models, block sizes, adapters and salts.

    Example
    -------
    >>> from gorgo.core.prefix.kv_source import chain_hashes, token_bytes
    >>> hashes, prompt = BlockHashes(), token_bytes(range(40))
    >>> hashes.get(EncodedPrompt.of_ids(prompt), block_tokens=16) == chain_hashes(prompt, block_tokens=16)
    True
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._numbers = 0
        #: Number and packed hashes of each section.
        self._sections = Lru[tuple[int, bytes], tuple[int, bytes]](max_bytes, weigh=_memory)

    def __len__(self) -> int:
        return len(self._sections)

    def get(self, prompt: EncodedPrompt, *, block_tokens: int, root: int = 0) -> list[int]:
        """Return the hash of each full block, all in one go."""
        steps = self.steps(prompt, block_tokens=block_tokens, root=root)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                hashes: list[int] = end.value
                return hashes

    def steps(self, prompt: EncodedPrompt, *, block_tokens: int, root: int = 0) -> Generator[int, None, list[int]]:
        """Return the hash of each full block; yield after each step with the blocks that it has hashed."""
        block_bytes = block_tokens * TOKEN_BYTES
        # Of another length than any key of a part.
        number, _ = self._stored((root, b"root" + block_tokens.to_bytes(4, "little") + prompt.origin), b"")
        sections: list[bytes] = []
        tokens = b""
        hashed = end = 0
        for part, key in zip(prompt.parts, prompt.keys, strict=True):
            end += len(part)
            section = self._sections.use((number, key))
            if section is None:
                tokens = tokens or b"".join(prompt.parts)
                before = next(
                    (int.from_bytes(each[-HASH_BYTES:], "little") for each in reversed(sections) if each), root
                )
                added: list[bytes] = []
                for start in range(hashed, end // block_bytes * block_bytes, STEP_BLOCKS * block_bytes):
                    step = tokens[start : min(start + STEP_BLOCKS * block_bytes, end)]
                    added.append(packed_chain(step, block_tokens=block_tokens, root=before))
                    before = int.from_bytes(added[-1][-HASH_BYTES:], "little")
                    yield len(added[-1]) // HASH_BYTES
                hashes = b"".join(added)
                section = (number, hashes) if key == UNCACHED else self._stored((number, key), hashes)
            number, hashes = section
            sections.append(hashes)
            hashed += len(hashes) // HASH_BYTES * block_bytes
        return unpacked(b"".join(sections))

    def check(self) -> None:
        """Assert the bound."""
        self._sections.check()

    def _stored(self, key: tuple[int, bytes], hashes: bytes) -> tuple[int, bytes]:
        """Return the section of this key, stored if it is missing."""
        section = self._sections.use(key)
        if section is None:
            self._numbers += 1
            section = (self._numbers, hashes)
            self._sections.put(key, section)
        return section


def _memory(section: tuple[int, bytes]) -> int:
    return len(section[1]) + _SECTION_BYTES


#: Characters of new text that are encoded on the event loop, in 0.2 to 0.4 ms: a turn of the thread takes half as long.
QUICK_CHARS = 512
#: Prompts that wait for the thread, the one in progress included; more are estimated.
MAX_WAITING = 32
#: Reports of a replica with another count, in a row, after which it counts otherwise: an engine that truncates a long
#: prompt, or a request that it has rewritten, differs now and then.
SEVERAL = 3
#: Time after which a model's prompts are counted again, s: a replica may have got another tokenizer, or have left.
RETRY_S = 600.0
#: Blocks hashed in one turn of the event loop: about 3 ms.
_BLOCKS_PER_TURN = 2048


class PromptTokens:
    """The tokens of one proxy's requests.

    Parameters
    ----------
    models:
        By name, as `read_models` returns them; replaced by a reload.
    block_sizes:
        Tokens per block of the engines' caches in use, by model.
    count:
        Counts a prompt by its result: `counted`, `skipped` or `different`.
    serving:
        Returns the names of the replicas that serve a model of `models`.
    clock:
        Seconds.
    """

    def __init__(
        self,
        models: Mapping[str, ModelTokens],
        block_sizes: Callable[[str | None], Collection[int]],
        count: Callable[[str], None],
        serving: Callable[[str], Collection[str]] = lambda _: (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.models = models
        self._serving = serving
        self._clock = clock
        self._block_sizes = block_sizes
        self._count = count
        self._hashes = BlockHashes()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def exact_prompt(
        self, route: str, fields: BodyFields, *, model: str | None, base: str | None, adapter: str | None = None
    ) -> ExactPrompt | None:
        """Return the exact tokens of a prompt; `None` if they are not known.

        `base` is the model with the tokenizer: another than `model` for an adapter, which is `adapter` too.
        """
        model_tokens = self.models.get(base or "")
        if model_tokens is not None and model_tokens.differs and not self._is_tried_again(model_tokens):
            return None
        encoded = None if model_tokens is None else await self._encoded(model_tokens, route, fields, adapter)
        if encoded is None and fields.token_ids is not None:
            encoded = EncodedPrompt.of_ids(fields.token_ids), ()
        if encoded is None:
            if model_tokens is not None:
                self._count("skipped")
            return None
        prompt, boundaries = encoded
        # Simulated engines know an adapter by the first token, and no salt.
        is_simulated = model_tokens is not None and model_tokens.files is None
        root = 0 if is_simulated else chain_root(adapter, _salt(fields))
        hashes = {size: await self._hashed(prompt, size, root) for size in self._block_sizes(model)}
        self._count("counted")
        return ExactPrompt(None if model_tokens is None else model_tokens.name, prompt.tokens, hashes, boundaries)

    def compare_report(self, exact: ExactPrompt, reported: int, replica: str) -> None:
        """Compare a count with the report of a replica's engine.

        One engine can err or lie: the model's prompts are estimated once all of its replicas differ several times in a
        row, and are counted again after a while.
        """
        model_tokens = self.models.get(exact.model or "")
        if model_tokens is None:
            return
        if reported == exact.tokens:
            model_tokens.differences.pop(replica, None)
            model_tokens.differs = False
            return
        before = model_tokens.differences.get(replica, 0)
        model_tokens.differences[replica] = min(before + 1, SEVERAL)
        if model_tokens.differs or model_tokens.differences[replica] < SEVERAL:
            return
        serving = self._serving(model_tokens.name)
        if serving:
            model_tokens.differences = {
                name: count for name, count in model_tokens.differences.items() if name in serving
            }
        model_tokens.differs = all(model_tokens.differences.get(name, 0) >= SEVERAL for name in serving)
        if model_tokens.differs:
            model_tokens.retry_s = self._clock() + RETRY_S
        if before == SEVERAL and not model_tokens.differs:
            return
        self._count("different")
        log(
            "prompt_tokens_differ",
            level=logging.WARNING,
            model=model_tokens.name,
            replica=replica,
            counted=exact.tokens,
            reported=reported,
            in_force=f"estimates, for {RETRY_S:g} s"
            if model_tokens.differs
            else "own counts: other replicas agree or are silent",
        )

    def close(self) -> None:
        """End the thread after its current prompt."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # -- helpers

    def _is_tried_again(self, model_tokens: ModelTokens) -> bool:
        """Return whether the prompts of a model are counted again: one more difference of each replica ends that."""
        if self._clock() < model_tokens.retry_s:
            return False
        model_tokens.differs = False
        model_tokens.differences = dict.fromkeys(model_tokens.differences, SEVERAL - 1)
        return True

    async def _encoded(
        self, model_tokens: ModelTokens, route: str, fields: BodyFields, adapter: str | None
    ) -> tuple[EncodedPrompt, tuple[int, ...]] | None:
        """Return the ids of a prompt and the ends of its messages."""
        if model_tokens.files is not None:
            try:
                return await self._by_files(model_tokens.files, route, fields)
            except UnicodeEncodeError:
                return None  # half a surrogate pair
            except (TemplateFailedError, EncodingFailedError) as error:
                _log_failure(model_tokens, error)
                return None
        prompt = fields.prompt
        if prompt is None or not prompt.is_single:
            return None
        packed = simulated_tokens(prompt.text, adapter)
        tokens = len(packed) // TOKEN_BYTES
        sketch = fields.sketch
        boundaries = token_boundaries(sketch.message_ends, size=sketch.text_bytes, tokens=tokens)
        return EncodedPrompt.of_ids(packed), boundaries

    async def _by_files(
        self, files: FileTokens, route: str, fields: BodyFields
    ) -> tuple[EncodedPrompt, tuple[int, ...]] | None:
        rendered = files.rendered(route, fields.values)
        prompt = None if rendered is None else await self._parts(files, rendered.text)
        if rendered is None or prompt is None:
            return None
        if rendered.messages is None:
            return _with_affixes(prompt, files), ()
        fits = files.is_marker and len(prompt.parts) - 1 == rendered.messages + 1 >= 2
        return prompt, _message_ends(prompt.parts) if fits else ()

    async def _parts(self, files: FileTokens, text: str) -> EncodedPrompt | None:
        """Return the ids of a text by segment; `None` if too many prompts wait."""
        cut = files.segments.cut(text)
        missing = list(cut.missing.values())
        if cut.missing_chars <= QUICK_CHARS:
            return files.segments.complete(cut, files.segments.encode(missing))
        if self._waiting >= MAX_WAITING:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gorgo-tokens")
        self._waiting += 1
        try:
            encoded = await asyncio.get_running_loop().run_in_executor(self._thread, files.segments.encode, missing)
        finally:
            self._waiting -= 1
        return files.segments.complete(cut, encoded)

    async def _hashed(self, prompt: EncodedPrompt, block_tokens: int, root: int) -> list[int]:
        steps = self._hashes.steps(prompt, block_tokens=block_tokens, root=root)
        blocks = 0
        while True:
            try:
                blocks += next(steps)
            except StopIteration as end:
                hashes: list[int] = end.value
                return hashes
            if blocks >= _BLOCKS_PER_TURN:
                blocks = 0
                await asyncio.sleep(0)


def read_tokenizers(
    models: Sequence[ModelConfig], before: Mapping[str, ModelTokens] | None = None
) -> dict[str, ModelTokens]:
    """Return `read_models`; without a model that has a tokenizer nothing of it is loaded.

    Raises `ConfigError` or `MissingExtra`.
    """
    if all(model.tokenizer is None for model in models):
        return {}
    from gorgo.live.tokens import read_models

    return read_models(models, before)


def _salt(fields: BodyFields) -> str | None:
    salt = fields.values.get("cache_salt")
    return salt if isinstance(salt, str) and salt else None


def _with_affixes(prompt: EncodedPrompt, files: FileTokens) -> EncodedPrompt:
    parts = (files.tokenizer.prefix, *prompt.parts, files.tokenizer.suffix)
    return EncodedPrompt(parts, (b"prefix", *prompt.keys, b"suffix"), prompt.origin)


def _message_ends(parts: Sequence[bytes]) -> tuple[int, ...]:
    """Return the tokens before the start of each message after the first, and before that of the answer."""
    starts = [size // TOKEN_BYTES for size in accumulate(map(len, parts[:-1]))]
    return tuple(bounded(starts[1:]))


def _log_failure(model_tokens: ModelTokens, error: TemplateFailedError | EncodingFailedError) -> None:
    if not model_tokens.failed:
        model_tokens.failed = True
        event = "chat_template_failed" if isinstance(error, TemplateFailedError) else "tokenizer_failed"
        log(event, level=logging.WARNING, model=model_tokens.name, error=str(error), in_force="estimates")
