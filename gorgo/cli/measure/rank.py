"""`gorgo rank`: how well a shadow policy orders replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gorgo.cli import options
from gorgo.cli.errors import FAILED, fail
from gorgo.cli.tables import Cell, table

if TYPE_CHECKING:
    from gorgo.lab.rank import RankTable

#: Most pages of samples read from a proxy: more than its ring buffer has.
MAX_PAGES = 100


def rank(
    file: Annotated[
        Path | None, typer.Argument(help="JSONL of samples or requests. Default: the samples of a running proxy.")
    ] = None,
    url: options.AdminUrl = options.ADMIN_URL,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use only requests that this policy routed.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show TTFT by the shadow policy's rank of the chosen replica.

    Route at random and set `proxy.shadow_policy`: under a shadow policy that orders replicas correctly, TTFT grows with
    the rank. The last line has Spearman's rho with its 95 % interval.
    """
    from gorgo.cli.admin.call import as_expected
    from gorgo.lab.rank import rank_table, read_rows

    if file is None:
        with as_expected(url):
            found = rank_table(_samples(url, options.admin_token()), policy=policy)
    else:
        found = rank_table(read_rows(file), policy=policy)
    if not found.n:
        where = url if file is None else file
        raise fail(f"{where}: no request with a rank among {found.left_out}; is proxy.shadow_policy set?", code=FAILED)
    if as_json:
        options.print_json(found.as_dict())
    else:
        typer.echo(_table(found))
        typer.echo(_words(found))


def _samples(url: str, token: str | None) -> Iterator[dict[str, Any]]:
    """Yield the samples that the proxy has at the first call; later ones are left out."""
    from gorgo.cli.admin.call import call_admin

    page = call_admin("GET", url, "/admin/samples?after=0", token)
    if not {"boot_id", "last_seq", "samples"} <= page.keys():
        raise fail(f"{url}: no samples in the answer; is it the admin address?", code=FAILED)
    boot, last = page["boot_id"], page["last_seq"]
    for _ in range(MAX_PAGES):
        yield from page["samples"]
        if not page["samples"] or page["samples"][-1]["seq"] >= last:
            return
        page = call_admin("GET", url, f"/admin/samples?after={page['samples'][-1]['seq']}", token)
        if page["boot_id"] != boot:
            raise fail(f"{url}: the proxy restarted during the reading; try again", code=FAILED)


def _table(found: RankTable) -> str:
    rows: list[list[Cell]] = [
        [row.rank, row.n, row.ttft_ms_mean, row.ttft_ms_p50, row.ttft_ms_p95] for row in found.rows
    ]
    return table(["rank", "n", "mean ms", "p50 ms", "p95 ms"], rows)


def _words(found: RankTable) -> str:
    routed = ", ".join(f"{name} ({n:,})" for name, n in found.policies.items())
    what = f"{found.n:,} requests routed by {routed}, ranked by {found.shadow or 'the shadow policy'}"
    if found.rho is None:
        return f"{what}; Spearman's rho: ranks or times are all the same"
    interval = "" if found.rho_low is None else f" (95 %: {found.rho_low:.3f} to {found.rho_high:.3f})"
    return f"{what}, {found.left_out:,} left out; Spearman's rho {found.rho:.3f}{interval}"
