"""`gorgo calibrate`: the constants of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table

if TYPE_CHECKING:
    from gorgo.lab.calibrate import Calibration


def calibrate(
    url: Annotated[
        str | None, typer.Option(show_default=False, help="Base URL of an engine without other load.")
    ] = None,
    request_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Request log of the proxy, instead of --url."),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Replica in the request log. Default: the one with the most requests.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(show_default=False, help="Model to request. Default: the first of GET /v1/models.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, max=60, help="No request starts later.")] = 10.0,
    max_input: options.MaxInput = 24_000,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Most requests at once.")] = 64,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write the profile file there.")
    ] = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Measure an engine, for simulations and priors.

    Prompts of growing length, batches of growing size and shared beginnings give the cost of prefill and decode, the KV
    pool, and what the engine finds of a cached prefix. The engine must have no other load. The profile file is a value
    of `simulation.profile` in regions.yaml, and the keys of `capacity` are printed. With --request-log the costs are
    fitted to traffic, without a request.
    """
    from gorgo.lab.calibrate import CalibrateOptions, calibrate_engine, calibrate_log
    from gorgo.lab.calibrate.measure import Bounds
    from gorgo.lab.progress import shown_progress
    from gorgo.lab.request_log import skipped_lines

    if (url is None) == (request_log is None):
        raise typer.BadParameter("--url, --request-log: expected one of the two")
    if request_log is not None:
        found = calibrate_log(request_log, replica=replica)
        warning = skipped_lines(request_log)
        if warning is not None:
            typer.echo(f"gorgo: {warning}", err=True)
    else:
        assert url is not None
        bounds = Bounds(time_s=60 * minutes, fill_s=24 * minutes, max_input=max_input or 24_000, max_batch=max_batch)
        wanted = CalibrateOptions(url=url, bounds=bounds, model=model, api_key=options.api_key(), seed=seed)
        with shown_progress("calibrate") as advance:
            found = calibrate_engine(wanted, advance=advance)
    name = out.stem if out is not None else "calibrated"
    if out is not None:
        _write(out, found, name)
    if as_json:
        options.print_json(found.document(name))
    else:
        _show(found, name)


def _write(path: Path, found: Calibration, name: str) -> None:
    import json

    from gorgo.config.atomic import PUBLIC, write_atomically

    write_atomically(path, (json.dumps(found.document(name), indent=2) + "\n").encode(), mode=PUBLIC)


def _show(found: Calibration, name: str) -> None:
    profile, errors = found.profile(name), found.errors()
    rows: list[list[Cell]] = [
        ["scheduler", profile.scheduler],
        ["prefill, ms per step", profile.prefill_base_s * 1e3],
        ["prefill, tokens/s", profile.prefill_tokens_per_s],
        ["prefill, ns per token squared", profile.prefill_kappa_s * 1e9],
        ["tokens per prefill step", profile.chunk_tokens],
        ["decode, ms per step", profile.decode_base_s * 1e3],
        ["decode, ms for all experts", profile.decode_moe_s * 1e3],
        ["decode, ms per request", profile.decode_per_request_s * 1e3],
        ["decode, ns per context token", profile.decode_kv_s * 1e9],
        ["largest batch with a CUDA graph", profile.cuda_graph_max_batch],
        ["decode, ms without one", profile.decode_eager_s * 1e3],
        ["outside of the engine's steps, ms", errors["request_overhead_s"] * 1e3],
        ["KV pool, tokens", profile.kv_tokens],
        ["share of a cached prefix found", profile.hit_share],
        ["found in multiples of, tokens", profile.checkpoint_tokens],
    ]
    typer.echo(table(["constant", "value"], rows))
    for part in ("prefill", "decode"):
        error = errors[part]
        typer.echo(f"{part}: error {error['median']:.1%} median, {error['worst']:.1%} worst, {error['points']} points")
    typer.echo(f"KV pool: {errors['kv_tokens']}; shared prefix: {errors['shared_prefix']}")
    for reason in found.refused:
        typer.echo(f"a request failed: {reason}")
    typer.echo("capacity:")
    for key, value in found.capacity().items():
        typer.echo(f"  {key}: {value:g}" if value < 1e5 else f"  {key}: {value:.0f}")
