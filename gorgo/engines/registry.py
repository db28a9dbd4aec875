"""Engine dialects by the name that `engine:` has in regions.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gorgo.engines.base import EngineDialect
from gorgo.engines.llamacpp import LlamaCpp
from gorgo.engines.openai import OpenAI
from gorgo.engines.sglang import SGLang
from gorgo.engines.vllm import VLLM

_BUILT_IN: tuple[type[EngineDialect], ...] = (SGLang, VLLM, LlamaCpp, OpenAI)

DIALECTS: Mapping[str, type[EngineDialect]] = MappingProxyType({kind.name: kind for kind in _BUILT_IN})


def dialect(name: str) -> EngineDialect:
    """The dialect of that name; the configuration allows no other names.

    >>> dialect("sglang").probe_path
    '/ping'
    """
    return DIALECTS[name]()
