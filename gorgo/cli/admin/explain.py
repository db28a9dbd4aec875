"""`gorgo explain`: why the proxy chose a replica, from its stored decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table

#: Rows of the list without an id: about a screen.
RECENT = 20

Row = Mapping[str, Any]
#: Columns of what a policy predicted, and of what is left of the objectives.
_ESTIMATES = {
    "ttft": "predicted TTFT",
    "tpot": "predicted TPOT",
    "e2e": "predicted E2E",
    "headroom_ttft": "TTFT headroom",
    "headroom_tpot": "TPOT headroom",
}


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST_ID", show_default=False, help="The `x-request-id` of an answer. Default: list recent."
        ),
    ] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="Explain the request with the longest time to its first token.")
    ] = False,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Only requests of this client key.")
    ] = None,
    url: options.AdminUrl = options.ADMIN_URL,
    as_json: options.Json = False,
) -> None:
    """Show why a request went to its replica: every candidate's terms and cost, what a learned policy predicted for it,
    what that leaves of the objectives, and the objectives of the request.

    The chosen candidate has a star; `-` is unknown. The proxy stores the last 1,000 decisions.
    """
    from gorgo.cli.admin.call import as_expected, call_admin

    if request_id is not None and (slowest or client is not None):
        raise typer.BadParameter("--slowest, --client: expected no REQUEST_ID beside them")
    token = options.admin_token()
    if request_id is None:
        query = {"limit": 1 if slowest else RECENT, "order": "slowest" if slowest else "newest"}
        path = f"?{urlencode(query | ({} if client is None else {'client': client}))}"
        shown = call_admin("GET", url, f"/admin/decisions{path}", token)
        with as_expected(url):
            request_id = shown["decisions"][0]["request_id"] if slowest and shown["decisions"] else None
    if request_id is not None:
        shown = call_admin("GET", url, f"/admin/decisions/{quote(request_id, safe='')}", token)
    with as_expected(url):
        text = "\n".join(
            _recent(shown, filtered=slowest or client is not None) if request_id is None else _decisions(shown)
        )
        if as_json:
            options.print_json(shown)
        else:
            typer.echo(text)


def _recent(shown: Row, *, filtered: bool) -> Iterator[str]:
    from gorgo import formatting

    if not shown["decisions"]:
        yield "no such request is stored" if filtered else "no request has been routed yet"
        return
    header = [
        "request",
        "decided, UTC",
        "client",
        "model",
        "replica",
        "policy",
        "fallback",
        "cache source",
        "predicted ms",
        "observed ms",
        "status",
    ]
    rows: list[list[Cell]] = [
        [
            _plain(decision["request_id"]) + ("" if decision["attempt"] == 1 else f" #{decision['attempt']}"),
            formatting.clock(decision["decided_s"]),
            _known(decision["client"]),
            _known(decision["model"]),
            _plain(decision["replica"]),
            _plain(decision["policy"]),
            decision["fallback"],
            _plain(decision["cache_source"]),
            decision["predicted_ttft_ms"],
            decision["ttft_ms"],
            _outcome(decision),
        ]
        for decision in shown["decisions"]
    ]
    yield table(header, rows)


def _outcome(decision: Row) -> str:
    return str(decision["status"]) if decision["status"] is not None else "retried" if decision["followed"] else "open"


def _decisions(shown: Row) -> Iterator[str]:
    for decision in shown["decisions"]:
        yield from _decision(decision)
        yield ""
    sample = shown["sample"]
    yield "the request has not ended" if sample is None else _sample(sample)


def _decision(decision: Row) -> Iterator[str]:
    policy, unit = _plain(decision["policy"]), decision["unit"]
    again = "" if decision["attempt"] == 1 else f", attempt {decision['attempt']}"
    yield f"{_plain(decision['request_id'])}{again}: {_plain(decision['replica'])}, {_reason(decision, policy)}"
    yield f"client {_known(decision['client'])}, model {_known(decision['model'])}"
    values = "".join(f" {_plain(name)}={value:g}" for name, value in decision["weights"].items())
    yield f"weights version {decision['weights_version']}:{values or ' none'}"
    terms = list(dict.fromkeys(term for candidate in decision["candidates"] for term in candidate["terms"]))
    estimates = list(
        dict.fromkeys(name for candidate in decision["candidates"] for name in candidate.get("estimates_ms", {}))
    )
    header = ["", "candidate", *map(_plain, terms), f"cost, {unit}" if unit else "cost"]
    header += [f"{_ESTIMATES.get(name, _plain(name))}, ms" for name in estimates]
    rows: list[list[Cell]] = [
        [
            "*" if candidate["replica"] == decision["replica"] else "",
            _plain(candidate["replica"]),
            *(candidate["terms"].get(term) for term in terms),
            candidate["cost"],
            *(candidate.get("estimates_ms", {}).get(name) for name in estimates),
        ]
        for candidate in by_cost(decision)
    ]
    yield table(header, rows)
    if decision["sampled_from"] is not None:
        yield f"a sample of {decision['sampled_from']:,} eligible replicas"
    for name, reason in sorted(decision["excluded"].items()):
        yield f"excluded: {_plain(name)} ({reason})"
    yield (
        f"prompt: {decision['prompt_tokens']:,} tokens, {decision['estimated_cached_tokens']:,} estimated cached "
        f"there (source {_plain(decision['cache_source'])}), {decision['best_cached_tokens']:,} at most on a candidate"
    )
    expected = _parts(decision["predicted_parts_ms"])
    objectives = decision.get("objectives_ms", {})  # an older proxy has none
    named = [f"{name.upper()} {_ms(value)} ms" for name, value in objectives.items() if value is not None]
    yield f"objectives: {', '.join(named) or 'none'}"
    yield f"predicted TTFT: {_ms(decision['predicted_ttft_ms'])} ms; expected parts: {expected}"


def _reason(decision: Row, policy: str) -> str:
    if decision["fallback"] is not None:
        return f"by the fallback {decision['fallback']} of {policy}"
    costs = any(candidate["cost"] is not None for candidate in decision["candidates"])
    return f"the lowest cost of {policy}" if costs else f"by {policy}, which has no cost"


def by_cost(decision: Row) -> list[Row]:
    """Return the candidates: the chosen one, then by cost, unknown last."""

    def key(candidate: Row) -> tuple[bool, bool, float]:
        return candidate["replica"] != decision["replica"], candidate["cost"] is None, candidate["cost"] or 0.0

    return sorted(decision["candidates"], key=key)


def _sample(sample: Row) -> str:
    parts = sample["ttft_parts_ms"]
    made_of = "" if not parts else f"; parts: {_parts(parts)}"
    cached = "not reported" if sample["cached_tokens"] is None else f"{sample['cached_tokens']:,}"
    seams = sample.get("continued", 0)  # an older proxy has none
    continued = "" if not seams else f"; its answer broke off and went on elsewhere: {seams}"
    return (
        f"observed TTFT: {_ms(sample['ttft_ms'])} ms{made_of}\n"
        f"status {sample['status']}, {sample['e2e_s']:.2f} s, {sample['retries']} retries, cached tokens {cached}"
        f"{continued}"
    )


def _parts(parts: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_ms(value)}" for name, value in parts.items())


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def _known(text: object) -> str:
    return "-" if text is None else _plain(text)


def _plain(text: object) -> str:
    """Return a text from outside without control characters."""
    return "".join(character if character.isprintable() else "?" for character in str(text))
