"""The tokenizers of the configuration, one record per model, read at the start and at a reload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gorgo.config.constants import SIMULATED_TOKENIZER
from gorgo.config.model import ModelConfig
from gorgo.errors import InvalidValueError
from gorgo.live.encoded_prompt import TemplateFailedError
from gorgo.live.tokens.chat_template import ChatTemplate, Message
from gorgo.live.tokens.chat_text import CHAT_ROUTE, chat_messages, plain_text, template_options
from gorgo.live.tokens.segments import SegmentCache
from gorgo.live.tokens.template_files import read_template, template_paths
from gorgo.live.tokens.tokenizer import FileTokenizer, read_tokenizer

#: Conversations that show where a template begins a message; without a system message for templates that refuse one.
_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
)
_SYSTEM: Message = {"role": "system", "content": "four"}
#: Path, size and time of change of a file; `None` for those of a missing one.
Stamp = tuple[tuple[str, int | None, int | None], ...]
_PROBES: tuple[tuple[Sequence[Message], Sequence[Message]], ...] = (
    ((_SYSTEM, *_TURNS[:1]), (_SYSTEM, *_TURNS)),
    (_TURNS[:1], _TURNS),
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text of a prompt; `messages` of a template, `None` for a plain text, which gets the tokenizer's affixes."""

    text: str
    messages: int | None


@dataclass(slots=True)
class FileTokens:
    """The tokenizer and the template of a model.

    `separator` is the special token before which texts are cut for the cache, `None` without one. With `is_marker` it
    begins each message and the answer.
    """

    tokenizer: FileTokenizer
    template: ChatTemplate | None
    separator: str | None
    is_marker: bool
    segments: SegmentCache
    #: Size and time of each file that it was read from.
    stamp: Stamp

    def rendered(self, route: str, values: Mapping[str, Any]) -> RenderedPrompt | None:
        """Return the text that an engine makes of a body; `None` if it is not known.

        Raises `TemplateFailedError`.
        """
        if route != CHAT_ROUTE:
            plain = plain_text(route, values)
            return None if plain is None else RenderedPrompt(plain, None)
        messages, options = chat_messages(values), template_options(values)
        if self.template is None or messages is None or options is None:
            return None
        generation = values.get("add_generation_prompt", True) is not False
        text = self.template.render(messages, add_generation_prompt=generation, options=options)
        return RenderedPrompt(text, len(messages))


@dataclass(slots=True)
class ModelTokens:
    """How the prompts of a model become tokens; without `files` as simulated engines count.

    `differs`: an engine has reported another count, so the model's prompts are estimated until a reload. `failed`: the
    template or the tokenizer has failed for a prompt, which is logged once.
    """

    name: str
    files: FileTokens | None = None
    differs: bool = False
    failed: bool = False


def read_models(
    models: Iterable[ModelConfig], known: Mapping[str, ModelTokens] | None = None
) -> dict[str, ModelTokens]:
    """Return the models that have a tokenizer. Raises `ConfigError` or `MissingExtra`; takes a second per file.

    Files of `known` models that have not changed are not read again.
    """
    return {model.name: _read(model, (known or {}).get(model.name)) for model in models if model.tokenizer is not None}


def _read(model: ModelConfig, known: ModelTokens | None) -> ModelTokens:
    if model.tokenizer is None or model.tokenizer == SIMULATED_TOKENIZER:
        return ModelTokens(model.name)
    path = Path(model.tokenizer)
    given = None if model.chat_template is None else Path(model.chat_template)
    stamp = _stamp(path, *template_paths(path, given))
    if known is not None and known.files is not None and known.files.stamp == stamp:
        return ModelTokens(model.name, known.files)
    tokenizer = read_tokenizer(path)
    template = read_template(path, given)
    separator, is_marker = (None, False) if template is None else _separator(model.name, tokenizer, template)
    cache = SegmentCache(tokenizer, separator=separator)
    return ModelTokens(model.name, FileTokens(tokenizer, template, separator, is_marker, cache, stamp))


def _stamp(*paths: Path) -> Stamp:
    found: list[tuple[str, int | None, int | None]] = []
    for path in paths:
        try:
            status = path.stat()
            found.append((str(path), status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((str(path), None, None))
    return tuple(found)


def _separator(name: str, tokenizer: FileTokenizer, template: ChatTemplate) -> tuple[str | None, bool]:
    """Return the special token that begins each message, and True; else the most frequent one, and False."""
    short, long, messages = _probes(name, template)
    found = tokenizer.separators((short, long))
    counts = tuple(count + 1 for count in messages)
    markers = [token for token in found if (short.count(token), long.count(token)) == counts]
    if markers:
        return min(markers, key=long.index), True
    repeated = [token for token in found if long.count(token) > short.count(token)]
    return max(repeated, key=long.count, default=None), False


def _probes(name: str, template: ChatTemplate) -> tuple[str, str, tuple[int, int]]:
    """Return a short and a long conversation as rendered, and the messages of each."""
    failure: TemplateFailedError | None = None
    for short, long in _PROBES:
        try:
            return template.render(short), template.render(long), (len(short), len(long))
        except TemplateFailedError as error:
            failure = error
    expected = "a template that renders a question, an answer and a question"
    raise InvalidValueError("models[].chat_template", f"that of {name!r} fails: {failure}", expected)
