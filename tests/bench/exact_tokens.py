"""Exact tokens of a conversation of about 24,000 tokens: its next turn, the same prompt again, and a long first prompt.

Times are processor time of the event loop's thread: what other requests wait for. New text of over `QUICK_CHARS` is
encoded in another thread; `in all` is how long such a turn takes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gorgo.config.model import ModelConfig
from gorgo.core.prompt.fingerprint import Fingerprinter
from gorgo.live.parsing.json_body import read_fields
from gorgo.live.prompt_tokens import PromptTokens
from gorgo.live.tokens import ModelTokens, read_models
from tests.live.tokens.files import CHATML, conversation, model_folder

ROUTE = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
#: Tokens of the conversation, those of a turn, and those of a long first prompt; about so many characters each.
TOKENS, TURN_TOKENS, FIRST_TOKENS = 24_000, (150, 50), 100_000
CHARS = {"tokenizer": 3.2, "simulated": 4.0}
ROUNDS = 60


def run() -> None:
    """Print p50 and p99 in milliseconds for each tokenizer and block size."""
    prose = " ".join(page.read_text() for page in sorted(ROOT.glob("docs/**/*.md")))
    with TemporaryDirectory() as folder:
        file = model_folder(Path(folder) / "model", template=CHATML, texts=[prose], entries=16_000)
        columns = ("turn, p50 / p99", "again, p50 / p99", "turn in all")
        print(f"{'tokenizer':<10} {'block':>5}  {'prompt':>7}  {'  '.join(f'{column:>16}' for column in columns)}")
        for tokenizer in (str(file), "simulated"):
            models = read_models([ModelConfig(name="m", tokenizer=tokenizer)])
            for block_tokens in (16, 64, 1):
                asyncio.run(_turns(models, prose, Path(tokenizer).stem, block_tokens))
            asyncio.run(_first(models, prose, Path(tokenizer).stem))


async def _turns(models: dict[str, ModelTokens], prose: str, name: str, block_tokens: int) -> None:
    prompts = PromptTokens(models, lambda _: (block_tokens,), lambda _: None)
    rng, tokens = random.Random(block_tokens), 0
    chars = CHARS[name]
    long = [_text(prose, rng, 600 * chars) for _ in range(TOKENS // 600 | 1)]
    await _count(prompts, long)
    turn, again, whole = [], [], []
    for _ in range(ROUNDS):
        # Each is the next turn of the same conversation, so that its length stays.
        texts = [*long, *(_text(prose, rng, new * chars) for new in TURN_TOKENS)]
        tokens, spent_s, whole_s = await _count(prompts, texts)
        turn.append(spent_s)
        whole.append(whole_s)
        again.append((await _count(prompts, texts))[1])
    cells = [_cell(times) for times in (turn, again, whole)]
    print(f"{name:<10} {block_tokens:>5}  {tokens:>7,}  {'  '.join(f'{cell:>16}' for cell in cells)}")


async def _first(models: dict[str, ModelTokens], prose: str, name: str) -> None:
    prompts = PromptTokens(models, lambda _: (16,), lambda _: None)
    text = _text(prose * 4, random.Random(1), FIRST_TOKENS * CHARS[name])
    tokens, spent_s, whole_s = await _count(prompts, [text])
    loop, whole = f"{spent_s * 1e3:.0f} ms of the loop", f"{whole_s * 1e3:.0f} ms in all"
    print(f"{name:<10} first prompt of {tokens:,} tokens: {loop}, {whole}")


async def _count(prompts: PromptTokens, texts: list[str]) -> tuple[int, float, float]:
    """Return the tokens of a conversation, the time of this thread, and the time until they are known."""
    body = json.dumps({"messages": conversation(*texts)}).encode()
    fields = read_fields(ROUTE, body, Fingerprinter(key=1))
    began_s, started = time.perf_counter(), time.thread_time()
    exact = await prompts.exact_prompt(ROUTE, fields, model="m", base="m")
    assert exact is not None
    return exact.tokens, time.thread_time() - started, time.perf_counter() - began_s


def _cell(times: list[float]) -> str:
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return f"{p50:.2f} / {p99:.2f}"


def _text(prose: str, rng: random.Random, chars: float) -> str:
    start = rng.randrange(len(prose) - round(chars))
    return prose[start : start + round(chars)]
