"""Random weights of a small Llama, shared by the GGUF file and the Hugging Face checkpoint.

Channel 0 of the residual stream is held at one: every embedding starts it there and no layer writes to it. The output
matrix reads it as a bias towards the tokens that may be spoken, so the noise that the model says is printable text
without an end: `max_tokens` tokens, whatever the sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.real.vocabulary import Vocabulary, vocabulary

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
