"""`gorgo report`: results as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    dir: Annotated[Path, typer.Argument(help="Folder that `--out` of simulate, replay or demo wrote, or a parent.")],
) -> None:
    """Write DIR/report.html, one page of results.

    It has tables and plots of every results.json, requests.jsonl and history.json in DIR or below it. The page needs no
    network and no script. Needs the extra: pip install 'gorgo-router[report]'.
    """
    from gorgo.apps.report import write_report

    typer.echo(str(write_report(dir)))
