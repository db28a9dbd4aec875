"""A streamed answer that goes on at another replica after the first one broke off: what is known of it, and its seam.

Owns what of an answer can be continued (`refusal`, `read_answer`), the request that asks for the rest
(`continued_body`), and the events of the rest as those of the one answer that the client is reading (`Seam`). Leaves
whether an answer is continued, and where, to `core.dispatch.lifecycle`; the bytes that the client has to the relay.

Theory of operation. Nothing is parsed until an answer breaks off. Then the whole events that the client has are read
once, and the text so far becomes the beginning of the answer in a new request: for a chat as the last message, which
the engine goes on with, for a completion as the end of the prompt. The engine reads its own text back from its
characters, so the tokens beside the seam may be others than the unbroken answer's; the text is the same where the model
is as sure of it as it was. What the engine then sends has another id, a role, counts of its own and an end; each event
is made again with the id of the first answer, and the counts of both parts.

An event is no token: engines put the tokens of one step, or those that came while they were slow to send, into one
event. Where the stream has no counts, the engine that goes on is asked how many tokens the text has. The templates of
many models trim a message; where an engine's does, it says the white space at the end of the text again, and what the
client has of it is dropped.

An answer is not continued where the rest could contradict what was sent, or where characters do not say all that the
engine knows: several choices, log probabilities, an echo, a call of a tool or a format in progress, a chain of thought
(its engines drop it from messages of the past), a response that is stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any

from gorgo.core.record import mutable_record, record
from gorgo.core.stream import error_status, parse_event

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = "/v1/messages"
#: Routes whose answers can be continued.
ROUTES = frozenset({CHAT, COMPLETIONS, GENERATE, MESSAGES})
#: An event that is longer is passed on in parts, and its answer is not continued.
MAX_EVENT_BYTES = 64 * 1024
#: A replica has stalled if none of its streams has had an event for this time, s, and for so many times the median gap
#: of the one that is checked: a step of an engine with many prompts to read takes one or two seconds.
STALL_S = 5.0
STALL_GAPS = 20
#: From one check of a stream that stands still to the next, s.
RECHECK_S = 1.0
#: A stream that is moved is held back for so long at most, s, until the rest of its answer begins elsewhere: a long
#: prompt takes seconds. Then its client reads on where it is.
MOST_PAUSE_S = 10.0
#: Between two streams that leave a drained replica: 20 a second, so that each choice counts those before it.
MOVE_INTERVAL_S = 0.05
#: Predicted prefill ahead of a new request, s, above which a replica takes no stream of a drained one: it has enough.
MOST_BACKLOG_S = 0.2
#: A line of a stream that its reader skips.
_COMMENT = b":"
_DONE = b"[DONE]"
#: A blank line: two line ends in a row, of any kind. A CR that is last so far ends a line; an LF behind it is a blank
#: line more, which its reader skips.
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
#: Members of a request by which the rest could contradict what was sent, if they are set.
_REFUSED = (
    *("echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs", "return_logprob", "store", "best_of"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema", "regex"),
    *("ebnf", "grammar", "structural_tag", "audio", "return_hidden_states", "use_beam_search", "function_call"),
)
#: Bounds of the length of an answer, by the route's member that has them.
_MOST = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")
_LEAST = ("min_tokens", "min_new_tokens")
#: What vLLM and SGLang take for a bound that a request lacks: of the rest alone it would begin anew.
_DEFAULT_MOST = {COMPLETIONS: 16, GENERATE: 128}
#: Members that the events of one answer have in common; others are of one event alone.
_COMMON = frozenset({"id", "object", "created", "model", "system_fingerprint", "service_tier"})
#: Members of a delta that can be gone on with, and those that are a chain of thought.
_TEXT = frozenset({"role", "content"})
_REASONING = frozenset({"reasoning", "reasoning_content", "reasoning_details", "thinking"})
#: How a chain of thought begins and ends in the text of a chat, where its engine does not take it out.
_THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>analysis", "<|channel|>final"))


class Continuation(Enum):
    """How an engine is asked to go on with the last message of a chat; completions have their prompt."""

    #: By `continue_final_message` without `add_generation_prompt` (vLLM, SGLang).
    FLAGS = "flags"
    #: By a last message of the assistant alone (llama.cpp), in Anthropic's messages too.
    LAST_MESSAGE = "last_message"
    #: Anthropic's messages as a chat, by the flags (vLLM, SGLang): that is what these engines make of them.
    AS_CHAT = "as_chat"

    def route(self, route: str) -> str:
        """Return the path by which the rest of an answer of `route` is asked for."""
        return CHAT if self is Continuation.AS_CHAT else route


@record
class PartialAnswer:
    """The answer that a client has so far.

    Parameters
    ----------
    text:
        Its text.
    tokens:
        Its tokens, less those of `again`: as the stream reported them, else one for each event with content, or as the
        engine that goes on counts them.
    exact:
        The stream reported them.
    again:
        Characters at the end of `text` that the engine which goes on says again: white space that it trims, and half of
        a character that takes two units of UTF-16.
    token_ids:
        Of `/generate`, where the engine sent them; empty otherwise.
    fields:
        Members of its events that every event of one answer has in common, as `id` and `model`.
    finished:
        The client has its finish reason.
    counted:
        Its events with text have counts, whether asked for or not.
    closed:
        The client has the end of its text, of Anthropic's messages alone.
    usage:
        The counts of all of it, which its event with the finish reason has, or one behind that; `None` before.
    summed:
        The client has the event with nothing but counts.
    ended:
        The client has the last event of the stream.
    """

    text: str = ""
    tokens: int = 0
    exact: bool = False
    again: int = 0
    token_ids: tuple[int, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    finished: bool = False
    counted: bool = False
    closed: bool = False
    usage: Mapping[str, Any] | None = field(default=None, hash=False)
    summed: bool = False
    ended: bool = False

    @property
    def known(self) -> str:
        """The text that the engine which goes on is given."""
        return self.text[: len(self.text) - self.again]


def half_character(text: str) -> int:
    """Return 1 if a text ends with the first half of a character, else 0: some engines cut text between UTF-16 units.

    >>> half_character("a\\ud83d"), half_character("a\\ud83d\\ude00"), half_character("")
    (1, 0, 0)
    """
    return int(bool(text) and 0xD800 <= ord(text[-1]) <= 0xDBFF)


class NotContinuableError(Exception):
    """An answer that cannot be continued; the message says why, in words for a log."""


# Requests.


def refusal(route: str, body: Mapping[str, Any]) -> str | None:
    """Return why the answers to a request cannot be continued; `None` if they can.

    >>> refusal("/v1/chat/completions", {"n": 2}), refusal("/v1/completions", {"prompt": "a", "n": 1})
    ('n', None)
    """
    if route not in ROUTES:
        return "route"
    sampling = body.get("sampling_params")
    for fields in (body, sampling if isinstance(sampling, dict) else {}):
        for name in _REFUSED:
            value = fields.get(name)
            if value is not None and value is not False and not (name == "best_of" and value == 1):
                return name
        if fields.get("n") not in (None, 1):
            return "n"
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return "response_format"
    choice = body.get("tool_choice")
    if route == MESSAGES:
        return _message_refusal(body)
    if choice not in (None, "auto", "none"):
        return "tool_choice"
    if route == CHAT and not _can_follow(body.get("messages", [])):
        return "messages"
    if route == COMPLETIONS and not isinstance(body.get("prompt"), str):
        return "prompt"
    if route == GENERATE and not isinstance(body.get("text"), str):
        return "text"
    return None


def _can_follow(messages: object) -> bool:
    """Return whether the text of an answer can stand behind the messages of a chat."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "assistant" and not isinstance(last.get("content"), str):
        return False
    return isinstance(messages, list)


def _message_refusal(body: Mapping[str, Any]) -> str | None:
    """Return why the answers to a request of Anthropic's messages cannot be continued."""
    for name, plain in (("tool_choice", ("auto", "none")), ("thinking", ("disabled",))):
        value = body.get(name)
        if value is not None and not (isinstance(value, dict) and value.get("type") in plain):
            return name
    for name in ("output_config", "output_format"):
        value = body.get(name)
        if value is not None and not (name == "output_config" and isinstance(value, dict) and not value.get("format")):
            return name
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or (last.get("role") == "assistant" and not isinstance(last.get("content"), str)):
        return "messages"
    return None


#: Members of a message request that a chat has by the same name, those that it has by another or not at all, and those
#: of no effect on an answer in text.
_SHARED = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "top_k", "cache_salt", "chat_template_kwargs", "vllm_xargs"}
)
_CONVERTED = frozenset({"messages", "system", "stop_sequences", "stream"})
_WITHOUT_EFFECT = frozenset({"metadata", "service_tier"})


def as_chat(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a request of Anthropic's messages as the chat that vLLM and SGLang make of it; `None` if that is not sure.

    Their versions differ in how they join blocks and show tools, so each message has to be one text. One that ends with
    the assistant's is refused too: these engines begin another answer behind it.

    >>> as_chat({"max_tokens": 9, "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]})["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'}]
    >>> as_chat({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [{}]}) is None
    True
    """
    rest = {name for name, value in body.items() if value not in (None, [])} - _SHARED - _CONVERTED - _WITHOUT_EFFECT
    messages = body.get("messages")
    if rest - {"tool_choice"} or not isinstance(messages, list):
        return None
    system, made = body.get("system"), list[dict[str, Any]]()
    for message in ([] if system in (None, "", []) else [{"role": "system", "content": system}]) + messages:
        text = _only_text(message.get("content")) if isinstance(message, dict) else None
        if not text or message.get("role") not in ("system", "user", "assistant"):
            return None
        made.append({"role": message["role"], "content": text})
    if not made or made[-1]["role"] != "user" or any(each["role"] == "system" for each in made[1:]):
        return None
    new = {name: body[name] for name in body if name in _SHARED}
    new |= {"messages": made, "stream": True, "stream_options": {"include_usage": True}}
    if body.get("stop_sequences"):
        new["stop"] = body["stop_sequences"]
    return new


def _only_text(content: object) -> str | None:
    if isinstance(content, list) and len(content) == 1 and isinstance(block := content[0], dict):
        # vLLM leaves out a block that begins with this header.
        is_text = block.get("type") == "text" and not str(block.get("text")).startswith("x-anthropic-billing-header")
        content = block.get("text") if is_text else None
    return content if isinstance(content, str) and content.strip() else None


def continued_body(route: str, body: Mapping[str, Any], answer: PartialAnswer, how: Continuation) -> bytes:
    """Return the request for the rest of an answer, as a body for an engine that is asked in this way (`how`).

    Its bounds of length are less by the tokens so far. At least one is asked for, which `Seam` drops where there is no
    room for it, or where the answer has its finish reason: the engine's counts and end are wanted. Behind a whole text
    without its reason there are as many as a stop string may have, which then comes again.
    """
    chat = as_chat(body) if how is Continuation.AS_CHAT else None
    assert chat is not None or how is not Continuation.AS_CHAT, "it can be asked for as a chat"
    new = dict(body if chat is None else chat)
    ended = answer.finished or answer.closed
    last = 1 if answer.finished else max(map(len, _stop_strings(body)), default=1)
    if route in (CHAT, MESSAGES):
        _continue_chat(new, answer.known, how)
    else:
        name = "prompt" if route == COMPLETIONS else "text"
        new[name] += answer.known
    sampling = new.get("sampling_params")
    if isinstance(sampling, dict):
        new["sampling_params"] = sampling = dict(sampling)
    if ended:
        bounds = new if route != GENERATE else new.setdefault("sampling_params", {})
        bounds.setdefault("max_tokens" if route != GENERATE else "max_new_tokens", last)
    for fields in (new, sampling if isinstance(sampling, dict) else {}):
        for name in (*_MOST, *_LEAST):
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                left = value - answer.tokens
                if ended:
                    left = min(left, last) if name in _MOST else 0
                fields[name] = max(1 if name in _MOST else 0, left)
    return _encoded(new)


def _continue_chat(new: dict[str, Any], text: str, how: Continuation) -> None:
    """Put the text so far behind the messages of a chat; with no text yet it is the same chat."""
    if not text:
        return
    messages = list(new.get("messages", []))
    last = messages[-1] if messages else None
    # With flags, an engine goes on with the client's last message only if it was asked to.
    is_own = isinstance(last, dict) and last.get("role") == "assistant"
    goes_on = how is not Continuation.FLAGS or bool(new.get("continue_final_message"))
    if isinstance(last, dict) and is_own and goes_on:
        messages[-1] = {**last, "content": last["content"] + text}
    else:
        messages.append({"role": "assistant", "content": text})
    new["messages"] = messages
    if how is not Continuation.LAST_MESSAGE:
        new["continue_final_message"], new["add_generation_prompt"] = True, False


def _encoded(value: Mapping[str, Any]) -> bytes:
    """Return JSON. Half a character, as engines send that cut text between units of UTF-16, is no UTF-8: an escape."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def with_default_bound(route: str, body: Mapping[str, Any], how: Continuation) -> Mapping[str, Any]:
    """Return the request with the bound of length that an engine of this kind takes where it has none.

    >>> with_default_bound("/v1/completions", {"prompt": "a"}, Continuation.FLAGS)
    {'prompt': 'a', 'max_tokens': 16}
    """
    most, sampling = _DEFAULT_MOST.get(route), body.get("sampling_params") or {}
    if most is None or how is not Continuation.FLAGS or not isinstance(sampling, dict):
        return body
    if tokens_left(body, PartialAnswer()) is not None:
        return body
    if route == GENERATE:
        return {**body, "sampling_params": {**sampling, "max_new_tokens": most}}
    return {**body, "max_tokens": most}


def tokens_left(body: Mapping[str, Any], answer: PartialAnswer) -> int | None:
    """Return how many tokens the rest may have; `None` without a bound.

    >>> tokens_left({"max_tokens": 5}, PartialAnswer(tokens=3)), tokens_left({}, PartialAnswer(tokens=3))
    (2, None)
    """
    sampling = body.get("sampling_params")
    bounds = [
        value - answer.tokens
        for fields in (body, sampling if isinstance(sampling, dict) else {})
        for name in _MOST
        if isinstance(value := fields.get(name), int) and value > 0
    ]
    return min(bounds, default=None)


# What is behind the finish reason of an answer.


def shows_usage(body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for an event with the counts.

    >>> shows_usage({"stream_options": {"include_usage": True}}), shows_usage({"stream_options": None})
    (True, False)
    """
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def missing_counts(route: str, body: Mapping[str, Any], answer: PartialAnswer) -> bytes | None:
    """Return the event with the counts, which an answer with its finish reason lacks; `None` if they are not known.

    Empty if it lacks none: the request did not ask for them, they came, or the engine sends them with the finish reason
    alone. They are known where every event has them.
    """
    if route not in (CHAT, COMPLETIONS) or not shows_usage(body) or answer.summed or answer.ended:
        return b""
    if answer.usage is None:
        return None
    made = {**answer.fields, "choices": [], "usage": answer.usage}
    return b"data: " + _encoded(made) + b"\n\n" if answer.counted else b""


def last_event(route: str) -> bytes:
    """Return the event that ends every stream of a route whose answers can be continued."""
    return b"data: [DONE]\n\n" if route != MESSAGES else _named({"type": "message_stop"})


def lacks_last_event(route: str, tail: bytes) -> bool:
    """Return whether the last bytes of a stream are whole events without the one that ends it.

    >>> [lacks_last_event("/generate", tail) for tail in (b"data: {}\\n\\n", b"data: {", b"data: [DONE]\\n\\n")]
    [True, False, False]
    """
    if route not in ROUTES or not tail or tail.rstrip().endswith(_DONE) or whole_events(tail) != len(tail):
        return False
    events = [_read(event)[1] for event in _EVENT_END.split(tail)]
    last = next((data.strip() for data in reversed(events) if data), b"")
    return last != _DONE and parse_event(last).get("type") != "message_stop"


# Answers.


def whole_events(data: bytes) -> int:
    """Return the size of the whole events and comments at the beginning of `data`.

    >>> whole_events(b"data: 1\\n\\ndata: 2"), whole_events(b": wait\\n"), whole_events(b"data: 1")
    (9, 7, 0)
    """
    if data[:1] == _COMMENT and data[-1:] == b"\n" and b"data:" not in data:
        return len(data)
    return max((end.end() for end in _EVENT_END.finditer(data)), default=0)


def first_error(data: bytes) -> int | None:
    """Return where the first error event of the engine's own begins in whole events; `None` without one."""
    start = 0
    for end in _EVENT_END.finditer(data):
        if (_error_of(data[start : end.start()]) or 0) >= 500:
            return start
        start = end.end()
    return None


def _error_of(event: bytes) -> int | None:
    name, data = _read(event)
    return error_status(name, parse_event(data))


def read_answer(route: str, stream: bytes) -> PartialAnswer:
    """Return the answer in the whole events of a stream. Raises `NotContinuableError`."""
    reader = _AnswerReader(route)
    for event in _EVENT_END.split(stream):
        data = _read(event)[1]
        reader.add(parse_event(data))
        reader.ended = reader.ended or data.strip() == _DONE
    text = "".join(reader.texts)
    _check_thoughts(route, text)
    return PartialAnswer(
        text=text,
        tokens=reader.reported or reader.events,
        exact=reader.reported > 0,
        again=half_character(text),
        token_ids=tuple(reader.ids),
        fields=reader.fields,
        finished=reader.finished,
        counted=reader.counted,
        closed=reader.closed,
        usage=reader.usage,
        summed=reader.summed,
        ended=reader.ended,
    )


def _check_thoughts(route: str, text: str) -> None:
    """Raise `NotContinuableError` for the text of a chat that ends in a chain of thought, which templates may drop."""
    if route not in (CHAT, MESSAGES):
        return
    for begin, end in _THOUGHTS:
        if text.lstrip().startswith(begin) and end not in text:
            raise NotContinuableError("reasoning in progress")


class _AnswerReader:
    """Reads the events of one answer."""

    def __init__(self, route: str) -> None:
        self.texts: list[str] = []
        self.events = 0
        #: Tokens by the stream's own counts; 0 without.
        self.reported = 0
        self.ids: list[int] = []
        self.fields: dict[str, Any] = {}
        self.finished = self.counted = self.closed = False
        #: Of the whole answer, and whether an event of their own had them; and whether the stream is over.
        self.usage: Mapping[str, Any] | None = None
        self.summed = self.ended = False
        self._route = route

    def add(self, event: Mapping[str, Any]) -> None:
        if not event:
            return
        if self._route == GENERATE:
            self._add_generated(event)
        elif self._route == MESSAGES:
            self._add_message(event)
        else:
            self._add_choices(event)

    def _add_choices(self, event: Mapping[str, Any]) -> None:
        for name, value in event.items():
            if name in _COMMON:
                self.fields.setdefault(name, value)
        usage = event.get("usage")
        self.reported = max(self.reported, _count(usage, "completion_tokens"))
        choices = _choices_of(event)
        for choice in choices:
            if choice.get("index") or choice.get("logprobs"):
                raise NotContinuableError("several choices" if choice.get("index") else "log probabilities")
            self.finished = self.finished or choice.get("finish_reason") is not None
            for name, value in (choice.get("delta") or {}).items():
                if value and name not in _TEXT:
                    raise NotContinuableError(f"{name} in progress")
            text = _text_of(self._route, choice)
            if text:
                self.texts.append(text)
                self.events += 1
                self.counted = self.counted or isinstance(usage, dict)
        if isinstance(usage, dict) and (self.finished or not choices):
            self.usage, self.summed = usage, self.summed or not choices

    def _add_message(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start":
            message = event.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            self.fields = {"usage": usage if isinstance(usage, dict) else {}}
        elif kind == "message_delta":
            self.finished = True
            self.reported = max(self.reported, _count(event.get("usage"), "output_tokens"))
        elif kind == "content_block_stop":
            self.closed = True
        elif kind == "message_stop":
            self.ended = True
        elif text := _message_text_of(event):
            self.texts.append(text)
            self.events += 1

    def _add_generated(self, event: Mapping[str, Any]) -> None:
        # Each event has the whole text so far.
        (text, meta), before = _generated_of(event), self.texts[0] if self.texts else ""
        if not text.startswith(before):
            raise NotContinuableError("events without the whole text")
        if event.get("index"):
            raise NotContinuableError("several choices")
        self.fields.setdefault("meta_info", meta)
        self.reported = max(self.reported, _count(meta, "completion_tokens"))
        self.finished = self.finished or bool(meta.get("finish_reason"))
        ids = event.get("output_ids")
        self.ids = list(ids) if isinstance(ids, list) else []
        if len(text) > len(before):
            self.events += 1
        self.texts = [text]


def _choices_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an event; raises `NotContinuableError` for any other form."""
    choices = event.get("choices") or []
    if not isinstance(choices, list):
        raise NotContinuableError("choices of an unknown form")
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("delta") or {}, dict):
            raise NotContinuableError("choices of an unknown form")
    return choices


def _text_of(route: str, choice: Mapping[str, Any]) -> str:
    """Return the text of a choice; raises `NotContinuableError` for content of any other form."""
    text = (choice.get("delta") or {}).get("content") if route == CHAT else choice.get("text")
    if not isinstance(text, str | None):
        raise NotContinuableError("text of an unknown form")
    return text or ""


def _message_text_of(event: Mapping[str, Any]) -> str:
    """Return the text of an event of Anthropic's messages; raises `NotContinuableError` for any other content."""
    kind = event.get("type")
    inner = event.get({"content_block_start": "content_block", "content_block_delta": "delta"}.get(str(kind), ""))
    if kind not in ("content_block_start", "content_block_delta"):
        return ""
    if not isinstance(inner, dict) or event.get("index") or inner.get("type") not in ("text", "text_delta"):
        raise NotContinuableError("a block that is not the first text")
    text = inner.get("text", "")
    if not isinstance(text, str):
        raise NotContinuableError("text of an unknown form")
    return text


def _generated_of(event: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text and the counts of an event of `/generate`; raises `NotContinuableError` for any other form."""
    text, meta = event.get("text"), event.get("meta_info") or {}
    if not isinstance(text, str) or not isinstance(meta, dict):
        raise NotContinuableError("events of an unknown form")
    return text, meta


def _count(fields: object, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if type(value) is int and value > 0 else 0


def _read(event: bytes) -> tuple[str, bytes]:
    """Return an event's name and data."""
    name, data = "", []
    for line in event.removeprefix(b"\xef\xbb\xbf").splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
    return name, b"\n".join(data)


# The seam.


@mutable_record
class SeamCounts:
    """Tokens of the rest as its replica reports them; `None` until it does."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


class Seam:
    """Turns the stream of the rest into the end of the one answer.

    Parameters
    ----------
    route, answer:
        Of the request, and what the client has of its answer.
    body:
        The request as the client sent it.
    show_usage:
        Whether the client asked for an event with the counts.
    path:
        The path by which the rest was asked for; by default the request's.

    `answer` is what the client has by the last `on_sent`. After each `feed`: `begun` once there is content or an end,
    `ended` after the last event, `error` with the status of an error event, or 500 for one of an unknown form, which
    are not passed on.
    """

    def __init__(
        self, route: str, answer: PartialAnswer, body: Mapping[str, Any], *, show_usage: bool, path: str | None = None
    ) -> None:
        self._is_converted = path not in (None, route)
        #: Of a chat whose rest is a message's: why it ended, and the stop string that did.
        self._end: tuple[str | None, str | None] = (None, None)
        self.begun = self.ended = False
        #: Its engine has sent an end, which the client may have had before.
        self.answered = False
        #: What it sends cannot be gone on with, as a chain of thought behind text.
        self.unfit = False
        self.error: int | None = None
        self.usage = SeamCounts()
        self._route, self._before, self._show_usage = route, answer, show_usage
        self._left = tokens_left(body, answer)
        self._stops = _stop_strings(body)
        #: The last characters of the answer, as many as a stop string may have before the seam.
        self._behind = answer.text[-(max(map(len, self._stops), default=1) - 1) :] if self._stops else ""
        #: What the rest has beside text, as a call of a tool.
        self._other: str | None = None
        #: What the client has, and the engine says again.
        self._again = answer.text[len(answer.known) :]
        self._texts: list[str] = []
        #: Of `/generate`: the tokens of the rest.
        self._ids: list[int] = []
        self._events = 0
        self._finished = answer.finished
        #: The stop string across the seam that ends the answer, of Anthropic's messages.
        self._stop: str | None = None
        self._closed = answer.closed
        self._pending = b""
        #: The counts of the whole answer, at its end, and whether an event of their own had them.
        self._total, self._summed = answer.usage, answer.summed
        #: Of the rest, what the client has: pieces of text, tokens as reported and by events, their ids, and what is
        #: known of the end (`finished`, `closed`, `usage`, `summed`).
        self._sent: tuple[int, int | None, int, list[int], dict[str, Any]]
        self._sent = (0, None, 0, [], self._end_so_far())

    def answer(self) -> PartialAnswer:
        """Return what the client has of the answer by now. Raises `NotContinuableError` for more than text."""
        if self._other is not None:
            raise NotContinuableError(f"{self._other} in progress")
        before = self._before
        size, reported, events, ids, end = self._sent
        text = before.text + "".join(self._texts[:size])
        _check_thoughts(self._route, text)
        return replace(
            before,
            text=text,
            tokens=before.tokens + (reported or events),
            exact=before.exact and (reported is not None or not events),
            again=half_character(text),
            token_ids=(*before.token_ids, *ids),
            **end,
        )

    def _end_so_far(self) -> dict[str, Any]:
        return {
            "finished": self._finished,
            "closed": self._closed,
            "usage": self._total,
            "summed": self._summed,
            "ended": self.ended,
        }

    def on_sent(self) -> None:
        """Record that the client has all events so far: the answer goes on behind them if this part breaks off too."""
        self._sent = (
            len(self._texts),
            self.usage.output,
            self._events,
            self._ids,
            self._end_so_far(),
        )

    @property
    def finished(self) -> bool:
        """Whether the events so far have the finish reason."""
        return self._finished

    @property
    def tokens_before(self) -> int:
        """Tokens of the answer before the rest."""
        return self._before.tokens

    @property
    def has_sent_end(self) -> bool:
        """Whether the client has the finish reason."""
        return bool(self._sent[4]["finished"])

    @property
    def short(self) -> bool | None:
        """What the rest says of its replica, as `Outcome.short`: one of a token or none says nothing."""
        return False if (self.usage.output or self._events) > 1 else None

    def feed(self, chunk: bytes) -> bytes:
        """Return the events that end in `chunk`, for the client."""
        data = self._pending + chunk
        size = whole_events(data)
        self._pending = data[size:]
        if len(self._pending) > MAX_EVENT_BYTES:
            self.error = 500
            return b""
        parts: list[bytes] = []
        for event in _EVENT_END.split(data[:size]):
            if not event or self.ended or self.error is not None:
                continue
            if event[:1] == _COMMENT and b"data:" not in event:
                parts.append(event.rstrip(b"\r\n") + b"\n\n")
            else:
                parts.append(self._event(event))
        return b"".join(parts)

    def _event(self, event: bytes) -> bytes:
        name, data = _read(event)
        if data.strip() == _DONE and not self._is_converted:
            self.begun = self.ended = True
            return b"data: [DONE]\n\n"
        if data.strip() == _DONE:
            return b"".join(map(_named, self._end_of_chat()))
        fields = parse_event(data)
        self.error = error_status(name, fields)
        if self.error is not None or not fields:
            return b""
        try:
            if self._is_converted:
                return b"".join(map(_named, self._message_of_chat(fields)))
            if self._route == MESSAGES:
                made = self._message(fields)
            else:
                made = self._generated(fields) if self._route == GENERATE else self._choices(fields)
        except NotContinuableError:
            self.error, self.unfit = 500, True
            return b""
        if made is None:
            return b""
        return _named(made) if self._route == MESSAGES else b"data: " + _encoded(made) + b"\n\n"

    def _message(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return an event of Anthropic's messages for the client, who has had the start of the message and its text."""
        kind = event.get("type")
        if kind == "message_start":
            message = event.get("message")
            self._count_prompt(message.get("usage") if isinstance(message, dict) else None)
        elif kind in ("content_block_start", "content_block_delta"):
            text, stopped = self._take(_message_text_of(event))
            self.begun = self.begun or bool(text) or stopped
            if text:
                return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        elif kind == "content_block_stop" and not self._closed:
            self.begun = self._closed = True
            return {"type": kind, "index": 0}
        elif kind == "message_delta" and not self._finished:
            return self._message_end(event)
        elif kind == "message_stop":
            self.begun = self.ended = True
            return {"type": kind}
        return None

    def _message_of_chat(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a message for one of a chat."""
        made: list[dict[str, Any]] = []
        usage = event.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            cached = _count(details if isinstance(details, dict) else usage, "cached_tokens")
            self.usage = SeamCounts(_count(usage, "prompt_tokens"), cached, _count(usage, "completion_tokens"))
        choices = _choices_of(event)
        for choice in choices:
            if choice.get("index") or any(
                value for name, value in (choice.get("delta") or {}).items() if name not in ("role", "content")
            ):
                raise NotContinuableError("other content than text")
            text, stopped = self._take(_text_of(CHAT, choice))
            if text:
                delta = {"type": "text_delta", "text": text}
                made.append({"type": "content_block_delta", "index": 0, "delta": delta})
            finish = choice.get("finish_reason")
            if (finish is not None or stopped) and self._end[0] is None:
                matched = choice.get("stop_reason", choice.get("matched_stop"))
                self._end = finish or "stop", matched if matched in self._stops else None
                if not self._closed:
                    self._closed = True
                    made.append({"type": "content_block_stop", "index": 0})
        if not choices and self._end[0] is not None:
            made += self._delta_of_chat()
        self.begun = self.begun or bool(made)
        return made

    def _delta_of_chat(self) -> list[dict[str, Any]]:
        """Return the event with the counts and the reason of the end, once."""
        if self._finished:
            return []
        finish, stop = self._end
        reason = "max_tokens" if finish == "length" else "end_turn" if stop is None else "stop_sequence"
        first = self._before.fields.get("usage") or {"input_tokens": 0}
        usage = {**first, "output_tokens": self.usage.output or self._events}
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return [self._message_end({"type": "message_delta", "delta": delta, "usage": usage})]

    def _end_of_chat(self) -> list[dict[str, Any]]:
        if self._end[0] is None:
            self.error = 500
            return []
        made = [*self._delta_of_chat(), {"type": "message_stop"}]
        self.begun = self.ended = True
        return made

    def _count_prompt(self, usage: object) -> None:
        cached = _count(usage, "cache_read_input_tokens")
        prompt = _count(usage, "input_tokens") + cached + _count(usage, "cache_creation_input_tokens")
        self.usage = SeamCounts(prompt, cached, None)

    def _message_end(self, event: Mapping[str, Any]) -> dict[str, Any]:
        before, usage, delta = self._before, event.get("usage"), event.get("delta")
        counts = usage if isinstance(usage, dict) else {}
        is_full = self._left is not None and self._left <= 0
        # The one token that is asked for behind a whole text stands for the one that said its end.
        self.usage.output = output = 0 if is_full else _count(counts, "output_tokens")
        new = dict(delta) if isinstance(delta, dict) else {}
        if self._stop is not None:
            new |= {"stop_reason": "stop_sequence", "stop_sequence": self._stop}
        elif is_full or (before.closed and not new.get("stop_sequence")):
            new |= {"stop_reason": "max_tokens" if is_full else "end_turn", "stop_sequence": None}
        # The prompt is the first one's, which the start of the message has reported.
        first = before.fields.get("usage") or {}
        reported = {name: first[name] for name in counts if name in first}
        self.begun = self._finished = True
        return {**event, "delta": new, "usage": {**counts, **reported, "output_tokens": before.tokens + output}}

    def _choices(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        made = {**event, **self._before.fields}
        usage = event.get("usage")
        if isinstance(usage, dict):
            made["usage"] = self._merged(usage)
            if not self._show_usage and not (self._before.counted and event.get("choices")):
                del made["usage"]
        choices = [new for choice in _choices_of(event) if (new := self._choice(choice)) is not None]
        made["choices"] = choices
        sums = isinstance(usage, dict) and self._show_usage and not event.get("choices") and not self._summed
        if self._finished and "usage" in made:
            self._total = made["usage"]
        if sums:
            self.begun = self._summed = True
        return made if choices or sums else None

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, Any] | None:
        is_chat = self._route == CHAT
        delta = dict(choice.get("delta") or {}) if is_chat else {}
        finish = choice.get("finish_reason")
        text, stopped = self._take(_text_of(self._route, choice))
        if stopped:
            finish = "stop"
        self.answered = self.answered or finish is not None
        if self._finished:
            return None
        if finish is not None:
            self.begun = self._finished = True
            if self._left is not None and self._left <= 0 and not stopped:
                finish = "length"
        new = {**choice, "finish_reason": finish}
        if is_chat:
            others = [name for name, value in delta.items() if value and name not in _TEXT]
            if _REASONING.intersection(others) and (self._before.text or self._texts):
                raise NotContinuableError("reasoning behind text")
            self._other = self._other or next(iter(others), None)
            delta.pop("role", None)
            if "content" in delta:
                delta["content"] = text
            new["delta"] = delta
            has_content = any(delta.values())
        else:
            new["text"] = text
            has_content = bool(text)
        self.begun = self.begun or has_content
        return new if has_content or finish is not None else None

    def _take(self, text: str) -> tuple[str, bool]:
        """Return what of new text belongs to the answer, and whether a stop string across the seam ends it."""
        if (
            not text
            or self._finished
            or self._closed
            or self._stop is not None
            or (self._left is not None and self._left <= 0)
        ):
            return "", False
        self._events += 1
        if self._again:
            text = self._less_again(text)
        if not text:
            return "", False
        stopped = False
        if self._behind:
            joined = self._behind + "".join(self._texts) + text
            # One that lies before the seam was no end: it is the client's, by `min_tokens` for one.
            seam = len(self._behind)
            matches = [(at, s) for s in self._stops if 0 <= (at := joined.find(s, max(0, seam - len(s) + 1))) < seam]
            if matches:
                start, stop = min(matches)
                text, stopped = joined[len(self._behind) : max(len(self._behind), start)], True
                self._stop = stop if self._route == MESSAGES else None
            elif len(joined) > 2 * len(self._behind) + max(map(len, self._stops)):
                self._behind = ""  # no stop string reaches back to the seam any more
        self._texts.append(text)
        return text, stopped

    def _less_again(self, text: str) -> str:
        """Return new text without what the client has, which may be half of its first character."""
        had, new = (each.encode("utf-16-le", "surrogatepass") for each in (self._again, text))
        most = min(len(had), len(new))
        same = next((at for at in range(0, most, 2) if had[at : at + 2] != new[at : at + 2]), most)
        self._again = had[same:].decode("utf-16-le", "surrogatepass") if same == len(new) else ""
        return new[same:].decode("utf-16-le", "surrogatepass")

    def _generated(self, event: Mapping[str, Any]) -> dict[str, Any] | None:
        before, (text, meta) = self._before, _generated_of(event)
        received = "".join(self._texts)
        new = text[len(received) :] if text.startswith(received) else ""
        finish = meta.get("finish_reason")
        taken, stopped = self._take(new)
        if self._finished or not (taken or finish or stopped):
            return None
        first = before.fields.get("meta_info") or {}
        merged = self._merged(meta)
        made = {**event, "text": before.text + "".join(self._texts)}
        if isinstance(ids := event.get("output_ids"), list):
            self._ids = [] if self._left is not None and self._left <= 0 else ids
            made["output_ids"] = [*before.token_ids, *self._ids]
        if stopped:
            finish = {"type": "stop"}
        if finish and self._left is not None and self._left <= 0:
            finish = {"type": "length", "length": before.tokens}
        elif isinstance(finish, dict) and "length" in finish:  # the bound of the rest
            finish = {**finish, "length": merged["completion_tokens"]}
        made["meta_info"] = {**meta, **merged, "finish_reason": finish or None, "id": first.get("id", meta.get("id"))}
        self.begun = True
        self._finished = bool(finish)
        return made

    def _merged(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return counts of the whole answer; the rest's prompt ends with the tokens before the seam."""
        prompt, output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = _count(details if isinstance(details, dict) else usage, "cached_tokens")
        self.usage = SeamCounts(prompt, cached, output)
        prompt_tokens = max(0, prompt - self._before.tokens)
        if self._left is not None and self._left <= 0:
            output = 0
        made = {**usage, "prompt_tokens": prompt_tokens, "completion_tokens": output + self._before.tokens}
        if "total_tokens" in usage:
            made["total_tokens"] = made["prompt_tokens"] + made["completion_tokens"]
        if isinstance(details, dict) and "cached_tokens" in details:
            made["prompt_tokens_details"] = {**details, "cached_tokens": min(cached, prompt_tokens)}
        elif "cached_tokens" in usage:
            made["cached_tokens"] = min(cached, prompt_tokens)
        return made


def _named(event: Mapping[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(event["type"]).encode(), _encoded(event))


def _stop_strings(body: Mapping[str, Any]) -> list[str]:
    sampling = body.get("sampling_params")
    stop = (
        body.get("stop") or body.get("stop_sequences") or (sampling.get("stop") if isinstance(sampling, dict) else None)
    )
    values: Iterator[Any] = iter([stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [])
    return [value for value in values if isinstance(value, str) and value]
