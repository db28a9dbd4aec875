"""Options that several commands share: each means the same in all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from gorgo.lab.traces import TraceFilters

REGIONS_YAML = Path("regions.yaml")
ADMIN_URL = "http://127.0.0.1:9090"
ADMIN_URLS = [ADMIN_URL]
#: No header holds a longer token; a device such as /dev/zero has no end.
_TOKEN_BYTES_MAX = 65_536


def admin_token() -> str | None:
    """Return the token in GORGO_ADMIN_TOKEN, else the one in the file that GORGO_ADMIN_TOKEN_FILE names.

    There is no option for it: every user of a host can read the command lines of its processes. A file that cannot be
    read or is empty is a usage error, and so is a token that no header can hold.
    """
    return _token("GORGO_ADMIN_TOKEN")


def metrics_token() -> str | None:
    """Return the token for `GET /metrics` of the admin listener alone: in GORGO_METRICS_TOKEN, else in its file."""
    return _token("GORGO_METRICS_TOKEN")


def _token(variable: str) -> str | None:
    token = _word(os.environ.get(variable) or "", f"{variable}: ") or None
    name = os.environ.get(f"{variable}_FILE")
    if token is not None or not name:
        return token
    prefix = f"{variable}_FILE={name}: "
    try:
        with open(name, "rb") as file:
            text = file.read(_TOKEN_BYTES_MAX + 1).decode().strip()
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{prefix}expected a file with the token: {error}") from error
    if not 0 < len(text) <= _TOKEN_BYTES_MAX:
        found = "more than any header holds" if text else "nothing"
        raise typer.BadParameter(f"{prefix}expected the token, found {found}")
    return _word(text, prefix)


def finite(option: typer.CallbackParam, value: float | list[float] | None) -> float | list[float] | None:
    """Return the numbers, or raise a usage error for `nan` and `inf`, which bounds let pass."""
    for number in value if isinstance(value, list) else [value]:
        if number is not None and not isfinite(number):
            raise typer.BadParameter(f"{option.opts[0]} {number}: expected a finite number")
    return value


Config = Annotated[
    Path, typer.Option(envvar="GORGO_CONFIG", metavar="FILE", help="File with regions, replicas, policy and limits.")
]
Fleet = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", show_default=False, help="Fleet of `gorgo fleets` in place of the replicas of regions.yaml."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
MaybeSeed = Annotated[int | None, typer.Option(min=0, help="Random seed. Default: a random one.", show_default=False)]
Weights = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='Weights file, at least {"policy": NAME, "weights": {NAME: NUMBER}}.'),
]
Reason = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Reason to store with the change.", show_default=False)
]
AdminUrl = Annotated[str, typer.Option("--url", envvar="GORGO_ADMIN_URL", help="Admin address of the proxy.")]
AdminUrls = Annotated[
    list[str], typer.Option("--url", envvar="GORGO_ADMIN_URL", help="Admin address of the proxy. Repeatable.")
]

LogFormat = Annotated[
    Literal["json", "text"], typer.Option(help="Format of log lines: json for programs, text for readers.")
]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="Least level of a log line.")]

Trace = Annotated[
    str,
    typer.Argument(
        help="Mooncake or ART-Chat JSONL, `.gz` or not; a request log; or a shipped trace or shape by name."
    ),
]
_LOAD_HELP = "Load relative to the trace's own: 0.5 is the same trace in twice the time. Default: 1."
_TIME_SCALE_HELP = (
    "Factor on the time between requests, 1 / load: 2.0 is the same trace in twice the time, half the load."
)
Load = Annotated[float | None, typer.Option(help=_LOAD_HELP, show_default=False)]
TimeScale = Annotated[float | None, typer.Option(help=_TIME_SCALE_HELP, show_default=False)]
Loads = Annotated[list[float] | None, typer.Option(help=f"{_LOAD_HELP} Repeatable.", show_default=False)]
TimeScales = Annotated[list[float] | None, typer.Option(help=f"{_TIME_SCALE_HELP} Repeatable.", show_default=False)]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most this many requests.", show_default=False)]
MaxInput = Annotated[int | None, typer.Option(min=1, help="Omit requests with more input tokens.", show_default=False)]
MaxOutput = Annotated[
    int | None, typer.Option(min=1, help="Cap the output tokens of each request.", show_default=False)
]
Spread = Annotated[
    float, typer.Option(min=0, callback=finite, help="Scatter requests with equal time stamps over this many seconds.")
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65_536,
        metavar="N",
        show_default=False,
        help="Tokens that each id of a block stands for. Default: 512, and those that a file or a shape names.",
    ),
]
ClosedLoop = Annotated[
    bool, typer.Option("--closed-loop", help="Send each turn of a session a think time after the answer before it.")
]
Warm = Annotated[
    float,
    typer.Option(min=0, callback=finite, help="Serve the requests of the first S seconds and count none of them."),
]
Windows = Annotated[
    int, typer.Option(min=1, max=1000, help="Disjoint windows of each run: intervals are over windows, not seeds.")
]
UserSessions = Annotated[
    bool, typer.Option("--user-sessions", help="Requests of a user that name no session are one session.")
]
Start = Annotated[
    str | None,
    typer.Option(
        help="Start of the window: seconds, MM:SS or HH:MM:SS from the first request; or a date and time.",
        show_default=False,
    ),
]
End = Annotated[str | None, typer.Option(help="End of the window, exclusive; as --start.", show_default=False)]
Seeds = Annotated[int, typer.Option(min=1, help="Runs per policy or candidate, each with its own seed from --seed on.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, show_default=False, help="Simulations at a time. Default: one per core.")
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write results.json and requests.jsonl there.", show_default=False)
]


def trace_filters(
    *,
    limit: int | None = None,
    max_input: int | None = None,
    max_output: int | None = None,
    spread: float = 0.0,
    start: str | None = None,
    end: str | None = None,
    seed: int = 0,
    user_sessions: bool = False,
) -> TraceFilters:
    """Return the filters that the options name."""
    from gorgo.lab.traces import TraceFilters, parse_window

    start_s, end_s, from_zero = parse_window(start, end)
    return TraceFilters(
        limit=limit,
        max_input=max_input,
        max_output=max_output,
        spread_s=spread,
        start_s=start_s,
        end_s=end_s,
        seed=seed,
        from_zero=from_zero,
        user_sessions=user_sessions,
    )


def time_scale_of(time_scale: float | None, load: float | None) -> float:
    """Return the time scale that --time-scale or --load gives, or raise a usage error."""
    (only,) = time_scales_of(*([] if one is None else [one] for one in (time_scale, load)))
    return only


def time_scales_of(time_scales: Sequence[float] | None, loads: Sequence[float] | None) -> list[float]:
    """Return the time scales that --time-scale or --load give, 1 without either, or raise a usage error."""
    if time_scales and loads:
        raise typer.BadParameter("--load, --time-scale: expected one of the two; load is 1 / time scale")
    scales = [_positive("--time-scale", scale) for scale in time_scales or ()]
    return scales or [1 / _positive("--load", load) for load in loads or ()] or [1.0]


def _positive(option: str, number: float) -> float:
    if not (0 < number < inf and 1 / number < inf):
        raise typer.BadParameter(f"{option} {number}: expected a number greater than 0")
    return number


def api_key() -> str | None:
    """Return the key in GORGO_API_KEY; one that no header can hold is a usage error that does not show it."""
    return _word(os.environ.get("GORGO_API_KEY") or "", "GORGO_API_KEY: ") or None


def _word(key: str, prefix: str = "") -> str:
    word = key.strip()
    if not word.isascii() or not word.isprintable():
        raise typer.BadParameter(f"{prefix}expected printable ASCII, as a header can hold it")
    return word


def trace_path(trace: str) -> Path:
    """Return the path of the file or of the shipped trace of that name; the name of a shape is returned unchanged."""
    from gorgo.lab.datasets import datasets

    path = Path(trace)
    shipped = {one.name: one.path for one in datasets()}
    return path if path.exists() else shipped.get(trace, path)


def operator() -> str:
    """Return the name to store with a change."""
    return os.environ.get("LOGNAME") or os.environ.get("USER") or "gorgo"


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
