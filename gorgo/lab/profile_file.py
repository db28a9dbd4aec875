"""Profile files of `gorgo calibrate`, a value of `simulation.profile` in regions.yaml.

Owns the check of the form. The file is JSON. The object under `profile` has the fields of `EngineProfile`; other keys
are for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from gorgo.core.numeric import MAX_AMOUNT, is_number
from gorgo.errors import ConfigError, closest
from gorgo.lab.sim.engine.profiles import EngineProfile

SUFFIX = ".json"
#: A profile takes 1 kB.
MAX_BYTES = 65_536
#: Other numbers are at least 0, whole ones at least 1.
_POSITIVE = ("prefill_tokens_per_s",)
_SHARES = ("hit_share",)


def is_profile_file(name: str) -> bool:
    """Return whether a value of `simulation.profile` names a file and not a profile of `gorgo profiles`."""
    return name.endswith(SUFFIX)


def read_profile(path: Path) -> EngineProfile:
    """Return the profile of a file; raises `ConfigError` with the file and the key."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        document = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a profile file of gorgo calibrate") from error
    found = document.get("profile") if isinstance(document, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: expected an object with the key profile, as gorgo calibrate --out writes it")
    known = {field.name: field for field in fields(EngineProfile)}
    for name in found:
        if name not in known:
            _fail(path, name, f"unknown key{closest(name, known)}", f"one of {', '.join(known)}")
    kinds = get_type_hints(EngineProfile)
    for name, field in known.items():
        if name in found:
            _check(path, name, found[name], kinds[name])
        elif field.default is MISSING:
            _fail(path, name, "missing", "a value")
    profile = EngineProfile(**found)
    if profile.slot_cache and profile.scheduler != "vllm":
        _fail(path, "slot_cache", "true", 'false, or "scheduler": "vllm"')
    if profile.scheduler == "vllm":
        for name, least in (("chunk_tokens", "max_running_requests"), ("kv_tokens", "block_tokens")):
            value, bound = getattr(profile, name), getattr(profile, least)
            if value < bound:
                _fail(path, name, str(value), f"at least {least} ({bound}) with vLLM")
    return profile


def _check(path: Path, name: str, value: Any, kind: Any) -> None:
    if value is None and NoneType in get_args(kind):
        return
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) is UnionType else [kind]
    if not any(_fits(name, value, one) for one in kinds):
        _fail(path, name, json.dumps(value)[:60], " or ".join(_expected(name, one) for one in kinds))


def _fits(name: str, value: Any, kind: Any) -> bool:
    if kind is float:
        least = 0.0 if name not in _POSITIVE else 1e-9
        return is_number(value) and least <= value <= (1.0 if name in _SHARES else MAX_AMOUNT)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_AMOUNT
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return isinstance(value, kind)


def _expected(name: str, kind: Any) -> str:
    if kind is float:
        return "a number from 0 to 1" if name in _SHARES else f"a number {'above' if name in _POSITIVE else 'from'} 0"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {int: "a whole number from 1", bool: "true or false", str: "text"}[kind]


def _fail(path: Path, name: str, found: str, expected: str) -> NoReturn:
    raise ConfigError(f"{path}: profile.{name}: {found}; expected {expected}")
