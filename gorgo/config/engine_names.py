"""Names of engines in regions.yaml: the dialects of this package and of other installed packages.

Names only: a file is checked without loading a dialect. `gorgo.engines.registry` has the classes.
"""

from __future__ import annotations

from importlib.metadata import entry_points

#: Group in which another package offers a dialect: the entry point's name is the engine's, its object the class.
ENTRY_POINTS = "gorgo.engines"
BUILT_IN = ("sglang", "vllm", "llamacpp", "openai")
#: The kind is found by asking the engine.
AUTO = "auto"


def engine_names() -> list[str]:
    """Return all names of engines, this package's first. Entry points are read from files at each call."""
    others = {found.name for found in entry_points(group=ENTRY_POINTS)} - set(BUILT_IN)
    return [*BUILT_IN, *sorted(others)]


def checked_engine(name: str) -> str:
    """Return `name`. Raises `ValueError` with the allowed names."""
    if name == AUTO or name in BUILT_IN or name in engine_names():
        return name
    *first, last = (f"'{known}'" for known in (*engine_names(), AUTO))
    raise ValueError(f"{', '.join(first)} or {last}")
