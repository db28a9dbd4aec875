"""From a request's body to its `RouteRequest`: prompt, size, model, session, and the replica that it may be pinned to.

Owns the routes that carry a prompt, and what of a request is outside its client's scope. Leaves the JSON to
`gorgo.live.parsing`. The body itself is not changed, but for a model that the replica knows by another name.
"""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import ceil
from time import time
from typing import Any

from gorgo.config.values import BLOCK_BYTES
from gorgo.core.messages.request import REFUSALS, AttemptResult, Outcome, RouteRequest
from gorgo.core.prompt.fingerprint import ExactPrompt, Fingerprint
from gorgo.core.prompt.parse import token_boundaries
from gorgo.core.record import mutable_record
from gorgo.core.stream import FirstTokenDetector, StreamState, Usage, is_short
from gorgo.errors import closest
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import KEYS, Header, find, session_of
from gorgo.live.parsing.json_body import ENGINE_FIELDS, BodyFields, Spans, request_usage, with_model
from gorgo.live.request_options import ClientPolicies
from gorgo.live.served_models import ServedModels
from gorgo.live.state import Routing
from gorgo.live.stored_responses import StoredResponses

# Results of attempts by what a replica answered: statuses, error events, and how long an answer may be.


#: A request for fewer tokens can be answered with no more than one.
LEAST_TOKENS = 2
#: A longer stream is no short answer.
SHORT_BYTES = 4 * 1024
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


def failure_of(status: int, headers: Sequence[Header] = ()) -> Outcome | None:
    """Return the outcome of an error status before any content: busy or failed; None for a response to relay."""
    if status in (429, 503):
        retry_after_s = _retry_after_s(headers)
        return Outcome(AttemptResult.BUSY, status=status, error=f"status_{status}", retry_after_s=retry_after_s)
    if not 200 <= status < 300 and not 400 <= status < 500 and status not in REFUSALS:
        # Redirects too: they are not followed.
        return Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=status, error=f"status_{status}")
    return None


def result_of_stream(error_status: int | None) -> AttemptResult:
    """Return the result of a complete stream; `error_status` is that of an error event before any content."""
    if error_status is None:
        return AttemptResult.COMPLETED
    return AttemptResult.UPSTREAM_4XX if failure_of(error_status) is None else AttemptResult.FAILED_AFTER_CONTENT


def failure_of_event(error_status: int | None) -> Outcome | None:
    """Return the outcome of an error event before any content; None for a 4xx."""
    return failure_of(500 if error_status is None else error_status)


def is_short_stream(route: str, stream: bytes, usage: Usage | None, *, may_be_short: bool) -> bool | None:
    """Return whether a stream is doubtfully short, as `Outcome.short`; `stream` has at least its last bytes."""
    if len(stream) > SHORT_BYTES or not is_short(route, stream, usage):
        return False
    return True if may_be_short else None


def is_short_usage(usage: Usage | None, *, may_be_short: bool) -> bool | None:
    """Return whether an answer is doubtfully short by its usage alone, as `Outcome.short`; without one it is not."""
    if usage is None or usage.output_tokens is None or usage.output_tokens > 1:
        return False
    return True if may_be_short else None


def output_limits(parsed: Mapping[str, Any]) -> list[int]:
    """Return the limits of an answer's tokens that are numbers, the one that counts first.

    >>> output_limits({"sampling_params": {"max_new_tokens": 9}, "max_tokens": 100})
    [100, 9]
    """
    sampling = parsed.get("sampling_params")
    places = (parsed, sampling) if isinstance(sampling, dict) else (parsed,)
    return [
        fields[name] for fields in places for name in _MAX_TOKENS if name in fields and isinstance(fields[name], int)
    ]


def wants_more_than_one(limits: Iterable[int]) -> bool:
    """Return whether a request with these `output_limits` leaves room for a longer answer than one token.

    >>> wants_more_than_one([2]), wants_more_than_one([2, 1]), wants_more_than_one([])
    (True, False, True)
    """
    return min(limits, default=LEAST_TOKENS) >= LEAST_TOKENS


def most_output_tokens(limits: Iterable[int]) -> int | None:
    """Return the most tokens of an answer that a request with these `output_limits` asks for; `None` without one.

    >>> most_output_tokens([100, 9]), most_output_tokens([0, 9]), most_output_tokens([])
    (100, 9, None)
    """
    for limit in limits:
        if limit > 0 and limit is not True:
            return limit
    return None


#: Routes of one prompt, and fields of those that may have several.
_ONE_PROMPT = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
_PROMPTS = ("prompt", "text", "input_ids")
#: Fields that ask for several answers to a prompt, or may have such fields.
_SEVERAL = frozenset({"n", "best_of", "sampling_params"})


def answers_of(route: str, parsed: Mapping[str, Any]) -> int | None:
    """Return how many answers a request asks for; `None` if its prompts are not known, as of a large body.

    >>> answers_of("/v1/chat/completions", {"n": 2}), answers_of("/v1/completions", {"prompt": ["a"] * 2, "n": 3})
    (2, 6)
    """
    if route in _ONE_PROMPT and _SEVERAL.isdisjoint(parsed):
        return 1
    sampling = parsed.get("sampling_params")
    choices = 1
    for fields in (parsed, sampling if isinstance(sampling, dict) else {}):
        for name in ("n", "best_of"):
            number = fields.get(name)
            if isinstance(number, int) and number > choices:
                choices = number
    if route in _ONE_PROMPT:
        return choices
    prompts = next((parsed[name] for name in _PROMPTS if name in parsed), None)
    if isinstance(sampling, list) or prompts is None:
        return None
    several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    return choices * len(prompts) if several else choices


#: How engines say that a request is longer than the model's context: vLLM and OpenAI, SGLang, llama.cpp, TGI,
#: TensorRT-LLM, LMDeploy, MLC, gateways.
_TOO_LONG = re.compile(
    rb"context[ _-]?(?:length|size|window)|max_(?:model|seq|input|total)_(?:len|tokens)|session_len|model capacity"
    rb"|maximum (?:model|allowed|prompt|input|sequence) length|(?:prompt|input)(?: \([^()]{1,40}\))? is too long"
    rb"|reduce the length of the|must be <= ?\d+\. given|must have less than \d+ tokens",
    re.IGNORECASE,
)
#: Of a refusal, which names it at its beginning.
_TOO_LONG_BYTES = 4096


def exceeds_context(status: int, body: bytes) -> bool:
    """Return whether a refusal says that the request is longer than the model's context there.

    >>> exceeds_context(400, b"This model's maximum context length is 8192 tokens.")
    True
    """
    return status in (400, 413, 422) and _TOO_LONG.search(body[:_TOO_LONG_BYTES]) is not None


#: Of an engine's own text in an error, a log or a status: some lines of a terminal.
TEXT_CHARS = 240
#: Of the answer that is read for it, and of the request that it is compared with; a longer one has no text shown.
_TEXT_BYTES, _COMPARED_BYTES = 16 * 1024, 256 * 1024
#: Characters in a row that are the prompt's if the prompt has them, and the step of the comparison.
_SHARED_CHARS, _SHARED_STEP = 8, 4
#: In the place of what may be a prompt.
_LEFT_OUT = "[...]"
#: Quoted, bracketed or braced and longer than a name: engines put values there, also those of other requests.
_QUOTED = re.compile(r"""(["'`])(?:(?!\1).){40,}\1|\[[^\[\]]{40,}\]|\{[^{}]{40,}\}""")
_EVENT_DATA = re.compile(r"^data: ?(.*)$", re.MULTILINE)
_WORDS = ("message", "detail", "error", "error_message", "msg")


def engine_text(answer: bytes, request: bytes) -> str | None:
    """Return what an engine says of its failure, bounded, cleaned, and without any of the prompt; `None` if nothing.

    `answer` is the body of its error. What the `request` has too is left out, since engines repeat prompts, and so is
    what is long and quoted, which may be of another request. Without the request nothing is known of the prompt, and
    there is no text.

    >>> asked = b'{"messages": [{"role": "user", "content": "Tell me a secret of mine"}]}'
    >>> engine_text(b'{"error": {"message": "out of memory near: tell me a secret of mine"}}', asked)
    'out of memory near: [...]'
    """
    said = _said(answer[:_TEXT_BYTES])
    if not said or not request or len(request) > _COMPARED_BYTES:
        return None
    line = next((line for line in said.splitlines() if line.strip()), "")
    text = "".join(each if each.isprintable() else "?" for each in " ".join(line.split()))
    try:
        prompt = "\0".join(_texts(json.loads(request), ())).lower()
    except (ValueError, RecursionError):
        return None
    text = _QUOTED.sub(_LEFT_OUT, text[: 4 * TEXT_CHARS])
    text = _without(text, prompt).strip() if text else ""
    if not text or text == _LEFT_OUT:
        return None
    return text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."


def _said(answer: bytes) -> str | None:
    """Return the message of an error in one of the usual forms, or the text of one that is no JSON."""
    text = answer.decode("utf-8", "replace").strip()
    events = [event for event in _EVENT_DATA.findall(text) if event.startswith("{")]
    text = events[-1] if events else text  # a stream ends with its error
    if text.startswith("<"):
        return None  # a page of HTML
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None if text.startswith(("{", "[")) else text
    for _ in range(3):
        if isinstance(value, dict):
            value = next((value[name] for name in _WORDS if value.get(name)), None)
    return value if isinstance(value, str) else None


def _texts(value: object, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the texts of a request that may be its prompt: all but its model and the roles of messages."""
    if isinstance(value, str):
        if path not in (("model",),) and path[-1:] != ("role",) and path[-1:] != ("type",):
            yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _texts(each, (*path, name))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each, path)


def _without(text: str, prompt: str) -> str:
    """Return a text with what it shares with the prompt left out."""
    lowered = text.lower()
    shared: list[bool] = [False] * len(text)
    for start in range(0, max(1, len(text) - _SHARED_CHARS + 1), _SHARED_STEP):
        end = min(start + _SHARED_CHARS, len(text))
        if not shared[end - 1] and lowered[start:end] in prompt:
            while start and lowered[start - 1 : end] in prompt:
                start -= 1
            while end < len(text) and lowered[start : end + 1] in prompt:
                end += 1
            shared[start:end] = [True] * (end - start)
    for short in (each for each in prompt.split("\0") if 3 < len(each) < 2 * _SHARED_CHARS):
        index = lowered.find(short)
        if index >= 0:
            shared[index : index + len(short)] = [True] * len(short)
    parts: list[str] = []
    for index, each in enumerate(text):
        if not shared[index]:
            parts.append(each)
        elif not index or not shared[index - 1]:
            parts.append(_LEFT_OUT)
    return "".join(parts)


def _retry_after_s(headers: Sequence[Header]) -> float | None:
    """Return the seconds of `Retry-After`; a date counts from the replica's own `Date`, else from this clock."""
    value = find(headers, b"retry-after") or b""
    if value.isdigit() and len(value) < 10:
        return float(value)
    at_s = _unix_s(value)
    if at_s is None:
        return None
    now_s = _unix_s(find(headers, b"date") or b"")
    return max(0.0, at_s - (time() if now_s is None else now_s))


def _unix_s(date: bytes) -> float | None:
    """Return the Unix time of an HTTP date; `None` for anything else."""
    if not 20 <= len(date) <= 40:
        return None
    try:
        parsed = parsedate_to_datetime(date.decode("latin-1"))
    except (ValueError, OverflowError):
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


# What of a request is outside its client's scope: fields that steer the engine, and models that it cannot have.
#
# The 404 of a model that no replica serves lists the models that the client may use. The other checks are made only
# where a protection is configured: without client keys every client is trusted with the engine's own fields, and
# without a restricted model any name may be sent.


#: Models listed in one answer, and characters of the name that the client sent.
MODELS_SHOWN = 10
NAME_SHOWN = 80


def refuse_engine_fields(
    policies: ClientPolicies, client: str | None, parsed: Mapping[str, Any], *, has_adapter: bool = False
) -> None:
    """Raise `HttpError` (400) for a field that steers the engine, unless the client's rule grants it.

    `has_adapter`: `lora_path` names an adapter that a replica lists, and is as good as `model`.
    """
    if client is None:
        return
    fields = ENGINE_FIELDS.intersection(parsed)
    if not fields:
        return
    rule = policies.clients.get(client)
    for name in sorted(fields.difference(() if rule is None else rule.engine_fields)):
        if parsed[name] is not None and not (has_adapter and name == "lora_path"):
            message = f"{name}: this field steers the engine, and the rule of this client does not grant it"
            raise HttpError(400, "field_not_allowed", message)


def require_known_model(routing: Routing, model: str | None) -> None:
    """Raise `HttpError` (400, 404) for a request without a known model while some model is restricted.

    Replicas without a list of models would serve another spelling of the restricted model, or none, anywhere.
    """
    if not routing.client_policies.models:
        return
    if model is None:
        raise HttpError(400, "invalid_request", "model: expected the name of a model; some are restricted to regions")
    if model not in routing.client_policies.known_models and model not in routing.router.view.models():
        message = f"the model {model[:80]!r} is not known to this proxy, and some are restricted to regions"
        raise HttpError(404, "model_not_found", message)


def may_find_model(routing: Routing, model: str | None) -> bool:
    """Return whether fresh lists of models could have a model that no replica is known to serve."""
    view = routing.router.view
    if view.lists(model) or model is None:
        return False
    return routing.models.may_find(model, refused=not view.serves(model), now=routing.clock())


async def find_model(routing: Routing, model: str | None) -> bool:
    """Read the lists of models for one that no replica is known to serve; return whether they were read."""
    if not may_find_model(routing, model):
        return False
    assert model is not None, "a request without a model goes to any replica"
    refused = not routing.router.view.serves(model)
    return await routing.models.find_missing(model, refused=refused, now=routing.clock())


async def follow_model(routing: Routing, model: str | None, replica: str) -> None:
    """Read the lists of models after a 404 of a replica that lists the request's: it may have moved to another.

    Waits if no other replica has it, so that the request goes where it is now.
    """
    reading = None if model is None else routing.models.read_again(model, replica, now=routing.clock())
    if reading is not None and not routing.router.view.serves_beside(model, replica):
        await asyncio.shield(reading)


def unknown_model(routing: Routing, *, name: str, client: str | None, listed: Iterable[object] = ()) -> HttpError:
    """Return the error for `name`. `listed` are models of a list, where the Router knows none."""
    shown = repr(name if len(name) <= NAME_SHOWN else f"{name[:NAME_SHOWN]}...")
    may_use, governing = routing.client_policies.may_use, routing.models.governing
    usable = sorted(
        served
        for model, regions in routing.router.view.models().items()
        if may_use(client=client, model=governing(model, routing.client_policies.models) or model, regions=regions)
        for served in routing.models.names(model)
    ) or [model for model in listed if isinstance(model, str)]
    return HttpError(
        404, "model_not_found", f"no replica serves the model {shown}{closest(name, usable)}; {_listed(usable)}"
    )


def _listed(models: list[str]) -> str:
    if not models:
        return "this client may use no model"
    more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
    return f"there are: {', '.join(models[:MODELS_SHOWN])}{more}"


# Routes that carry a prompt.


#: In the order of the documents.
INFERENCE_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
)
#: Routes whose answers are no generated text, so that none is too short.
NOT_GENERATING = frozenset({"/v1/embeddings", "/v1/messages/count_tokens", "/v1/rerank", "/v1/score", "/tokenize"})


#: Routes on which the engines know `stream_options`.
_USAGE_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
#: `Prompt.text` holds 4 bytes for each token id that a client sends itself.
_BYTES_PER_ID = 4.0


@mutable_record
class ParsedRequest:
    """One request, parsed."""

    #: Empty once no other attempt can be made.
    body: bytes
    #: Size of the prompt's text, which is not stored.
    text_bytes: int
    route: RouteRequest
    #: Whether an attempt with `request_usage` sends a body that requests it.
    adds_usage: bool
    #: The model as the client names it.
    model: str | None = None
    #: An answer of one token is less than the request asks for, and may be asked for again elsewhere.
    may_be_short: bool = False
    #: Places of that name in `body` and `with_usage`; None if they are not known.
    spans: Spans | None = None
    #: Compared with the engine's report; `None` if the tokens are estimated.
    exact: ExactPrompt | None = None

    def body_for(self, name: str | None, *, with_usage: bool) -> bytes:
        """Return the body for a replica that knows the model as `name`."""
        body = request_usage(self.body) if with_usage and self.adds_usage else self.body
        return body if name is None or name == self.model else with_model(body, name, self.spans)


def has_tokens(routing: Routing, fields: BodyFields) -> bool:
    """Return whether the exact tokens of a prompt may be known: some model has a tokenizer, or a client sent ids."""
    return fields.token_ids is not None or bool(routing.prompt_tokens.models)


async def count_tokens(routing: Routing, route: str, fields: BodyFields) -> ExactPrompt | None:
    """Return the exact tokens of a prompt whose model has a tokenizer, or that a client sent as ids."""
    if not has_tokens(routing, fields):
        return None
    tokens = routing.prompt_tokens
    _, _, model, adapter = _names(routing.models, fields.values)
    base = routing.models.governing(model, tokens.models)
    return await tokens.exact_prompt(route, fields, model=model, base=base, adapter=adapter)


def parse_request(
    routing: Routing,
    stored_responses: StoredResponses,
    route: str,
    headers: Sequence[Header],
    body: bytes,
    fields: BodyFields,
    *,
    request_id: str,
    received_s: float,
    client: str | None = None,
    replicas: frozenset[str] | None = None,
) -> ParsedRequest:
    """Return the request of a body and its `fields`. Raises `HttpError` if it cannot be routed.

    `replicas` are the only ones that may serve it, where a gateway says so.
    """
    parsed, exact = fields.values, fields.exact
    tokens = fields.tokens if exact is None else exact.tokens
    named, requested, model, adapter = _names(routing.models, parsed)
    policies = routing.client_policies
    refuse_engine_fields(policies, client, parsed, has_adapter=requested is not None)
    require_known_model(routing, model)
    governing = routing.models.governing(model, policies.models)
    options = policies.request_options(headers, client=client, model=governing)
    are_ids = fields.tokens is not None
    ratio = _BYTES_PER_ID if are_ids else routing.router.token_ratios.ratio(model)
    fingerprint = routing.fingerprinter.hash_sketch(fields.sketch, adapter=adapter)
    routing.prompt_heads.add(model, client, fields.sketch.head)
    prompt_tokens = ceil(fingerprint.text_bytes / ratio) if tokens is None else tokens
    block_tokens, media = BLOCK_BYTES / ratio, fields.sketch.media
    if media and tokens is None:
        text_tokens = (fingerprint.text_bytes - fields.sketch.media_bytes) / ratio
        prompt_tokens = max(1, ceil(text_tokens + routing.router.media_tokens.estimate(model, media)))
        block_tokens = BLOCK_BYTES * prompt_tokens / fingerprint.text_bytes
    limits = output_limits(parsed)
    request = RouteRequest(
        # By position: 27 keywords take 4 us, positions a tenth of one.
        request_id,
        received_s,
        prompt_tokens,
        fingerprint.blocks,
        block_tokens,
        fingerprint.prefix_hash,
        model,
        session_of(headers),  # session_id
        _stored_on(stored_responses, client, parsed) if route == "/v1/responses" else None,  # pinned_replica
        parsed.get("stream") is True,  # streamed
        len(body),  # body_bytes
        options.slo_ttft_s,
        options.priority,
        client,
        options.regions,
        _is_idempotent(route, parsed),  # idempotent
        None if are_ids else fingerprint.text_bytes - fields.sketch.media_bytes,  # text_bytes
        route,
        options.slo_tpot_s,
        {} if exact is None else exact.kv_hashes,
        _boundaries(fingerprint, exact, prompt_tokens),  # boundaries
        replicas,
        options.prefix_len,
        _credential(headers) if client is None else None,  # credential
        media,
        most_output_tokens(limits),  # most_output_tokens
        answers_of(route, parsed),  # answers
    )
    if routing.scaling.hot_prompts is not None:
        routing.scaling.hot_prompts.add(route, model, fingerprint.prefix_hash, body)
    may_be_short = route not in NOT_GENERATING and request.idempotent and wants_more_than_one(limits)
    adds_usage = _adds_usage(route, body, parsed)
    return ParsedRequest(body, fingerprint.text_bytes, request, adds_usage, named, may_be_short, fields.spans, exact)


def _credential(headers: Sequence[Header]) -> int | None:
    """Return the hash of the key that a client sends to the engine, which is not kept."""
    for name, value in headers:
        if name in KEYS:
            return hash(value)
    return None


def _boundaries(fingerprint: Fingerprint, exact: ExactPrompt | None, tokens: int) -> Sequence[int]:
    """Return the tokens at the end of each message: as counted, else in proportion to the text."""
    if exact is not None and exact.boundaries:
        return exact.boundaries
    return token_boundaries(fingerprint.boundaries, size=fingerprint.text_bytes, tokens=tokens)


def _names(models: ServedModels, parsed: Mapping[str, Any]) -> tuple[str | None, str | None, str | None, str | None]:
    """Return the names of a body's model and of its adapter, its model in the Router, and that if it is an adapter."""
    named, requested = _model(parsed), _adapter(models, parsed)
    model = models.canonical(requested or named)
    return named, requested, model, model if models.is_adapter(model) else None


def _model(parsed: Mapping[str, Any]) -> str | None:
    model = parsed.get("model")
    return model if isinstance(model, str) and model else None


def _adapter(models: ServedModels, parsed: Mapping[str, Any]) -> str | None:
    """Return the adapter that a body names by SGLang's own field; one that no replica lists is left to the engine."""
    name = parsed.get("lora_path")
    return name if isinstance(name, str) and models.is_adapter(name) else None


def _is_idempotent(route: str, parsed: Mapping[str, Any]) -> bool:
    """Whether the engine stores no response, so that a second attempt leaves no second one. `/v1/responses` stores."""
    return parsed.get("store") is False if route == "/v1/responses" else parsed.get("store") is not True


def _stored_on(stored_responses: StoredResponses, client: str | None, parsed: Mapping[str, Any]) -> str | None:
    """Return the replica that has the response which this request continues."""
    previous = parsed.get("previous_response_id")
    if previous is None:
        return None
    replica = stored_responses.find(previous, client=client) if isinstance(previous, str) else None
    if replica is None:
        message = "previous_response_id: unknown to this proxy"
        raise HttpError(404, "previous_response_not_found", message)
    return replica


def _adds_usage(route: str, body: bytes, parsed: Mapping[str, Any]) -> bool:
    wanted = parsed.get("stream") is True and "stream_options" not in parsed and route in _USAGE_ROUTES
    # A zero byte can only come from UTF-16 or UTF-32, where a brace is not one byte.
    return wanted and b"\0" not in body


# The gaps between the tokens of one answer, for the p95 of its inter-token time. Comments, which keep a connection
# alive, do not count, nor do the events of a stream's end, which carry no token.


#: Gaps recorded per answer; the first 4,096 stand for longer answers.
MAX_GAPS = 4096
#: Events of a dialect's end that carry no token, at most: a finish reason, usage, `[DONE]` and the like.
END_EVENTS = 4
#: A longer chunk at the end counts as tokens.
END_CHUNK_BYTES = 4 * 1024


class Gaps:
    """The gaps of one answer, s."""

    __slots__ = ("_recent", "_seconds", "last_s")

    def __init__(self, last_s: float = 0.0) -> None:
        #: When the last chunk came.
        self.last_s = last_s
        self._seconds = array("d")
        #: The last chunks that have a gap.
        self._recent: deque[bytes] = deque(maxlen=END_EVENTS)

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, chunk: bytes, now: float) -> None:
        """Count a chunk that is no comment."""
        seconds = self._seconds
        if len(seconds) < MAX_GAPS:
            self._recent.append(chunk)
            seconds.append(now - self.last_s)
        self.last_s = now

    def add_pause(self, chunk: bytes, seconds: float) -> None:
        """Count a pause of the client's that ended with a chunk which had come before."""
        last_s = self.last_s
        self.add(chunk, last_s + seconds)
        self.last_s = last_s

    def drop_all(self) -> None:
        """Remove all gaps: pieces of one body are not tokens."""
        del self._seconds[:]
        self._recent.clear()

    def drop_end(self, route: str) -> None:
        """Remove the gaps of the last chunks without a token. Done once per stream, to keep `add` short."""
        if len(self._seconds) == MAX_GAPS:
            return
        while self._recent:
            chunk = self._recent[-1]
            if len(chunk) > END_CHUNK_BYTES:
                return
            if FirstTokenDetector(route).feed(chunk) is StreamState.CONTENT:
                return
            self._recent.pop()
            self._seconds.pop()

    def median(self) -> float | None:
        """Return the median; `None` without a gap."""
        seconds = self._seconds
        return sorted(seconds)[len(seconds) // 2] if seconds else None

    def p95(self) -> float | None:
        """Return the 95th percentile; `None` without a gap."""
        seconds = self._seconds
        return sorted(seconds)[ceil(0.95 * len(seconds)) - 1] if seconds else None


def is_comment(chunk: bytes) -> bool:
    """Return whether a chunk of a stream is nothing but a comment."""
    return chunk[:1] == b":" and b"data:" not in chunk
