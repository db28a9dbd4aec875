"""A random model that llama.cpp serves: its vocabulary, weights and GGUF file; real work, and nothing of sense."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# --- The vocabulary of the tiny models: bytes, and the syllables in which this project's traces are written.
#
# Byte-level BPE as GPT-2 defines it, so that any text works. Each syllable of `gorgo.lab.prompt_text`, with or without
# a space before it, is one token: a prompt of n trace tokens is n engine tokens in every engine that loads this
# vocabulary.


END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, START, END)
#: ChatML without a default system message: the text of a prompt is the text of its messages.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in order of their ids, merges in order of rank, and the tokens that the tiny model is made to say."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    spoken: frozenset[int]

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def vocabulary() -> Vocabulary:
    """The one vocabulary; 835 tokens."""
    space = byte_letters()[0x20]
    open_syllables = [first + vowel for first, vowel in product("bdfgklmnprstvwyz", "aeio")]
    merges = [(syllable[0], syllable[1]) for syllable in open_syllables]
    merges += [(syllable, last) for syllable in open_syllables for last in "nrst"]
    merges += [(space, syllable + last) for syllable in open_syllables for last in "nrst"]
    tokens = (*SPECIAL, *byte_letters(), *(left + right for left, right in merges))
    spoken = frozenset(number for number, token in enumerate(tokens) if len(token) == 4 and token[0] == space)
    return Vocabulary(tokens=tokens, merges=tuple(merges), spoken=spoken)


def byte_letters() -> tuple[str, ...]:
    """GPT-2's letter for each byte: itself where that prints, else the next letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(hidden)) for byte in range(256))


# --- Random weights of a small Llama, shared by the GGUF file and the Hugging Face checkpoint.
#
# Channel 0 of the residual stream is held at one: every embedding starts it there and no layer writes to it. The
# output matrix reads it as a bias towards the tokens that may be spoken, so the noise that the model says is printable
# text without an end: `max_tokens` tokens, whatever the sampling.


Tensor = NDArray[np.float32]
#: Logits of tokens that may not be spoken are lower by twice this over the RMS of the stream: never sampled.
_BIAS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model; about 1.1 M parameters by default."""

    layers: int = 4
    hidden: int = 128
    feed_forward: int = 384
    heads: int = 4
    kv_heads: int = 2
    context: int = 32_768
    rope_base: float = 1e6
    norm_epsilon: float = 1e-6

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


def tiny_weights(shape: Shape, *, seed: int = 0) -> Mapping[str, Tensor]:
    """Tensors by their GGUF names, each as (outputs, inputs)."""
    words = vocabulary()
    rng = np.random.default_rng(seed)
    tensors = {
        "token_embd.weight": _embedding(rng, len(words.tokens), shape.hidden),
        "output_norm.weight": np.ones(shape.hidden, dtype=np.float32),
        "output.weight": _output(rng, words, shape.hidden),
    }
    for layer in range(shape.layers):
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in _layer(rng, shape).items()}
    return tensors


def _random(rng: np.random.Generator, outputs: int, inputs: int) -> Tensor:
    matrix: Tensor = rng.standard_normal((outputs, inputs), dtype=np.float32)
    matrix /= np.float32(np.sqrt(inputs))
    return matrix


def _embedding(rng: np.random.Generator, tokens: int, hidden: int) -> Tensor:
    table = rng.standard_normal((tokens, hidden), dtype=np.float32)
    table[:, 0] = 1.0
    return table


def _output(rng: np.random.Generator, words: Vocabulary, hidden: int) -> Tensor:
    matrix = _random(rng, len(words.tokens), hidden)
    matrix[:, 0] = [_BIAS if number in words.spoken else -_BIAS for number in range(len(words.tokens))]
    return matrix


def _layer(rng: np.random.Generator, shape: Shape) -> dict[str, Tensor]:
    hidden, inner = shape.hidden, shape.feed_forward
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return {
        "attn_norm.weight": np.ones(hidden, dtype=np.float32),
        "attn_q.weight": _random(rng, queries, hidden),
        "attn_k.weight": _random(rng, keys, hidden),
        "attn_v.weight": _random(rng, keys, hidden),
        "attn_output.weight": _without_channel_0(_random(rng, hidden, queries)),
        "ffn_norm.weight": np.ones(hidden, dtype=np.float32),
        "ffn_gate.weight": _random(rng, inner, hidden),
        "ffn_up.weight": _random(rng, inner, hidden),
        "ffn_down.weight": _without_channel_0(_random(rng, hidden, inner)),
    }


def _without_channel_0(matrix: Tensor) -> Tensor:
    matrix[0] = 0.0
    return matrix


# --- Writes GGUF version 3, the file that llama.cpp loads: metadata, then tensors, 32-byte aligned, little-endian.


Value = str | bool | int | float | Sequence[str] | Sequence[int]

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_TENSOR_F32 = 0


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Writes the whole file; tensors are given as (outputs, inputs) and stored with the inner dimension first."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _typed(value))
        offset = 0
        for name, tensor in tensors.items():
            file.write(_tensor_info(name, tensor, offset))
            offset += _padded(tensor.nbytes)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        for tensor in tensors.values():
            file.write(tensor.tobytes() + bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _tensor_info(name: str, tensor: NDArray[np.float32], offset: int) -> bytes:
    shape = tensor.shape[::-1]
    return _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _TENSOR_F32, offset)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case _:
            return struct.pack("<I", _ARRAY) + _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        return struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_string, texts))
    return struct.pack(f"<IQ{len(values)}i", _I32, len(values), *values)


# --- A random model that llama.cpp serves: does all the work of a real one and says nothing of sense.


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
