"""Options that `gorgo tune`, `gorgo tune-offline` and `gorgo history` share."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

#: As in tuner/history, which is not imported for `--help`.
DATABASE = "sqlite:///gorgo-history.sqlite3"
#: As in tuner/optimizers/registry.py, which is not imported either.
ALGORITHMS = ("es", "es-probes", "es-released", "cma", "random", "fixed")

Database = Annotated[
    str,
    typer.Option(
        envvar="GORGO_DATABASE_URL", metavar="URL", help="History of the tuner: sqlite:///FILE or postgresql://..."
    ),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="es-probes; es in mode paper",
        help="Optimizer that proposes candidates: es, es-probes, es-released, cma, random or fixed.",
    ),
]
Settings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default=False, help="YAML file of rarely changed settings; docs/reference.md lists them."
    ),
]
MaxGenerations = Annotated[int, typer.Option(min=1, help="Stop after this many generations.")]


def checked_algorithm(name: str | None) -> str | None:
    """Return the name of an optimizer of the registry or of another package's entry point, or raise a usage error."""
    if name is None:
        return None
    known = [*ALGORITHMS, *(found.name for found in entry_points(group="gorgo.optimizers"))]
    if name not in known:
        raise typer.BadParameter(f"--algorithm {name}: expected one of {', '.join(known)}")
    return name
