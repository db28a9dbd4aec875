"""Which requests have exact tokens: the text that an engine encodes, from the fields of a body.

Owns the list of fields. Theory of operation. Engines differ in how they put tools, calls, media and lists of parts into
a prompt, and many fields change it. So a body counts only with fields that are known not to, and with messages of a
role and a text. All others are estimated, as without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
