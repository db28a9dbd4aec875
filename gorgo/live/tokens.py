"""Exact tokens: the tokenizers and chat templates of the configuration, one record per model; extra `tokens`.

Imported only if the configuration names a tokenizer; read at the start and at a reload. Owns which requests have exact
tokens, the ids of a text, and the special tokens at which a text may be cut.

- `ChatTemplate` renders messages as the engine does, within bounds.
- `ModelTokens` is how the prompts of a model become tokens.
- `TemplateEnvironment` is the sandbox in which templates run.
- `FileTokenizer` is the tokenizer of a `tokenizer.json`, and `SegmentCache` has its segments.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gorgo.config.model import ModelConfig
from gorgo.config.values import SIMULATED_TOKENIZER
from gorgo.core.lru import Lru
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.encoded_prompt import EncodedPrompt, EncodingFailedError, TemplateFailedError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


# Chat templates: messages to the text that the engine encodes.


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
MAX_TEMPLATE_FILE_BYTES = 4 << 20
_PLACE = "models[].chat_template"
_TEMPLATE_EXPECTED = "a Jinja file, or a JSON file with the key chat_template"
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
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if isinstance(template, str) and template:
        return template
    if template is not None or required:
        raise InvalidValueError(_PLACE, f"{str(path)!r} has no template", _TEMPLATE_EXPECTED)
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of `bos_token` and the like; each is a text or an object with its `content`."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _object(path: Path) -> Mapping[str, Any]:
    try:
        parsed = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: {str(error)[:200]}", _TEMPLATE_EXPECTED) from None
    if not isinstance(parsed, dict):
        raise InvalidValueError(_PLACE, f"{str(path)!r} is no JSON object", _TEMPLATE_EXPECTED)
    return parsed


def _text(path: Path) -> str:
    data = read_file(path, limit=MAX_TEMPLATE_FILE_BYTES, place=_PLACE, expected=_TEMPLATE_EXPECTED)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValueError(_PLACE, f"{str(path)!r}: byte {error.start} is not UTF-8", _TEMPLATE_EXPECTED) from None


# Which requests have exact tokens: the text that an engine encodes, from the fields of a body.
#
# Theory of operation. Engines differ in how they put tools, calls, media and lists of parts
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
    models: Iterable[ModelConfig], before: Mapping[str, ModelTokens] | None = None
) -> dict[str, ModelTokens]:
    """Return the models that have a tokenizer. Raises `ConfigError` or `MissingExtra`; takes a second per file.

    Files of models in `before` that have not changed are not read again.
    """
    return {model.name: _read(model, (before or {}).get(model.name)) for model in models if model.tokenizer is not None}


def _read(model: ModelConfig, before: ModelTokens | None) -> ModelTokens:
    if model.tokenizer is None or model.tokenizer == SIMULATED_TOKENIZER:
        return ModelTokens(model.name)
    path = Path(model.tokenizer)
    given = None if model.chat_template is None else Path(model.chat_template)
    stamp = _stamp(path, *template_paths(path, given))
    if before is not None and before.files is not None and before.files.stamp == stamp:
        return ModelTokens(model.name, before.files)
    tokenizer = read_tokenizer(path)
    template = read_template(path, given)
    separator, is_marker = (None, False) if template is None else _separator(model.name, tokenizer, template)
    cache = SegmentCache(tokenizer, separator=separator)
    return ModelTokens(model.name, FileTokens(tokenizer, template, separator, is_marker, cache, stamp))


def _stamp(*paths: Path) -> Stamp:
    stamps: list[tuple[str, int | None, int | None]] = []
    for path in paths:
        try:
            status = path.stat()
            stamps.append((str(path), status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append((str(path), None, None))
    return tuple(stamps)


def _separator(name: str, tokenizer: FileTokenizer, template: ChatTemplate) -> tuple[str | None, bool]:
    """Return the special token that begins each message, and True; else the most frequent one, and False."""
    short, long, messages = _probes(name, template)
    separators = tokenizer.separators((short, long))
    counts = tuple(count + 1 for count in messages)
    markers = [token for token in separators if (short.count(token), long.count(token)) == counts]
    if markers:
        return min(markers, key=long.index), True
    repeated = [token for token in separators if long.count(token) > short.count(token)]
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


#: Twice the largest file of a published model, whose vocabulary has 256,000 entries.
MAX_TOKENIZER_FILE_BYTES = 64 << 20
_TOKENIZER_EXPECTED = "a tokenizer.json, or the word simulated"


def require_extra() -> None:
    """Raise `MissingExtra` without the extra `tokens`."""
    # Before the library reads it: a prompt is encoded by the thread that calls, and by no pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"models[].tokenizer needs {error.name}, which is not installed: pip install 'gorgo-router[tokens]'"
        ) from error


def read_tokenizer(path: Path) -> FileTokenizer:
    """Return the tokenizer of a file. Raises `InvalidValueError`, or `MissingExtra` without the extra `tokens`."""
    require_extra()
    from tokenizers import Tokenizer

    data = read_file(path, limit=MAX_TOKENIZER_FILE_BYTES, place="models[].tokenizer", expected=_TOKENIZER_EXPECTED)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # noqa: BLE001 - the library raises the base class for every fault of a file
        reason = str(error)[:200]
        raise InvalidValueError("models[].tokenizer", f"{str(path)!r}: {reason}", _TOKENIZER_EXPECTED) from None
    return FileTokenizer(tokenizer)


def read_file(path: Path, *, limit: int, place: str, expected: str) -> bytes:
    """Return a file's content. Raises `InvalidValueError` for one that cannot be read or has over `limit` bytes."""
    try:
        if path.is_fifo():
            raise InvalidValueError(place, f"{str(path)!r} is a pipe", expected)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidValueError(place, f"{str(path)!r}: {reason}", expected) from None
    if len(data) > limit:
        raise InvalidValueError(place, f"{str(path)!r}: over {limit:,} bytes", expected)
    return data


class FileTokenizer:
    """Encodes text as an engine with the same file does.

    Parameters
    ----------
    tokenizer:
        As read; truncation and padding of the file are switched off, since engines do so too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._added: Mapping[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        #: Packed ids that the engine puts before and after a plain prompt, such as that of the beginning of a text.
        self.prefix, self.suffix = self._affixes()

    def encode(self, text: str) -> bytes:
        """Return the packed ids of a text, without `prefix` and `suffix`. Other threads run meanwhile.

        Raises `EncodingFailedError` for a text that this tokenizer has no token for.
        """
        try:
            # The batch call alone releases the interpreter, and the fast one leaves out offsets.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the library raises the base class; its message may quote the text
            raise EncodingFailedError(type(error).__name__) from None
        return token_bytes(encoding.ids)

    def separators(self, texts: Iterable[str]) -> list[str]:
        """Return the special tokens within `texts` at which any text may be cut without a change of its ids.

        The parts of a text between such tokens are encoded apart. A token that takes in blanks before it, is compared
        after normalization, or overlaps with another one is none.
        """
        joined = "\n".join(texts)
        exact = [token for token in self._added.values() if not token.normalized]
        return [
            token.content
            for token in exact
            if token.content in joined
            and not (token.lstrip or token.single_word)
            and not any(_overlap(token.content, other.content) for other in exact if other is not token)
        ]

    def _affixes(self) -> tuple[bytes, bytes]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return token_bytes(whole[:start]), token_bytes(whole[start + len(plain) :])
        return b"", b""


def _overlap(one: str, other: str) -> bool:
    """Return whether a text can have both with a common character."""
    if not other or one in other or other in one:
        return True
    longest = min(len(one), len(other)) - 1
    return any(one.endswith(other[:size]) or other.endswith(one[:size]) for size in range(1, longest + 1))


# A text to its token ids, cached by segment: a longer conversation encodes its new messages alone.
#
# Theory of operation. A special token ends all that is encoded together, so a text may be
# cut before each of them (`FileTokenizer.separators`). The cut is at the one that begins each message, so a segment is
# a message. The key is a digest of the segment; the value, its ids.


#: Bytes of ids in memory: eight million tokens, some 300 conversations of 24,000.
MAX_CACHED_BYTES = 32 << 20
#: Memory of an entry beside its ids.
_ENTRY_BYTES = 200
_numbers = itertools.count()


@dataclass(slots=True)
class Cut:
    """A text in segments, with the ids of those that are known.

    `missing` are the segments to encode, by place.
    """

    keys: list[bytes]
    ids: list[bytes | None]
    missing: dict[int, str]

    @property
    def missing_chars(self) -> int:
        """Characters to encode."""
        return sum(map(len, self.missing.values()))


class SegmentCache:
    """Segments of one tokenizer.

    Parameters
    ----------
    tokenizer:
        Encodes what is not cached.
    separator:
        Special token before which a text is cut; `None`: nowhere.
    max_bytes:
        Bound on memory; the longest unused segments are evicted.
    """

    def __init__(
        self, tokenizer: FileTokenizer, *, separator: str | None = None, max_bytes: int = MAX_CACHED_BYTES
    ) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._cached = Lru[bytes, bytes](max_bytes, weigh=_memory)
        #: Names the tokenizer among all of the process, those before a reload included.
        self.origin = next(_numbers).to_bytes(8, "little")

    def cut(self, text: str) -> Cut:
        """Return a text in segments; raises `UnicodeEncodeError` for half a surrogate pair."""
        parts = [text] if self._separator is None else text.split(self._separator)
        # Processors compute SHA-256 in half the time of BLAKE2. A part without other letters is encoded in no time.
        keys = [sha256(part.encode()).digest() for part in parts]
        # The first one may be encoded in another way: it begins the text.
        keys[0] = b"first" + keys[0]
        ids = [self._cached.use(key) for key in keys]
        missing: dict[int, str] = {}
        for index, ids_of_part in enumerate(ids):
            if ids_of_part is None:
                begin = self._separator if index and self._separator is not None else ""
                missing[index] = begin + parts[index]
        return Cut(keys, ids, missing)

    def encode(self, texts: Iterable[str]) -> list[bytes]:
        """Return the packed ids of segments. Touches no cache: another thread may call it."""
        return [self._tokenizer.encode(text) for text in texts]

    def complete(self, cut: Cut, encoded: Iterable[bytes]) -> EncodedPrompt:
        """Return the packed ids by segment, with those of the missing ones, which are cached."""
        for index, ids in zip(cut.missing, encoded, strict=True):
            cut.ids[index] = ids
            if cut.keys[index] not in self._cached:
                self._cached.put(cut.keys[index], ids)
        return EncodedPrompt([ids for ids in cut.ids if ids is not None], cut.keys, self.origin)

    def check(self) -> None:
        """Assert the bound."""
        self._cached.check()


def _memory(ids: bytes) -> int:
    return len(ids) + _ENTRY_BYTES
