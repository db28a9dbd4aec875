"""The prompt in a request body: its text in template order, and where each message starts.

Owns reading the bodies of all routes with a prompt; see `core.prompt.fingerprint` for hashing. The engine validates the
request: unknown parts enter as their JSON, so that two prompts are equal only if all their parts are. A body without a
prompt, or with one of the wrong type, is rejected.

- `Marks` and `token_boundaries` say where messages start and end.
- `PromptText` turns contents of any dialect into bytes.
- `read_prompt` finds the fields of each route.

Theory of operation. Text is what the engine would template: tools first, then each message's role (a mark, not text)
and its contents. Parts that are not text enter by a digest of 16 bytes of their JSON. That of an image, of audio or of
video is repeated for as many bytes as its tokens take, so that it has its share of the blocks.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate, islice
from typing import Any, TypeVar, overload

from gorgo.core.prompt.media import MediaParts, joined, measured, media_of
from gorgo.core.record import record
from gorgo.errors import BadRequest

# Starts and ends of the messages of a prompt: in bytes of its text, and from there in tokens.


#: Ends of a prompt that are stored, the first and the last half of them: a shared beginning has few messages, and the
#: next turn of a long conversation adds two.
MAX_BOUNDARIES = 128

_T = TypeVar("_T")

#: Offset of a message's first byte, and its role.
Mark = tuple[int, str]


class Marks(Sequence[Mark]):
    """Where messages start, ascending, and their roles: in two columns, since an object per message takes time.

    >>> marks = Marks((0, 10), ("user", "assistant"))
    >>> marks[1], marks == ((0, "user"), (10, "assistant"))
    ((10, 'assistant'), True)
    """

    __slots__ = ("roles", "starts")

    def __init__(self, starts: Sequence[int] = (), roles: Sequence[str] = ()) -> None:
        self.starts = starts
        self.roles = roles

    @classmethod
    def of(cls, marks: Sequence[Mark]) -> Marks:
        """Return marks in columns."""
        return marks if isinstance(marks, cls) else cls(*zip(*marks, strict=True))

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Mark: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mark]: ...
    def __getitem__(self, index: int | slice) -> Mark | Sequence[Mark]:
        if isinstance(index, slice):
            return Marks(self.starts[index], self.roles[index])
        return self.starts[index], self.roles[index]

    def __iter__(self) -> Iterator[Mark]:
        return zip(self.starts, self.roles, strict=True)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Marks | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def message_ends(starts: Sequence[int], text_bytes: int) -> tuple[int, ...]:
    """Return where messages end in a text from where they start, both ascending; an empty message has no own end.

    >>> message_ends((0, 10, 10, 25), 40)
    (10, 25, 40)
    """
    if not starts:
        return ()
    ends = dict.fromkeys(starts[1:])  # ascending, as the starts are
    ends[text_bytes] = None
    ends.pop(0, None)
    return tuple(bounded([*ends]))


def token_boundaries(ends: Sequence[int], *, size: int, tokens: int) -> tuple[int, ...]:
    """Return the tokens before each end, in proportion: `size` is that of a prompt with `tokens` tokens.

    >>> token_boundaries((10, 25, 40), size=40, tokens=12)
    (3, 7, 12)
    """
    if size == tokens:
        return tuple(ends)
    return tuple([end * tokens // size for end in ends])  # a list: no frame per message


def bounded(ends: Sequence[_T]) -> Sequence[_T]:
    """Return the first and the last ends, at most `MAX_BOUNDARIES`."""
    half = MAX_BOUNDARIES // 2
    return ends if len(ends) <= MAX_BOUNDARIES else [*ends[:half], *ends[-half:]]


# The growing text of a prompt: parts, marks, digests of what is not text.
#
# Owns how contents of any dialect become bytes. Which fields of a body they come from is for `core.prompt.parse`.


#: Bytes by which an image, or anything else that is not text, enters.
DIGEST_BYTES = 16
#: Bytes of a prompt by which its media enter, each digest once included: as many as 262,144 tokens of text have, more
#: than a context. What comes beyond enters by its digest alone.
MAX_MEDIA_BYTES = 1 << 20
#: Messages, prompts, parts, and what parts consist of: more than any conversation or batch has. Each takes
#: microseconds, and a body of 32 MiB may have eleven million, for which all other requests would wait half a minute.
MAX_PIECES = 65_536
#: Up to so many messages, one by one is faster than step by step over all.
_FEW_MESSAGES = 8


class PromptText:
    """Collects parts and marks. The `model` decides by which formula an image has tokens."""

    def __init__(self, model: object = None) -> None:
        self._model = model
        self._media: list[MediaParts] = []
        self.media_bytes = 0
        self._parts: list[bytes] = []
        #: Of messages: where they start, and their roles.
        self._starts: list[int] = []
        self._roles: list[str] = []
        self._size = 0
        self._pieces = 0

    def mark(self, role: str) -> None:
        self._count()
        self._starts.append(self._size)
        self._roles.append(role)

    def add_text_messages(self, messages: Sequence[object]) -> int:
        """Add messages up to the first that is more than a role and a text; return how many: most often all of them."""
        if len(messages) > _FEW_MESSAGES and (plain := _roles_and_texts(messages)) is not None:
            return self._add_plain_messages(*plain)
        starts, parts, size = self._starts, self._parts, self._size
        before = len(starts)
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                break
            role, text = message.get("role"), message.get("content")
            if type(role) is not str or type(text) is not str:
                break
            starts.append(size)
            self._roles.append(role)
            data = text.encode() if text.isascii() else _utf8(text)
            parts.append(data)
            size += len(data)
        added = len(starts) - before
        self._size = size
        self._count(added)
        return added

    def _add_plain_messages(self, roles: Sequence[str], texts: Sequence[str], joined: str) -> int:
        """Add many messages of a role and a text each; `joined` is all text."""
        if joined.isascii():
            data, sizes = joined.encode(), map(len, texts)
        else:
            pieces = [*map(_utf8, texts)]
            data, sizes = b"".join(pieces), map(len, pieces)
        self._starts += accumulate(sizes, initial=self._size)
        self._starts.pop()  # the end of the last
        self._roles += roles
        self.add_bytes(data)
        self._count(len(roles))
        return len(roles)

    def add(self, text: str) -> None:
        self.add_bytes(_utf8(text))

    def add_bytes(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)

    def add_json(self, value: object) -> None:
        """Return the text that a template renders from JSON (tools, calls), with about the right length."""
        self.add(_dump(value))

    def add_digest(self, value: object) -> None:
        self.add_bytes(self._digest(value))

    def add_media(self, value: object, media: MediaParts) -> None:
        """Add an image or the like by its digest, as long as its tokens."""
        digest = self._digest(value)
        size = max(DIGEST_BYTES, min(TOKEN_ID_BYTES * media.tokens, MAX_MEDIA_BYTES - self.media_bytes))
        times = size // DIGEST_BYTES
        self._media.append(media)
        self.media_bytes += times * DIGEST_BYTES
        self.add_bytes(digest * times)

    def _digest(self, value: object) -> bytes:
        digest = sha256()
        self._feed(digest.update, value)
        return digest.digest()[:DIGEST_BYTES]

    def add_tools(self, body: Mapping[str, object]) -> None:
        tools = body.get("tools") or body.get("functions")
        if tools:
            self.mark("tools")
            self.add_json(tools)

    def add_content(self, content: object, where: str) -> None:
        """A message's content: nothing, text, or parts."""
        if content is None:
            return
        if isinstance(content, str):
            self.add(content)
        elif isinstance(content, list):
            for number, part in enumerate(content):
                self._add_part(part, f"{where}[{number}]")
        elif isinstance(content, dict):
            self._add_part(content, where)
        else:
            raise BadRequest(f"{where}: expected text or a list of parts, got {kind_of(content)}")

    def _count(self, pieces: int = 1) -> None:
        self._pieces += pieces
        if self._pieces > MAX_PIECES:
            raise BadRequest(f"body: expected at most {MAX_PIECES} messages, prompts and parts")

    def _add_part(self, part: object, where: str) -> None:
        self._count()
        if isinstance(part, str):
            self.add(part)
            return
        if not isinstance(part, dict):
            raise BadRequest(f"{where}: expected an object, got {kind_of(part)}")
        for name in _TEXT_FIELDS:
            text = part.get(name)
            if isinstance(text, str):
                self.add(text)
                return
        if part.get("type") == "tool_result":
            self.add_content(part.get("content"), f"{where}.content")
        elif part.get("type") == "tool_use":
            self.add_json([part.get("name"), part.get("input")])
        elif (media := media_of(part, self._model)) is not None:
            self.add_media(part, media)
        else:
            self.add_digest(part)

    def _feed(self, update: Callable[[bytes], object], value: object) -> None:
        """Put JSON into a digest. An image is one long string: dumping it first would cost more than hashing it."""
        self._count()
        if isinstance(value, str):
            data = _utf8(value)
            update(b'"%d ' % len(data))
            update(data)
        elif isinstance(value, dict):
            update(b"{%d " % len(value))
            for name, member in value.items():
                self._feed(update, name)
                self._feed(update, member)
        elif isinstance(value, list) and value and isinstance(value[0], str | dict):
            update(b"[%d " % len(value))
            for member in value:
                self._feed(update, member)
        else:
            update(b"%d " % len(text := _utf8(_dump(value))))
            update(text)

    @property
    def media(self) -> tuple[MediaParts, ...]:
        """Return the media, those of one class together."""
        return joined(self._media) if self._media else ()

    def prompt(self) -> Prompt:
        """Return what was collected."""
        return Prompt(self.text, self.marks, media=self.media, media_bytes=self.media_bytes)

    @property
    def is_empty(self) -> bool:
        return not self._parts

    @property
    def text(self) -> bytes:
        return b"".join(self._parts)

    @property
    def marks(self) -> Marks:
        return Marks(self._starts, self._roles)


#: Keys of a part's text, over all dialects.
_TEXT_FIELDS = ("text", "thinking", "refusal")


def _roles_and_texts(messages: Sequence[Any]) -> tuple[list[str], list[str], str] | None:
    """Return the roles, the texts and all text of messages that have nothing else; `None` if one has."""
    try:
        roles, texts = [message["role"] for message in messages], [message["content"] for message in messages]
        joined, _ = "".join(texts), "".join(roles)  # which refuse anything but text
    except (KeyError, TypeError):
        return None
    return (roles, texts, joined) if sum(map(len, messages)) == 2 * len(messages) else None


def _utf8(text: str) -> bytes:
    """JSON can carry half a surrogate pair; it must not stop a request that the engine may well accept."""
    return text.encode("utf-8", "surrogatepass")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_KINDS = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}


def kind_of(value: object) -> str:
    """What a value is, in words safe to send back."""
    return "an empty list" if value == [] else _KINDS.get(type(value), "an object")


#: Bytes that one token id takes in `Prompt.text`.
TOKEN_ID_BYTES = 4
#: Mark of each prompt after the first.
_NEXT = "next"
#: Of rerank (`query`, `documents`) and of score.
_PAIR_FIELDS = ("query", "queries", "text_1", "documents", "items", "text_2", "data_1", "data_2")


@record
class Prompt:
    """What a fingerprint is made of.

    Parameters
    ----------
    text:
        UTF-8 of all text parts in template order; 4 bytes per id where the client sent token ids.
    marks:
        (byte offset at which a message starts, its role). They enter the hash, not the length.
    tokens:
        Exact length, where the client sent token ids.
    media:
        Images, audio and video, and by how many bytes of the text they enter.
    """

    text: bytes
    message_starts: Sequence[Mark]
    tokens: int | None = None
    media: tuple[MediaParts, ...] = ()
    media_bytes: int = 0

    @property
    def is_single(self) -> bool:
        """Return whether the body has one prompt, not several."""
        return all(role != _NEXT for _, role in self.message_starts)


def read_prompt(route: str, body: object) -> Prompt:
    """The prompt of a JSON body as posted to `route` (its path, such as `/v1/chat/completions`).

    Raises `BadRequest` with the field and what was expected there. It names positions, never contents.

    Example
    -------
    >>> read_prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
    Prompt(text=b'hello', message_starts=((0, 'user'),), tokens=None, media=(), media_bytes=0)
    """
    if not isinstance(body, dict):
        raise BadRequest(f"body: expected a JSON object, got {kind_of(body)}")
    reader = _READERS.get(route)
    if reader is None:
        raise BadRequest(f"no prompt is known for route {route}")
    try:
        return reader(body)
    except RecursionError:
        raise BadRequest("body: nested too deeply") from None


def read_texts(route: str, body: Mapping[str, object]) -> Prompt | None:
    """Return the prompt of a body of texts alone, which costs little whatever else the body has; `None` for any other.

    >>> read_texts("/v1/completions", {"prompt": "hello"}), read_texts("/v1/completions", {"prompt": [7, 8]})
    (Prompt(text=b'hello', message_starts=(), tokens=None, media=(), media_bytes=0), None)
    """
    text, messages = PromptText(), body.get("messages")
    if route == "/v1/completions" and type(prompt := body.get("prompt")) is str:
        text.add(prompt)
        return Prompt(text.text, ())
    if route != "/v1/chat/completions" or body.get("tools") or body.get("functions"):
        return None
    is_plain = type(messages) is list and messages and text.add_text_messages(messages) == len(messages)
    return Prompt(text.text, text.marks) if is_plain else None


def _read_chat(body: Mapping[str, object]) -> Prompt:
    text = PromptText(body.get("model"))
    text.add_tools(body)
    _add_messages(text, body)
    return text.prompt()


def _read_messages(body: Mapping[str, object]) -> Prompt:
    text = PromptText(body.get("model"))
    text.add_tools(body)
    if body.get("system"):
        text.mark("system")
        text.add_content(body["system"], "system")
    _add_messages(text, body)
    return text.prompt()


def _add_messages(text: PromptText, body: Mapping[str, object]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest(f"messages: expected a list of messages, got {kind_of(messages)}")
    if not messages:
        raise BadRequest(f"messages: expected at least one message, got {kind_of(messages)}")
    added = text.add_text_messages(messages)
    for number, message in enumerate(islice(messages, added, None), added):
        if not isinstance(message, dict):
            raise BadRequest(f"messages[{number}]: expected an object, got {kind_of(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise BadRequest(f"messages[{number}].role: expected a string, got {kind_of(role)}")
        text.mark(role)
        _add_message(text, message, where=f"messages[{number}].content")


def _add_message(text: PromptText, message: Mapping[str, object], where: str) -> None:
    """One that is more than a role and a text."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        text.add(reasoning)
    text.add_content(message.get("content"), where)
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            text.add_json(message[name])


def _read_responses(body: Mapping[str, object]) -> Prompt:
    text = PromptText(body.get("model"))
    text.add_tools(body)
    if body.get("instructions"):
        text.mark("system")
        text.add_content(body["instructions"], "instructions")
    if isinstance(body.get("prompt"), dict):
        text.mark("prompt")
        text.add_json(body["prompt"])
    _add_items(text, body)
    return text.prompt()


def _add_items(text: PromptText, body: Mapping[str, object]) -> None:
    items = body.get("input")
    if isinstance(items, str):
        text.mark("user")
        text.add(items)
    elif isinstance(items, list) and (items or _has_input_elsewhere(body)):
        for number, item in enumerate(items):
            _add_item(text, item, f"input[{number}]")
    elif isinstance(items, list):
        raise BadRequest(f"input: expected at least one item, got {kind_of(items)}")
    elif items is not None or not _has_input_elsewhere(body):
        raise BadRequest(f"input: expected text or a list of items, got {kind_of(items)}")


#: A body of /v1/responses with one of these needs no input of its own.
_INPUT_ELSEWHERE = ("prompt", "previous_response_id", "conversation")


def _has_input_elsewhere(body: Mapping[str, object]) -> bool:
    return any(body.get(name) for name in _INPUT_ELSEWHERE)


def _add_item(text: PromptText, item: object, where: str) -> None:
    if not isinstance(item, dict):
        raise BadRequest(f"{where}: expected an object, got {kind_of(item)}")
    role = item.get("role") or item.get("type")
    if not isinstance(role, str):
        raise BadRequest(f"{where}.role: expected a string, got {kind_of(role)}")
    text.mark(role)
    if "content" in item:
        text.add_content(item["content"], f"{where}.content")
    elif item.get("type") == "function_call":
        text.add_json([item.get("name"), item.get("arguments")])
    elif isinstance(item.get("output"), str):
        text.add(str(item["output"]))
    else:
        text.add_json(item)


def _read_completion(body: Mapping[str, object]) -> Prompt:
    return _read_sequences(body, "prompt")


def _read_embedding(body: Mapping[str, object]) -> Prompt:
    return _read_sequences(body, "input")


def _read_nothing(_body: Mapping[str, object]) -> Prompt:
    """Return no text: the engine counts its tokens without a prefill, so that nothing of it is cached."""
    return Prompt(b"", ())


def _read_pairs(body: Mapping[str, object]) -> Prompt:
    """Jina's and vLLM's rerank, and vLLM's score: one side, then each text of the other; engines prefill all of them.

    Fields that are no text are checked by the engine.
    """
    text = PromptText()
    for name in _PAIR_FIELDS:
        value = body.get(name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if not text.is_empty:
                text.mark(_NEXT)
            if isinstance(one, str):
                text.add(one)
            else:
                text.add_json(one)
    if text.is_empty:
        raise BadRequest(f"expected texts in one of {', '.join(_PAIR_FIELDS)}")
    return Prompt(text.text, text.marks)


def _read_generate(body: Mapping[str, object]) -> Prompt:
    """SGLang's own route: text, ids or embeddings. Media come first, since what is cached depends on them."""
    text = PromptText(body.get("model"))
    for media in ("image_data", "audio_data", "video_data"):
        if body.get(media):
            text.mark(media)
            _add_media(text, media.removesuffix("_data"), body[media], body.get("model"))
    if body.get("input_embeds") is not None:
        text.add_digest(body["input_embeds"])
        return text.prompt()
    if body.get("text") is None and "input_ids" in body:
        return _read_sequences(body, "input_ids", text)
    if any(isinstance(item, dict) for item in _sequences(body.get("text"))):
        raise BadRequest("text: expected a string or a list of strings, got an object")
    return _read_sequences(body, "text", text)


def _add_media(text: PromptText, kind: str, value: object, model: object) -> None:
    """Add SGLang's list of media, which has the data itself."""
    for one in value if isinstance(value, list) else [value]:
        data = one.get("url") if isinstance(one, dict) else one
        text.add_media(one, measured(kind, data if isinstance(data, str) else None, model))


def _read_sequences(body: Mapping[str, object], name: str, before: PromptText | None = None) -> Prompt:
    """One prompt or several, each as text or as token ids. A single one has no mark, so all routes agree on it."""
    text = before or PromptText()
    exact = text.is_empty
    sequences = _sequences(body.get(name))
    for number, sequence in enumerate(sequences):
        where = f"{name}[{number}]" if len(sequences) > 1 else name
        if number:
            text.mark(_NEXT)
        if isinstance(sequence, list):
            text.add_bytes(_token_ids(sequence, where))
        else:
            exact = False
            _add_text(text, sequence, where)
    prompt = text.prompt()
    return replace(prompt, tokens=len(prompt.text) // TOKEN_ID_BYTES) if exact else prompt


def _sequences(value: object) -> list[object]:
    """A list of ids is one sequence; a list of anything else is several."""
    return value if isinstance(value, list) and value and not isinstance(value[0], int | float) else [value]


def _add_text(text: PromptText, sequence: object, where: str) -> None:
    if not isinstance(sequence, str | dict):
        raise BadRequest(f"{where}: expected text or token ids, got {kind_of(sequence)}")
    text.add_content(sequence, where)


def _token_ids(ids: list[object], where: str) -> bytes:
    if not ids:
        raise BadRequest(f"{where}: expected text or token ids, got {kind_of(ids)}")
    try:
        return array("I", ids).tobytes()  # type: ignore[type-var]  # array itself refuses what is not a whole number
    except (TypeError, OverflowError):
        raise BadRequest(f"{where}: expected token ids, whole numbers from 0 to 4294967295") from None


_READERS: dict[str, Callable[[Mapping[str, object]], Prompt]] = {
    "/v1/chat/completions": _read_chat,
    "/v1/completions": _read_completion,
    "/generate": _read_generate,
    "/v1/embeddings": _read_embedding,
    "/v1/responses": _read_responses,
    "/v1/messages": _read_messages,
    "/v1/messages/count_tokens": _read_nothing,
    "/v1/rerank": _read_pairs,
    "/v1/score": _read_pairs,
    "/tokenize": _read_nothing,
}
