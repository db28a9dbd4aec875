"""The prompt in a request body: its text in template order, and where each message starts.

Owns reading the bodies of all routes with a prompt; see `core.prompt.fingerprint` for hashing. The engine validates the
request: unknown parts enter as their JSON, so that two prompts are equal only if all their parts are. A body without a
prompt, or with one of the wrong type, is rejected.

Theory of operation. Text is what the engine would template: tools first, then each message's role (a mark, not text)
and its contents. Images, audio and other parts that are not text enter by a digest of 16 bytes of their JSON.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from gorgo.core.prompt.boundaries import Mark
from gorgo.core.prompt.text import PromptText, kind_of
from gorgo.core.record import record
from gorgo.errors import BadRequest

#: Bytes that one token id takes in `Prompt.text`.
TOKEN_ID_BYTES = 4
#: Mark of each prompt after the first.
_NEXT = "next"


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
    """

    text: bytes
    message_starts: Sequence[Mark]
    tokens: int | None = None

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
    Prompt(text=b'hello', message_starts=((0, 'user'),), tokens=None)
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
    (Prompt(text=b'hello', message_starts=(), tokens=None), None)
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
    text = PromptText()
    text.add_tools(body)
    _add_messages(text, body)
    return Prompt(text.text, text.marks)


def _read_messages(body: Mapping[str, object]) -> Prompt:
    text = PromptText()
    text.add_tools(body)
    if body.get("system"):
        text.mark("system")
        text.add_content(body["system"], "system")
    _add_messages(text, body)
    return Prompt(text.text, text.marks)


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
    text = PromptText()
    text.add_tools(body)
    if body.get("instructions"):
        text.mark("system")
        text.add_content(body["instructions"], "instructions")
    if isinstance(body.get("prompt"), dict):
        text.mark("prompt")
        text.add_json(body["prompt"])
    _add_items(text, body)
    return Prompt(text.text, text.marks)


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


def _read_generate(body: Mapping[str, object]) -> Prompt:
    """SGLang's own route: text, ids or embeddings. Media come first, since what is cached depends on them."""
    text = PromptText()
    for media in ("image_data", "audio_data", "video_data"):
        if body.get(media):
            text.mark(media)
            text.add_digest(body[media])
    if body.get("input_embeds") is not None:
        text.add_digest(body["input_embeds"])
        return Prompt(text.text, text.marks)
    if body.get("text") is None and "input_ids" in body:
        return _read_sequences(body, "input_ids", text)
    if any(isinstance(item, dict) for item in _sequences(body.get("text"))):
        raise BadRequest("text: expected a string or a list of strings, got an object")
    return _read_sequences(body, "text", text)


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
    prompt = Prompt(text.text, text.marks)
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
}
