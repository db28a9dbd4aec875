"""A random model that llama.cpp serves: does all the work of a real one and says nothing of sense."""

from __future__ import annotations

from pathlib import Path

from tests.real.gguf_file import Value, write_gguf
from tests.real.tiny_weights import Shape, tiny_weights
from tests.real.vocabulary import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL, vocabulary

_NORMAL, _CONTROL = 1, 3
_ALL_F32 = 0


def make_tiny_model(path: Path, *, shape: Shape | None = None, seed: int = 0) -> Path:
    """Writes the GGUF file (about 5 MB, some 50 ms) and returns its path."""
    shape = shape or Shape()
    write_gguf(path, {**_architecture(shape), **_tokenizer()}, tiny_weights(shape, seed=seed))
    return path


def _architecture(shape: Shape) -> dict[str, Value]:
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "general.file_type": _ALL_F32,
        "llama.vocab_size": len(vocabulary().tokens),
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_epsilon,
        "llama.rope.dimension_count": shape.head_size,
        "llama.rope.freq_base": shape.rope_base,
    }


def _tokenizer() -> dict[str, Value]:
    words = vocabulary()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in SPECIAL else _NORMAL for token in words.tokens],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in words.merges],
        "tokenizer.ggml.bos_token_id": words.id_of(END_OF_TEXT),
        "tokenizer.ggml.eos_token_id": words.id_of(END),
        "tokenizer.ggml.padding_token_id": words.id_of(END_OF_TEXT),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
