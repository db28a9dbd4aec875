"""`gorgo report`: results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gorgo.cli.options import finite


def report(
    dir: Annotated[Path, typer.Argument(help="Folder that `--out` of simulate, replay or demo wrote, or a parent.")],
    slo_ttft_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=1,
            callback=finite,
            show_default=False,
            help="SLO of the first token for the plot of requests within it; repeatable. Default: 500 and 2,000.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default=False, help="Policy to show; repeatable. Default: all."),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(metavar="png|pdf", show_default=False, help="Form of plots beside SVG; repeatable."),
    ] = None,
) -> None:
    """Write DIR/report.html, one page of results, and its plots and figures as SVG and CSV files in DIR/report.

    It has tables and plots of every results.json, requests.jsonl and history.json in DIR or below it. The page needs no
    network and no script. Needs the extra: pip install 'gorgo-router[report]'.
    """
    from gorgo.lab.report import FORMS, MAX_SLOS, SLOS_MS, write_report

    if slo_ttft_ms is not None and len(set(slo_ttft_ms)) > MAX_SLOS:
        raise typer.BadParameter(f"--slo-ttft-ms {len(slo_ttft_ms)} times: expected at most {MAX_SLOS}")
    if unknown := [name for name in form or () if name not in FORMS]:
        raise typer.BadParameter(f"--form {unknown[0]}: expected one of: {', '.join(FORMS)}")
    slos_ms = sorted(set(slo_ttft_ms)) if slo_ttft_ms else SLOS_MS
    typer.echo(str(write_report(dir, slos_ms=slos_ms, policies=policy or (), forms=form or ())))
