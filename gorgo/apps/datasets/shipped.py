"""The traces and the shapes that come with the project: where they lie and what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gorgo
from gorgo.errors import TraceError

#: What `gorgo demo` replays.
DEMO_TRACE = "chat-small"


@dataclass(frozen=True, slots=True)
class Dataset:
    """A shipped trace."""

    name: str
    path: Path
    #: The generator's parameters.
    shape: Path


def datasets() -> list[Dataset]:
    """All shipped traces, by name."""
    return sorted(_found(), key=lambda dataset: dataset.name)


def shipped_path(name: str) -> Path:
    """Where the trace of that name is; raises `TraceError` listing the names."""
    found = {dataset.name: dataset.path for dataset in datasets()}
    if name not in found:
        raise TraceError(f"no data set {name!r} comes with gorgo; there are: {', '.join(found) or 'none'}")
    return found[name]


def shapes() -> dict[str, Path]:
    """Where the parameters of each generated trace lie, by its name, whether or not the trace itself comes along."""
    return {path.stem: path for path in sorted(_folder().glob("*.toml"))}


def _found() -> Iterator[Dataset]:
    for name, shape in shapes().items():
        path = shape.with_name(f"{name}.jsonl.gz")
        if path.exists():
            yield Dataset(name, path, shape)


def _folder() -> Path:
    """Inside an installed package, or beside it in a clone."""
    package = Path(gorgo.__file__).parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent / "datasets"
