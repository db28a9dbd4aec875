"""The model that the other tests believe: its vocabulary, and that it is the same on each run."""

from __future__ import annotations

from pathlib import Path

import httpx

from gorgo.lab.traces.text import prompt_text
from tests.real.llama_server import LlamaServer
from tests.real.tiny_model import make_tiny_model
from tests.real.vocabulary import byte_letters, vocabulary


def test_the_same_seed_makes_the_same_file(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "first.gguf").read_bytes()
    assert make_tiny_model(tmp_path / "second.gguf").read_bytes() == first
    assert make_tiny_model(tmp_path / "third.gguf", seed=1).read_bytes() != first


def test_every_byte_and_every_syllable_is_one_token_of_the_vocabulary() -> None:
    words = vocabulary()
    assert len(set(words.tokens)) == len(words.tokens) == 835
    assert set(byte_letters()) <= set(words.tokens)
    assert len(words.spoken) == 256


def test_a_prompt_of_a_trace_has_as_many_tokens_for_the_engine_as_in_the_trace(
    llama_servers: tuple[LlamaServer, LlamaServer],
) -> None:
    text = prompt_text([1, 2], 700).decode().rstrip()
    answer = httpx.post(f"{llama_servers[0].url}/tokenize", json={"content": text})
    assert len(answer.json()["tokens"]) == 700
