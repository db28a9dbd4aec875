"""Engine dialects by their name in regions.yaml: those of this package, and those of entry points.

A new dialect here is one file, a line below, and its name in `config.values`. Another package adds its own by
an entry point in the group `gorgo.engines`: its name is the engine's, its object the class. It cannot replace a name of
this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from gorgo.config.values import AUTO, ENTRY_POINTS
from gorgo.engines.base import EngineDialect, OpenAI
from gorgo.engines.llamacpp import LlamaCpp
from gorgo.engines.sglang import SGLang
from gorgo.engines.vllm import VLLM
from gorgo.errors import ConfigError

_BUILT_IN: tuple[type[EngineDialect], ...] = (SGLang, VLLM, LlamaCpp, OpenAI)

DIALECTS: Mapping[str, type[EngineDialect]] = MappingProxyType({kind.name: kind for kind in _BUILT_IN})


def dialect(name: str) -> EngineDialect:
    """Return the dialect of that name; the configuration allows no other names. `auto` is `openai` until it is found.

    Raises `ConfigError` for an entry point with another object, and for an unknown name.

    >>> dialect("sglang").probe_path
    '/ping'
    """
    if name in DIALECTS or name == AUTO:
        return DIALECTS[OpenAI.name if name == AUTO else name]()
    for offered in entry_points(group=ENTRY_POINTS, name=name):
        try:
            kind = offered.load()()
        except Exception as error:
            where = f"{offered.value} of the entry point {name!r}"
            raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(kind, EngineDialect):
            raise ConfigError(
                f"{offered.value} of the entry point {name!r} is not an engine dialect (gorgo.engines.base)"
            )
        return kind
    raise ConfigError(f"no engine named {name!r}; there are: {', '.join(DIALECTS)}")
