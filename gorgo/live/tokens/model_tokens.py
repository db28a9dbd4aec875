"""The tokenizers of the configuration, one record per model, read at the start and at a reload.

Owns which requests have exact tokens, and the chat templates. Leaves the ids of a text to `tokenizer`.

- `ChatTemplate` renders messages as the engine does, within bounds.
- `ModelTokens` is how the prompts of a model become tokens.
- `TemplateEnvironment` is the sandbox in which templates run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gorgo.config.model import ModelConfig
from gorgo.config.values import SIMULATED_TOKENIZER
from gorgo.errors import InvalidValueError
from gorgo.live.encoded_prompt import TemplateFailedError
from gorgo.live.tokens.tokenizer import FileTokenizer, SegmentCache, read_file, read_tokenizer

# Chat templates: messages to the text that the engine encodes.
#
# Owns the rendering and its bounds. Leaves the sandbox to `TemplateEnvironment`.


#: Characters of a rendered prompt: twice the longest body that is rendered.
MAX_OUTPUT = 8 << 20
#: Longest rendering, s: it holds the event loop. A conversation of 1,000 messages takes some milliseconds.
MAX_RENDER_S = 0.1
#: Pieces of output between two readings of the clock.
_CLOCK_PIECES = 64

Message = Mapping[str, str]


class ChatTemplate:
    """One template of a model.

    Parameters
    ----------
    source:
        Jinja. Raises `TemplateFailedError` for a syntax error, with its line.
    special_tokens:
        Texts of `bos_token`, `eos_token` and the like.
    clock, date:
        Seconds for the bound on time, and the date for templates that print one.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float] = perf_counter,
        date: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        from jinja2.exceptions import TemplateSyntaxError

        environment = TemplateEnvironment()
        environment.globals["strftime_now"] = lambda form: date().strftime(form)
        try:
            self._template = environment.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise TemplateFailedError(f"line {line}: {error}") from None
        self._special_tokens = dict(special_tokens)
        self._clock = clock

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, options: Mapping[str, object] = {}
    ) -> str:
        """Return the prompt of a conversation. Raises `TemplateFailedError`.

        `options` are the request's `chat_template_kwargs`.
        """
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **options}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        due_s, size = self._clock() + MAX_RENDER_S, 0
        pieces: list[str] = []
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    raise TemplateFailedError(f"over {MAX_OUTPUT:,} characters")
                if not len(pieces) % _CLOCK_PIECES and self._clock() > due_s:
                    raise TemplateFailedError(f"over {MAX_RENDER_S} s")
        except TemplateFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program of others, and may raise anything
            raise TemplateFailedError(type(error).__name__) from None
        return "".join(pieces)


# The files of a chat template: that of the configuration, else those beside `tokenizer.json`, as engines read them.


#: Ten times the longest template of a published model, with a vocabulary's worth of special tokens beside it.
MAX_FILE_BYTES = 4 << 20
_PLACE = "models[].chat_template"
_EXPECTED = "a Jinja file, or a JSON file with the key chat_template"
#: File of the template, and file with the special tokens and perhaps the template.
_TEMPLATE_FILE, _CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


def read_template(tokenizer: Path, given: Path | None) -> ChatTemplate | None:
    """Return the template of a model; `None` if no file has one. Raises `InvalidValueError`.

    `given` is the file of the configuration. Without one the files beside `tokenizer` count: `chat_template.jinja`
    first, then `tokenizer_config.json`.
    """
    config_file, beside = tokenizer.with_name(_CONFIG_FILE), tokenizer.with_name(_TEMPLATE_FILE)
    config = _object(config_file) if config_file.exists() else {}
    path = given or (beside if beside.exists() else config_file)
    if path.suffix != ".json":
        source: str | None = _text(path)
    else:
        source = _source(config if path == config_file and given is None else _object(path), path, given is not None)
    if source is None:
        return None
    try:
        return ChatTemplate(source, _special_tokens(config))
    except TemplateFailedError as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: {error}", "a Jinja template") from None


def template_paths(tokenizer: Path, given: Path | None) -> list[Path]:
    """Return the files that `read_template` may read."""
    return [tokenizer.with_name(_CONFIG_FILE), given or tokenizer.with_name(_TEMPLATE_FILE)]


def _source(config: Mapping[str, Any], path: Path, required: bool) -> str | None:
    """Return the template of a JSON file; of several, the one named `default`."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if isinstance(found, str) and found:
        return found
    if found is not None or required:
        raise InvalidValueError(_PLACE, f"{str(path)!r} has no template", _EXPECTED)
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `bos_token` and the like; each is a text or an object with its `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: {str(error)[:200]}", _EXPECTED) from None
    if not isinstance(found, dict):
        raise InvalidValueError(_PLACE, f"{str(path)!r} is no JSON object", _EXPECTED)
    return found


def _text(path: Path) -> str:
    data = read_file(path, limit=MAX_FILE_BYTES, place=_PLACE, expected=_EXPECTED)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: byte {error.start} is not UTF-8", _EXPECTED) from None


# Which requests have exact tokens: the text that an engine encodes, from the fields of a body.
#
# Owns the list of fields. Theory of operation. Engines differ in how they put tools, calls, media and lists of parts
# into a prompt, and many fields change it. So a body counts only with fields that are known not to, and with messages
# of a role and a text. All others are estimated, as without a tokenizer.


#: Fields that leave the prompt as it is, over all engines.
_HARMLESS = frozenset(
    {
        *("model", "lora_path", "cache_salt", "user", "metadata", "store", "stream", "stream_options", "n", "seed"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "max_new_tokens", "stop", "stop_token_ids"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "logprobs", "top_logprobs", "ignore_eos", "skip_special_tokens", "response_format", "priority"),
        *("spaces_between_special_tokens", "no_stop_trim", "include_stop_str_in_output", "sampling_params", "rid"),
        *("separate_reasoning", "stream_reasoning", "request_id", "service_tier", "safety_identifier"),
    }
)
_CHAT_FIELDS = _HARMLESS | {"messages", "add_generation_prompt", "chat_template_kwargs"}
#: Variables that `chat_template_kwargs` may not set.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
#: Field of the text on each route without a template.
TEXT_FIELDS = {"/v1/completions": "prompt", "/generate": "text"}
CHAT_ROUTE = "/v1/chat/completions"


def plain_text(route: str, values: Mapping[str, Any]) -> str | None:
    """Return the text of a request without a template; `None` if the engine may encode another."""
    field = TEXT_FIELDS.get(route)
    text = None if field is None else values.get(field)
    return text if isinstance(text, str) and values.keys() <= _HARMLESS | {field} else None


def chat_messages(values: Mapping[str, Any]) -> Sequence[Mapping[str, str]] | None:
    """Return the messages of a request for a template; `None` if the engine may render others."""
    if not values.keys() <= _CHAT_FIELDS:
        return None
    messages = [_message(message) for message in values.get("messages", ())]
    return None if None in messages or not messages else [message for message in messages if message is not None]


def template_options(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `chat_template_kwargs` of a request; `None` for others than texts, numbers and booleans."""
    options = values.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or not _RESERVED.isdisjoint(options):
        return None
    return options if all(isinstance(value, str | int | float | None) for value in options.values()) else None


def _message(message: Mapping[str, Any]) -> Mapping[str, str] | None:
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        part = content[0]
        content = part.get("text") if part.get("type") == "text" and part.keys() == {"type", "text"} else None
    if not isinstance(content, str) or message.keys() != {"role", "content"}:
        return None
    return {"role": message["role"], "content": content}


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

    `differences`: by replica, how many of its last reports in a row had another count. `differs`: those of all replicas
    of the model do, so its prompts are estimated until `retry_s`, or a reload. `failed`: the template or the tokenizer
    has failed for a prompt, which is logged once.
    """

    name: str
    files: FileTokens | None = None
    differs: bool = False
    differences: dict[str, int] = field(default_factory=dict)
    retry_s: float = inf
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


# The Jinja environment of chat templates: sandboxed, with what templates of published models use.
#
# Imported only with the extra `tokens`.
#
# Theory of operation. Templates come with files of models, so they are not trusted: the sandbox refuses attributes of
# Python objects and changes of its arguments, as `transformers` has it. Beyond that, products that would fill memory
# are refused, and `ChatTemplate` bounds the output and its time.


#: Length of a text or list that a template may make by repetition, and the largest exponent.
MAX_REPEATED = 1 << 20
MAX_EXPONENT = 64


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return a product or a power; one that would fill memory is refused."""
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise SecurityError(f"an exponent above {MAX_EXPONENT}")
        for repeated, count in ((left, right), (right, left)):
            sized = isinstance(repeated, str | bytes | list | tuple)
            if operator == "*" and sized and isinstance(count, int) and len(repeated) * count > MAX_REPEATED:
                raise SecurityError(f"a repetition of over {MAX_REPEATED} elements")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks answers for training and renders nothing of its own."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as `transformers` renders it: the filter of Jinja itself escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
