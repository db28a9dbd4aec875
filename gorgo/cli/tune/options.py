"""Options that `gorgo tune`, `gorgo tune-offline` and `gorgo history` share, and the file of rarely changed settings.

Both tuning commands take the same file with `--settings`, so that a campaign can be rehearsed with the settings that
will run live. Leaves the checks of a campaign's values to `CampaignOptions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from gorgo.cli.errors import BAD_INPUT, fail
from gorgo.config.load import load_settings
from gorgo.config.values import strict

if TYPE_CHECKING:
    from tuner.commands import CampaignOptions


#: As in tuner/history, which is not imported for `--help`.
DATABASE = "sqlite:///gorgo-history.sqlite3"
#: As in tuner/optimizers/registry.py, which is not imported either.
ALGORITHMS = ("es", "es-probes", "es-published", "es-released", "cma", "random", "fixed")

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
        show_default="es-probes; es-published in mode paper",
        help="Optimizer that proposes candidates: es, es-probes, es-published, es-released, cma, random or fixed.",
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


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Keys of the file; docs/reference.md has their meanings, and `CampaignOptions` checks those of a campaign."""

    window: int = 128
    hop: int = 32
    block_s: float = 120.0
    discard_s: float = 30.0
    rest_blocks: float = 2.0
    pairs: int = 20
    alpha: float = 0.05
    warm_up_s: float = 60.0
    guard: bool = True
    tune_lambda: bool = False
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    initial_weights: Mapping[str, float] = field(default_factory=dict)
    poll_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0
    proxy_wait_s: Annotated[float, Field(ge=0, le=31_536_000)] = 60.0
    decision_log: Path | None = None
    held_out_seeds: Annotated[int, Field(ge=2, le=1000)] = 10


def read_settings(path: Path | None) -> TuneSettings:
    """Return the settings of the file, or the defaults without one. Raises `ConfigError`."""
    return TuneSettings() if path is None else load_settings(path, TuneSettings)


def campaign_options(
    settings: TuneSettings,
    *,
    mode: str,
    max_generations: int,
    budget_s: float | None = None,
    freeze_at_end: bool = False,
) -> CampaignOptions:
    """Return the options of a campaign; a value that it refuses ends the program with exit code 2."""
    from gorgo.errors import TunerError
    from tuner.commands import CampaignOptions

    try:
        return CampaignOptions(
            mode=mode,  # type: ignore[arg-type] # CampaignOptions names the modes that exist
            window=settings.window,
            hop=settings.hop,
            block_s=settings.block_s,
            discard_s=settings.discard_s,
            rest_blocks=settings.rest_blocks,
            pairs=settings.pairs,
            alpha=settings.alpha,
            warm_up_s=settings.warm_up_s,
            guard=settings.guard,
            max_generations=max_generations,
            budget_s=budget_s,
            freeze_at_end=freeze_at_end,
        )
    except TunerError as error:
        raise fail(str(error), code=BAD_INPUT) from error
