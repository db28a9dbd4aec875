from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest

from gorgo.errors import InvalidValueError
from gorgo.live.encoded_prompt import TemplateFailedError
from gorgo.live.tokens import model_tokens
from gorgo.live.tokens.model_tokens import ChatTemplate, read_template
from tests.live.tokens.files import CHATML, LLAMA3, NO_SYSTEM, conversation

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
    monkeypatch.setattr(model_tokens, "MAX_OUTPUT", 1_000)
    with pytest.raises(TemplateFailedError, match="over 1,000 characters"):
        rendered("{% for n in range(1001) %}{{ n }}{% endfor %}")


def test_the_time_of_a_rendering_is_bounded() -> None:
    seconds = count(step=model_tokens.MAX_RENDER_S)
    template = ChatTemplate("{% for n in range(1000) %}{{ n }}{% endfor %}", {}, clock=lambda: next(seconds))
    with pytest.raises(TemplateFailedError, match=r"over 0\.1 s"):
        template.render(USER)
    assert next(seconds) < 1.0, "it ended at once"


def test_repetitions_are_bounded_by_both_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tokens, "MAX_REPEATED", 6)
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
