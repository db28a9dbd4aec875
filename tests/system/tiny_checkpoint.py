"""The tiny model as vLLM loads it and aiperf counts with it: a Hugging Face checkpoint and a hub cache around it.

The same vocabulary and weights as the GGUF file; written by hand, so that neither torch nor transformers is needed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.real.tiny_model import CHAT_TEMPLATE, END, END_OF_TEXT, SPECIAL, START, Shape, tiny_weights, vocabulary

#: The name of the model in the hub cache.
HUB_NAME = "local/tiny"
#: Prefill of 2,000 tokens takes tenths of a second on one core, so that overheads of a millisecond are a per cent.
SHAPE = Shape(layers=4, hidden=512, feed_forward=1536, heads=8, kv_heads=4)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def make_tiny_checkpoint(folder: Path, *, shape: Shape | None = None, seed: int = 0) -> Path:
    """Writes model, configuration and tokenizer into `folder` and returns it."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    weights = {_hub_name(name): tensor for name, tensor in tiny_weights(shape, seed=seed).items()}
    _write_safetensors(folder / "model.safetensors", weights)
    for name, content in {
        "config.json": _config(shape),
        "generation_config.json": {"eos_token_id": vocabulary().id_of(END)},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": _tokenizer_config(shape),
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def make_hub_cache(checkpoint: Path, cache: Path) -> Path:
    """Lays the checkpoint out as an entry of a hub cache, which is how aiperf wants its tokenizer when offline."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    revision = hashlib.sha1(b"".join(path.read_bytes() for path in files)).hexdigest()
    entry = cache / ("models--" + HUB_NAME.replace("/", "--"))
    snapshot = entry / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text(revision)
    for path in files:
        shutil.copy(path, snapshot)
    return cache


def _hub_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensor.tobytes() for tensor in tensors.values()))


def _config(shape: Shape) -> dict[str, Any]:
    words = vocabulary()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(words.tokens),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.norm_epsilon,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": words.id_of(END_OF_TEXT),
        "eos_token_id": words.id_of(END),
        "pad_token_id": words.id_of(END_OF_TEXT),
        "torch_dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    words = vocabulary()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(token) for token in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(words.tokens)},
            "merges": [list(merge) for merge in words.merges],
        },
    }


def _special(token: str) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": vocabulary().id_of(token), "content": token, "special": True, **plain}


def _tokenizer_config(shape: Shape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "additional_special_tokens": [START],
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
