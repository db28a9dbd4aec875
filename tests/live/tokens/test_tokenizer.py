from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.prefix.kv_source import token_bytes
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.tokens.tokenizer import FileTokenizer, SegmentCache, read_tokenizer, require_extra
from tests.live.tokens.files import SPECIAL, model_folder, needs_tokenizers, reference_ids, tokenizer_json

PIECES = st.one_of(st.sampled_from(SPECIAL), st.text(max_size=12), st.sampled_from([" ", "\n\n", "<|im_", "start|>"]))


@pytest.fixture
def tokenizer(tmp_path: Path) -> FileTokenizer:
    return read_tokenizer(model_folder(tmp_path))


def encoded(cache: SegmentCache, text: str) -> bytes:
    cut = cache.cut(text)
    return b"".join(cache.complete(cut, cache.encode(list(cut.missing.values()))).parts)


@needs_tokenizers
@pytest.mark.parametrize("text", ["", "a", "The replica", "Grüße 東京 🙂\n\n  x", "<|im_start|>user\nhi<|im_end|>"])
def test_ids_are_those_of_the_library(tokenizer: FileTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == token_bytes(reference_ids(text))


@needs_tokenizers
def test_a_plain_prompt_has_the_token_at_its_beginning_that_the_engine_adds(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(model_folder(tmp_path, bos="<s>"))
    whole = reference_ids("The replica", bos="<s>", add_special_tokens=True)
    assert tokenizer.prefix + tokenizer.encode("The replica") + tokenizer.suffix == token_bytes(whole)
    assert tokenizer.prefix == token_bytes(reference_ids("<s>"))


@needs_tokenizers
@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12), st.sampled_from(["<|im_start|>", "<s>", "[INST]"]))
def test_a_text_cut_at_a_separator_has_the_ids_of_the_whole_text(pieces: list[str], separator: str) -> None:
    text = "".join(pieces)
    cache = SegmentCache(_shared(), separator=separator, max_bytes=2_000)
    for _ in range(2):
        assert encoded(cache, text) == token_bytes(reference_ids(text))
        cache.check()


@needs_tokenizers
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ["<|im_start|>"]),
        ({"lstrip": True}, []),
        ({"single_word": True}, []),
        ({"normalized": True}, []),
        ({"rstrip": True}, ["<|im_start|>"]),
    ],
)
def test_a_token_that_depends_on_what_is_before_it_is_no_separator(
    changed: dict[str, bool], expected: list[str]
) -> None:
    from tokenizers import Tokenizer

    file = json.loads(tokenizer_json())
    for token in file["added_tokens"]:
        if token["content"] == "<|im_start|>":
            token.update(changed)
    tokenizer = FileTokenizer(Tokenizer.from_str(json.dumps(file)))
    assert tokenizer.separators(["<|im_start|>user"]) == expected


@needs_tokenizers
@pytest.mark.parametrize("other", ["<|im_start|>x", "x<|im_", "start|>y", "im"])
def test_a_token_that_overlaps_with_another_one_is_no_separator(other: str) -> None:
    from tokenizers import AddedToken, Tokenizer

    library = Tokenizer.from_str(tokenizer_json())
    library.add_special_tokens([AddedToken(other, normalized=False)])
    assert FileTokenizer(library).separators(["<|im_start|>"]) == []


@needs_tokenizers
def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(tokenizer_json())
    library.enable_truncation(2)
    library.enable_padding(length=64)
    assert FileTokenizer(library).encode("The replica is here") == token_bytes(reference_ids("The replica is here"))


@needs_tokenizers
@pytest.mark.parametrize(
    ("content", "found"),
    [(b"no json", "expected ident at line 1"), (b"{}", "'tokenizer.json'"), (b"\xff\xfe", "'tokenizer.json'")],
)
def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, found: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"models\[\]\.tokenizer.*expected a tokenizer\.json") as raised:
        read_tokenizer(Path("tokenizer.json"))
    assert found in str(raised.value)


@needs_tokenizers
def test_a_missing_file_and_a_pipe_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="No such file"):
        read_tokenizer(tmp_path / "none.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InvalidValueError, match="is a pipe"):
        read_tokenizer(tmp_path / "pipe.json")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"tokenizers.*pip install 'gorgo-router\[tokens\]'"):
        require_extra()


@needs_tokenizers
def test_the_cache_of_segments_is_bounded_and_gives_up_the_longest_unused(tokenizer: FileTokenizer) -> None:
    cache = SegmentCache(tokenizer, separator="<|im_start|>", max_bytes=1_000)
    for number in range(20):
        encoded(cache, f"<|im_start|>message {number}<|im_start|>shared")
        cache.check()
    assert cache.cut("<|im_start|>shared").missing == {}
    assert cache.cut("<|im_start|>message 0").missing == {1: "<|im_start|>message 0"}


def _shared() -> FileTokenizer:
    from tokenizers import Tokenizer

    return FileTokenizer(Tokenizer.from_str(tokenizer_json()))
