"""`gorgo report`: results as one HTML page, or one minute of a request log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options
from gorgo.cli.options import finite

if TYPE_CHECKING:
    from gorgo.lab.report.minute import TwinRow

#: Of the log before the minute that the twin simulates first, so that caches and queues are as full as they were.
_WARM_S = 1200.0


def report(
    dir: Annotated[
        Path,
        typer.Argument(
            help="Folder that `--out` of simulate, replay or demo wrote, or a parent; with --minute a request log."
        ),
    ],
    slo_ttft_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=1,
            callback=finite,
            show_default=False,
            help="SLO of the first token for the plot of requests within it; repeatable. Default: 500 and 2,000.",
        ),
    ] = None,
    minute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            show_default=False,
            help="Report the minute of a request log that begins then: a date and time, UTC without a zone.",
        ),
    ] = None,
    config: options.Config = options.REGIONS_YAML,
    no_twin: Annotated[
        bool, typer.Option("--no-twin", help="With --minute: no simulation of it under the policy and the oracle.")
    ] = False,
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

    It has tables and plots of every results.json, requests.jsonl and history.json in DIR or below it. With --minute,
    DIR is a request log, and DIR.minute.html says who waited in that minute, for what, where, and behind whose load,
    beside the hour before and the same minute in the simulation. The page needs no network and no script. Needs the
    extra: pip install 'gorgo-router[report]'.
    """
    from gorgo.lab.report import FORMS, MAX_SLOS, SLOS_MS, require_extra, write_report

    if minute is not None:
        require_extra()
        typer.echo(str(_write_minute(dir, _date(minute), None if no_twin else config)))
        return
    if slo_ttft_ms is not None and len(set(slo_ttft_ms)) > MAX_SLOS:
        raise typer.BadParameter(f"--slo-ttft-ms {len(slo_ttft_ms)} times: expected at most {MAX_SLOS}")
    if unknown := [name for name in form or () if name not in FORMS]:
        raise typer.BadParameter(f"--form {unknown[0]}: expected one of: {', '.join(FORMS)}")
    slos_ms = sorted(set(slo_ttft_ms)) if slo_ttft_ms else SLOS_MS
    typer.echo(str(write_report(dir, slos_ms=slos_ms, policies=policy or (), forms=form or ())))


def _date(text: str) -> float:
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(f"--minute {text}: expected a date and time like 2026-04-05T16:15") from None
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def _write_minute(log: Path, start_s: float, config: Path | None) -> Path:
    """Write the page of a minute beside its log; return its path."""
    from gorgo.config.atomic import PUBLIC, write_atomically
    from gorgo.errors import TraceError
    from gorgo.lab.report.minute import minute_page, slow_minute
    from gorgo.lab.request_log import read_logged_requests

    found = slow_minute(read_logged_requests(log), start_s)
    try:
        twins = () if config is None else _twins(log, start_s, config)
    except TraceError as error:  # without reported lengths of answers it is no trace
        typer.echo(f"gorgo: the minute is not simulated: {error}", err=True)
        twins = ()
    target = log.with_name(f"{log.name}.minute.html")
    write_atomically(target, minute_page(found, twins).encode(errors="backslashreplace"), mode=PUBLIC)
    typer.echo(found.verdict)
    return target


def _twins(log: Path, start_s: float, config: Path) -> Sequence[TwinRow]:
    """Simulate the minute, and what came before it, under the policy of `config` and by the oracle."""
    from gorgo.cli.policies import compose_policy
    from gorgo.config.load import load_config
    from gorgo.lab.report.minute import MINUTE_S, TwinRow, p95
    from gorgo.lab.request_log import read_request_log
    from gorgo.lab.sim.fleet import chosen_fleet, limits_of
    from gorgo.lab.simulate import ORACLE, SimJob
    from gorgo.lab.simulate.run import run_once
    from gorgo.lab.traces import TraceFilters

    loaded = load_config(config)
    policy, weights = compose_policy(loaded, source=config)
    first_s = min(row.timestamp_s for row in read_request_log(log).requests)
    begin_s = max(0.0, start_s - _WARM_S - first_s)
    filters = TraceFilters(start_s=begin_s, end_s=start_s + MINUTE_S - first_s)
    offsets = [row.timestamp_s - first_s for row in read_request_log(log).requests]
    # The simulation counts from the first request of its window.
    origin_s = first_s + min(offset for offset in offsets if offset >= begin_s)
    rows = []
    for name, values in ((policy.name, dict(weights)), (ORACLE, None)):
        job = SimJob(
            trace=str(log),
            policy=name,
            fleet=chosen_fleet(loaded, None, source=config),
            filters=filters,
            weights=values,
            limits=limits_of(loaded),
            probe_interval_s=loaded.proxy.probe_interval_s,
            scrape_interval_s=loaded.proxy.scrape_interval_s,
            keep_requests=True,
        )
        records = run_once(job).requests or ()
        inside = [row for row in records if origin_s + row.scheduled_s >= start_s]
        ttfts_s = [row.ttft_ms / 1e3 for row in inside if row.ttft_ms is not None]
        rows.append(TwinRow(name, len(inside), median(ttfts_s) if ttfts_s else None, p95(ttfts_s)))
    return rows
