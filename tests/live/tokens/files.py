"""Real tokenizer files, trained in the test, and chat templates of three families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_tokenizers = pytest.mark.skipif(
    find_spec("tokenizers") is None, reason="TOKENIZERS SKIPPED: tokenizers is not installed (extra `tokens`)"
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
#: As Mistral's: a question and its answer share one pair of tokens, and there is no system message.
NO_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES: Mapping[str, str] = {"chatml": CHATML, "llama3": LLAMA3, "no-system": NO_SYSTEM}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]"),
)
_TEXT = (
    "The router sends each request to a replica. A replica is one engine process at a URL.",
    "Where are the 17 blocks of this prompt cached, and how many tokens are left to compute?",
    "Grüße aus Frankfurt: naïve café, 東京の天気, and a tab\tor two\n\n  with    blanks.",
    "def chain(tokens, block): return [hash(tokens[:end]) for end in range(block, len(tokens), block)]",
)


@cache
def tokenizer_json(bos: str | None = None, texts: Sequence[str] = _TEXT * 3, entries: int = 400) -> str:
    """Return a byte-level BPE tokenizer; with `bos` it begins a plain text with that token, as Llama's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    text: str = tokenizer.to_str()
    return text


def reference_ids(text: str, *, bos: str | None = None, add_special_tokens: bool = False) -> list[int]:
    """Return the ids of a whole text by the library alone, as an engine encodes it."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_str(tokenizer_json(bos)).encode(text, add_special_tokens=add_special_tokens).ids
    return ids


def model_folder(
    path: Path,
    *,
    template: str | None = None,
    bos: str | None = None,
    texts: Sequence[str] = _TEXT * 3,
    entries: int = 400,
) -> Path:
    """Write the files of a model as an engine loads them; return its tokenizer.json."""
    path.mkdir(exist_ok=True)
    file = path / "tokenizer.json"
    file.write_text(tokenizer_json(bos, tuple(texts), entries))
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return file


def conversation(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return messages of a user and an assistant in turns."""
    roles: Sequence[str] = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *({"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts))]
