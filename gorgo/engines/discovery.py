"""The kind of an engine, its version and its models, from its own answers.

Owns which routes identify an engine, and the readers of their answers; the proxy makes the requests.

Theory of operation. `/v1/models` is asked first: every engine has it, and its `owned_by` names most kinds. One more
route confirms the kind and has the version. Without a known owner all such routes are asked in turn. A server that has
models and none of these routes is any other server of the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

MODELS_PATH = "/v1/models"
#: Models of one replica that are read: an engine with adapters lists hundreds.
MAX_MODELS = 1000
#: As long as a name in regions.yaml may be.
MAX_NAME = 256

#: Routes that identify a kind of engine; the second of SGLang is that of older versions.
_ROUTES: Mapping[str, tuple[str, ...]] = {
    "sglang": ("/server_info", "/get_server_info"),
    "vllm": ("/version",),
    "llamacpp": ("/props",),
}
#: Routes that have the longest context of an engine whose list of models has none: `_ROUTES` of the same engines.
_CONTEXT_ROUTES = ("/props", "/server_info", "/get_server_info")
#: Names of it in a row of a list: vLLM's and SGLang's, that of LM Studio and of gateways; in `meta`, llama.cpp's.
_CONTEXT_KEYS = ("max_model_len", "loaded_context_length", "context_length", "max_context_length")
#: As long as a context may be: a larger number is none.
_MAX_CONTEXT = 1 << 31
#: Keys of SGLang's answer, of which every version has one; vLLM's route of the same name has none of them.
_SGLANG_KEYS = ("internal_states", "served_model_name", "tokenizer_path")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a replica lists. `parent` is the base model of an adapter (LoRA), else `None`.

    `context_tokens` is the longest prompt with its answer that the replica takes; `None` is unknown.
    """

    name: str
    parent: str | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A kind of engine, by its name in regions.yaml; the version is `None` where no route has it."""

    name: str
    version: str | None = None


def read_models(answer: object) -> tuple[ServedModel, ...] | None:
    """Return the models of an answer to `/v1/models`, `None` if it is no list of models.

    An adapter whose row has no context has that of its base.

    >>> found = read_models({"data": [{"id": "base", "max_model_len": 8192}, {"id": "sql", "parent": "base"}]})
    >>> [(model.name, model.parent, model.context_tokens) for model in found]
    [('base', None, 8192), ('sql', 'base', 8192)]
    """
    rows = _rows(answer)
    if rows is None:
        return None
    models: dict[str, ServedModel] = {}
    for entry in rows:
        name, parent = _name(entry.get("id")), _name(entry.get("parent"))
        if name is not None and len(models) < MAX_MODELS:
            models.setdefault(name, ServedModel(name, None if parent == name else parent, _context_of_row(entry)))
    return tuple(_with_context_of_base(model, models) for model in models.values())


def _with_context_of_base(model: ServedModel, models: Mapping[str, ServedModel]) -> ServedModel:
    base = None if model.parent is None or model.context_tokens is not None else models.get(model.parent)
    return model if base is None else replace(model, context_tokens=base.context_tokens)


def context_routes(engine: str) -> tuple[str, ...]:
    """Return the routes of an engine that have its longest context, in the order in which they are asked."""
    return tuple(path for path in _ROUTES.get(engine, ()) if path in _CONTEXT_ROUTES)


def read_context(answer: object) -> int | None:
    """Return the longest context in an answer of one of `context_routes`; `None` if it has none.

    llama.cpp has that of one slot, of which it may have several. SGLang has the one that was configured, else what its
    scheduler takes.

    >>> read_context({"default_generation_settings": {"n_ctx": 8192}})
    8192
    >>> read_context({"context_length": None, "max_req_input_len": 32762, "tokenizer_path": "x"})
    32762
    """
    if not isinstance(answer, dict):
        return None
    settings = answer.get("default_generation_settings")
    if isinstance(settings, dict):
        return _tokens(settings.get("n_ctx"))
    contexts = (_tokens(answer.get(key)) for key in ("max_model_len", "context_length", "max_req_input_len"))
    return next((tokens for tokens in contexts if tokens is not None), None)


def owner_of(answer: object) -> str | None:
    """Return the kind of engine that owns the models of an answer to `/v1/models`, `None` if it is not a known one."""
    owners = {entry.get("owned_by") for entry in _rows(answer) or () if isinstance(entry.get("owned_by"), str)}
    return next((name for name in _ROUTES if owners == {name}), None)


def identifying_routes(owner: str | None) -> tuple[str, ...]:
    """Return the routes to ask, in order, until one answer is recognised."""
    return _ROUTES[owner] if owner is not None else tuple(path for paths in _ROUTES.values() for path in paths)


def recognise(path: str, answer: object) -> FoundEngine | None:
    """Return the engine that answers so on this route, if any.

    >>> recognise("/version", {"version": "0.33.0"})
    FoundEngine(name='vllm', version='0.33.0')
    """
    if not isinstance(answer, dict):
        return None
    version = _name(answer.get("build_info" if path == "/props" else "version"))
    if path in _ROUTES["sglang"] and any(key in answer for key in _SGLANG_KEYS):
        return FoundEngine("sglang", version)
    if path == "/version" and version is not None:
        return FoundEngine("vllm", version)
    if path == "/props" and "default_generation_settings" in answer:
        return FoundEngine("llamacpp", version)
    return None


def _rows(answer: object) -> list[dict[str, object]] | None:
    rows = answer.get("data") if isinstance(answer, dict) else None
    return [entry for entry in rows if isinstance(entry, dict)] if isinstance(rows, list) else None


def _context_of_row(entry: Mapping[str, object]) -> int | None:
    meta = entry.get("meta")
    contexts = [_tokens(entry.get(key)) for key in _CONTEXT_KEYS]
    contexts += [_tokens(meta.get("n_ctx"))] if isinstance(meta, dict) else []
    return next((tokens for tokens in contexts if tokens is not None), None)


def _tokens(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_CONTEXT else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable() else None
