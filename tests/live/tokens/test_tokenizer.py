"""Tokenizers and chat templates of models, from their files."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorgo.core.prefix.kv_source import token_bytes
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live import tokens as exact_tokens
from gorgo.live.encoded_prompt import TemplateFailedError
from gorgo.live.tokens import ChatTemplate, FileTokenizer, SegmentCache, read_template, read_tokenizer, require_extra
from tests.live.tokens.files import (
    CHATML,
    LLAMA3,
    NO_SYSTEM,
    SPECIAL,
    conversation,
    model_folder,
    needs_tokenizers,
    reference_ids,
    tokenizer_json,
)

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


USER = conversation("hi")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(source: str, **options: object) -> str:
    return ChatTemplate(source, TOKENS).render(USER, options=options)


def test_three_families_render_as_transformers_does() -> None:
    chat = conversation("one", "two", "three")
    assert ChatTemplate(CHATML, {}).render(chat) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>"}).render(conversation(" hi ", system="be brief")) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert ChatTemplate(NO_SYSTEM, TOKENS).render(chat) == "<s>[INST] one [/INST]two</s>[INST] three [/INST]"


def test_a_template_without_a_generation_prompt_ends_after_the_last_message() -> None:
    text = ChatTemplate(CHATML, {}).render(USER, add_generation_prompt=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'b': 1, 'a': 'ü<'} | tojson }}", '{"b": 1, "a": "ü<"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("  {% if tools is none %}\n  yes\n  {% endif %}\n", "  yes\n"),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2026"),
        ("{{ missing_token }}|{{ thinking }}", "|True"),
        ("{% set n = namespace(x=2) %}{% set n.x = n.x * 3 %}{{ n.x }} {{ 'ab' * 2 }} {{ 2 ** 3 }}", "6 abab 8"),
    ],
)
def test_what_published_templates_use_is_there(source: str, expected: str) -> None:
    date = datetime(2026, 3, 5, tzinfo=UTC)
    template = ChatTemplate(source, TOKENS, date=lambda: date)
    assert template.render(USER, options={"thinking": True}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.x.y }}",
        "{% for n in range(100001) %}{% endfor %}",
        "{{ 'x' * 100000000 }}",
        "{{ 100000000 * [1] }}",
        "{{ 9 ** 65 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_breaks_out_or_fails_renders_nothing(source: str) -> None:
    with pytest.raises(TemplateFailedError):
        rendered(source)


def test_a_failure_holds_no_text_of_the_prompt() -> None:
    with pytest.raises(TemplateFailedError) as raised:
        ChatTemplate("{{ raise_exception(messages[0].content) }}", {}).render(conversation("a secret"))
    assert "secret" not in str(raised.value)


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_tokens, "MAX_OUTPUT", 1_000)
    with pytest.raises(TemplateFailedError, match="over 1,000 characters"):
        rendered("{% for n in range(1001) %}{{ n }}{% endfor %}")


def test_the_time_of_a_rendering_is_bounded() -> None:
    seconds = count(step=exact_tokens.MAX_RENDER_S)
    template = ChatTemplate("{% for n in range(1000) %}{{ n }}{% endfor %}", {}, clock=lambda: next(seconds))
    with pytest.raises(TemplateFailedError, match=r"over 0\.1 s"):
        template.render(USER)
    assert next(seconds) < 1.0, "it ended at once"


def test_repetitions_are_bounded_by_both_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_tokens, "MAX_REPEATED", 6)
    assert rendered("{{ 'ab' * 3 }}{{ 3 * 'ab' }}") == "abababababab"
    for source in ("{{ 'ab' * 4 }}", "{{ 4 * 'ab' }}"):
        with pytest.raises(TemplateFailedError):
            rendered(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ a", "{% for x in y %}", "a\n{% nosuch %}"])
def test_a_syntax_error_is_named_with_its_line(source: str) -> None:
    with pytest.raises(TemplateFailedError, match=f"line {1 + source.count(chr(10))}: "):
        ChatTemplate(source, {})


# -- files
def folder(path: Path, **files: object) -> Path:
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return path / "tokenizer.json"


def test_the_files_beside_the_tokenizer_are_read_as_engines_do(tmp_path: Path) -> None:
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    tokenizer = folder(tmp_path, tokenizer_config__json=config)
    template = read_template(tokenizer, None)
    assert template is not None
    assert template.render(USER) == "config </s>"
    folder(tmp_path, chat_template__jinja="file {{ bos_token }}")
    template = read_template(tokenizer, None)
    assert template is not None
    assert template.render(USER) == "file <s>"


def test_a_given_file_counts_before_those_beside_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, chat_template__jinja="beside", tokenizer_config__json={"bos_token": "<s>"})
    folder(tmp_path, other__json={"chat_template": [{"name": "default", "template": "given {{ bos_token }}"}]})
    template = read_template(tokenizer, tmp_path / "other.json")
    assert template is not None
    assert template.render(USER) == "given <s>"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert read_template(tmp_path / "tokenizer.json", None) is None
    assert read_template(folder(tmp_path, tokenizer_config__json={"bos_token": "<s>"}), None) is None


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "Expecting property name"),
        ("[]", "is no JSON object"),
        ("{}", "has no template"),
        ('{"chat_template": 3}', "has no template"),
        ('{"chat_template": [{"name": "tool_use", "template": "x"}]}', "has no template"),
        ('{"chat_template": "{% if %}"}', "line 1: Expected an expression"),
    ],
)
def test_a_file_without_a_usable_template_is_named(tmp_path: Path, content: str, found: str) -> None:
    file = tmp_path / "given.json"
    file.write_text(content)
    with pytest.raises(InvalidValueError) as raised:
        read_template(tmp_path / "tokenizer.json", file)
    assert str(raised.value).startswith(f"models[].chat_template: '{file}'")
    assert found in str(raised.value)


def test_a_missing_file_of_the_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="No such file"):
        read_template(tmp_path / "tokenizer.json", tmp_path / "none.jinja")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "given.jinja").write_bytes(b"ab\xff")
    with pytest.raises(InvalidValueError, match="byte 2 is not UTF-8"):
        read_template(tmp_path / "tokenizer.json", tmp_path / "given.jinja")
