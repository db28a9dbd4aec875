"""What an engine reports about itself: whose scheduler it has, its chunk, its longest context.

Owns which keys of which answers are read. A value of another type than expected is no report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gorgo.engines.discovery import MODELS_PATH

#: SGLang's settings; the second route is that of older versions.
SETTINGS_PATHS = ("/server_info", "/get_server_info")
#: llama.cpp's settings; `n_ctx` is the context of one slot.
PROPERTIES_PATH = "/props"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Settings of an engine; None without a report.

    Parameters
    ----------
    scheduler:
        The scheduler of a simulated engine that forms steps alike.
    slot_cache:
        Whether prompts are cached by slots.
    chunk_tokens:
        Most prompt tokens in one prefill step.
    context_tokens:
        Longest prompt and output together.
    max_running_requests:
        Most requests in a batch.
    """

    scheduler: Literal["sglang", "vllm"] = "sglang"
    slot_cache: bool = False
    chunk_tokens: int | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None


def read_report(kind: str, model: str, answers: Mapping[str, object]) -> EngineReport:
    """Return what the answers of an engine of that kind say, by route.

    Example
    -------
    >>> read_report("vllm", "m", {"/v1/models": {"data": [{"id": "m", "max_model_len": 8192}]}})
    EngineReport(scheduler='vllm', slot_cache=False, chunk_tokens=None, context_tokens=8192, max_running_requests=None)
    """
    context = _count(_row(answers.get(MODELS_PATH), model).get("max_model_len"))
    if kind == "sglang":
        settings = next((found for path in SETTINGS_PATHS if (found := _object(answers.get(path)))), {})
        context = context or _count(settings.get("context_length"))
        chunk = settings.get("chunked_prefill_size")
        # -1 is SGLang's value for prompts in one step each.
        chunk_tokens = context if chunk == -1 else _count(chunk)
        return EngineReport(
            chunk_tokens=chunk_tokens,
            context_tokens=context,
            max_running_requests=_count(settings.get("max_running_requests")),
        )
    if kind == "llamacpp":
        settings = _object(_object(answers.get(PROPERTIES_PATH)).get("default_generation_settings"))
        context = context or _count(settings.get("n_ctx"))
        # A step has the decodes first and then prompts up to its batch size, as one of vLLM.
        return EngineReport(scheduler="vllm", slot_cache=True, context_tokens=context)
    return EngineReport(scheduler="vllm" if kind == "vllm" else "sglang", context_tokens=context)


def _row(listed: object, model: str) -> Mapping[str, object]:
    rows = _object(listed).get("data")
    return next((row for row in map(_object, rows) if row.get("id") == model), {}) if isinstance(rows, list) else {}


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 40 else None
