"""The interface of engine dialects: paths to probe and scrape, and readers of the answers.

Owns the protocol (`EngineDialect`), the dialect of any other server (`OpenAI`), and the rule of probes (`probe_paths`,
`is_well`). Readers are plain functions over
text; the proxy makes the requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

from gorgo.core.continuation import MESSAGES, Continuation
from gorgo.core.messages.request import EngineSample


@runtime_checkable
class EngineDialect(Protocol):
    """One kind of engine.

    `probe_path` is answered at once, without touching the scheduler: its round trip is the network's. `metrics_path`
    and `loads_path` are `None` where the engine has no such route. Both readers return the values that they
    find and `None` for the rest; they never raise for an unexpected text, because the next version of an engine will
    differ.

    `report_flags` has the engine's flag for each report that is off by default: `cached_tokens`, `metrics`.

    A dialect may also have `continuation`, which says how the engine goes on with an answer that broke off elsewhere.
    """

    name: ClassVar[str]
    probe_path: ClassVar[str]
    metrics_path: ClassVar[str | None]
    loads_path: ClassVar[str | None]
    report_flags: ClassVar[Mapping[str, str]]

    def read_metrics(self, text: str) -> EngineSample: ...

    def read_capacity(self, loads: object) -> EngineSample: ...


def continuation_of(engine: EngineDialect, route: str) -> Continuation | None:
    """Return how the engine goes on with an answer of a route that broke off; `None` if that is not known.

    Anthropic's messages have no flags: an engine that needs them is asked by a chat.

    >>> from gorgo.engines.registry import dialect
    >>> continuation_of(dialect("vllm"), "/v1/completions"), continuation_of(dialect("openai"), "/v1/completions")
    (<Continuation.FLAGS: 'flags'>, None)
    """
    continuation: Continuation | None = getattr(engine, "continuation", None)
    return Continuation.AS_CHAT if route == MESSAGES and continuation is Continuation.FLAGS else continuation


#: The route by which all engines that go on with an answer count tokens.
TOKENIZE_PATH = "/tokenize"
#: A text of a message, and white space behind it that a template may trim.
_LETTER = "a"


def tokenize_body(model: str | None, text: str) -> bytes:
    """Return the request for the tokens of a text; each engine reads the members that it knows."""
    named = {} if model is None else {"model": model}
    plain = {"prompt": text, "add_special_tokens": False, "content": text, "add_special": False}
    return json.dumps(named | plain).encode()


def template_body(model: str | None, space: str) -> bytes:
    """Return the request for the tokens of a chat whose last message ends with `space` and is to be gone on with.

    Where they are those of the chat without it, the template of the model trims its messages.
    """
    named = {} if model is None else {"model": model}
    messages = [{"role": "user", "content": _LETTER}, {"role": "assistant", "content": _LETTER + space}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    return json.dumps({**named, "messages": messages, **flags}).encode()


def read_tokens(status: int, answer: bytes) -> list[Any] | None:
    """Return the tokens of an answer to either; `None` if the engine has no such route, or another one.

    >>> read_tokens(200, b'{"tokens": [5, 7]}'), read_tokens(404, b"{}")
    ([5, 7], None)
    """
    try:
        reply = json.loads(answer) if status == 200 else None
    except (ValueError, RecursionError):
        return None
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    return tokens if isinstance(tokens, list) else None


def merged(first: EngineSample, second: EngineSample) -> EngineSample:
    """`first`, with its gaps filled from `second`."""
    return EngineSample(
        running_requests=_either(first.running_requests, second.running_requests),
        queued_requests=_either(first.queued_requests, second.queued_requests),
        used_tokens=_either(first.used_tokens, second.used_tokens),
        kv_capacity_tokens=_either(first.kv_capacity_tokens, second.kv_capacity_tokens),
        max_running_requests=_either(first.max_running_requests, second.max_running_requests),
        prefill_tokens_total=_either(first.prefill_tokens_total, second.prefill_tokens_total),
        prefill_busy_s_total=_either(first.prefill_busy_s_total, second.prefill_busy_s_total),
        prompt_tokens_total=_either(first.prompt_tokens_total, second.prompt_tokens_total),
    )


def _either(first: float | None, second: float | None) -> float | None:
    return second if first is None else first


# The paths of a probe and its answer. One rule for the probes of the proxy and for `gorgo check --live`.


_MODELS = "/v1/models"


def probe_paths(engine: EngineDialect) -> tuple[str, str]:
    """Return the engine's own path, then one for servers and gateways that answer it with 404 or 405.

    >>> from gorgo.engines.registry import dialect
    >>> probe_paths(dialect("sglang")), probe_paths(dialect("openai"))
    (('/ping', '/v1/models'), ('/v1/models', '/health'))
    """
    return engine.probe_path, "/health" if engine.probe_path == _MODELS else _MODELS


def is_well(status: int) -> bool:
    """Return whether a probe's answer means that the replica is well.

    Only 2xx: a server that refuses a probe, redirects it or has no such route is no engine that can serve.
    """
    return 200 <= status < 300


class OpenAI:
    """An engine of which only the API is known; the router goes by the load that it sends there itself.

    Example
    -------
    >>> OpenAI().read_metrics("anything 1") == EngineSample()
    True
    """

    name: ClassVar[str] = "openai"
    probe_path: ClassVar[str] = "/v1/models"
    metrics_path: ClassVar[str | None] = None
    loads_path: ClassVar[str | None] = None
    report_flags: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def read_metrics(self, text: str) -> EngineSample:  # noqa: ARG002 - the protocol's signature
        return EngineSample()

    def read_capacity(self, loads: object) -> EngineSample:  # noqa: ARG002 - the protocol's signature
        return EngineSample()
