"""The kind of an engine, its version and its models, from its own answers.

Owns which routes identify an engine, and the readers of their answers; the proxy makes the requests.

Theory of operation. `/v1/models` is asked first: every engine has it, and its `owned_by` names most kinds. One more
route confirms the kind and has the version. Without a known owner all such routes are asked in turn. A server that has
models and none of these routes is any other server of the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
#: Keys of SGLang's answer, of which every version has one; vLLM's route of the same name has none of them.
_SGLANG_KEYS = ("internal_states", "served_model_name", "tokenizer_path")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a replica lists. `parent` is the base model of an adapter (LoRA), else `None`."""

    name: str
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A kind of engine, by its name in regions.yaml; the version is `None` where no route has it."""

    name: str
    version: str | None = None


def read_models(answer: object) -> tuple[ServedModel, ...] | None:
    """Return the models of an answer to `/v1/models`, `None` if it is no list of models.

    >>> read_models({"data": [{"id": "base", "owned_by": "vllm"}, {"id": "sql", "parent": "base"}]})
    (ServedModel(name='base', parent=None), ServedModel(name='sql', parent='base'))
    """
    rows = _rows(answer)
    if rows is None:
        return None
    models: dict[str, ServedModel] = {}
    for row in rows:
        name, parent = _name(row.get("id")), _name(row.get("parent"))
        if name is not None and len(models) < MAX_MODELS:
            models.setdefault(name, ServedModel(name, None if parent == name else parent))
    return tuple(models.values())


def owner_of(answer: object) -> str | None:
    """Return the kind of engine that owns the models of an answer to `/v1/models`, `None` if it is not a known one."""
    owners = {row.get("owned_by") for row in _rows(answer) or () if isinstance(row.get("owned_by"), str)}
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
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable() else None
