"""Numbers and times for readers. Unknown is a dash, never 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isnan
from typing import Any

UNKNOWN = "-"


def ms(value: float | None) -> str:
    """Return milliseconds with useful digits.

    >>> ms(2.04), ms(95.2), ms(12345.0), ms(None)
    ('2.0', '95', '12,345', '-')
    """
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


def signed_ms(value: float | None) -> str:
    """Return a signed difference.

    >>> signed_ms(12.3), signed_ms(-4.04), signed_ms(None)
    ('+12', '-4.0', '-')
    """
    return UNKNOWN if value is None else ("+" if value >= 0 else "-") + ms(abs(value))


def count(value: float | None) -> str:
    """Return a whole number; from ten thousand on in thousands or millions, to three digits.

    >>> count(983549), count(11_234), count(1234), count(12_345_678), count(None)
    ('984k', '11.2k', '1,234', '12.3M', '-')
    """
    if value is None:
        return UNKNOWN
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f}k" if abs(value) < 1e5 else f"{value / 1e3:.0f}k"
    return f"{value:,.0f}"


def share(value: float | None) -> str:
    """Return a ratio in per cent.

    >>> share(0.5), share(0.004), share(None)
    ('50 %', '0.4 %', '-')
    """
    if value is None:
        return UNKNOWN
    return f"{value:.1%}".replace("%", " %") if 0 < value < 0.1 else f"{value:.0%}".replace("%", " %")


def age(seconds: float | None) -> str:
    """Return a duration.

    >>> age(0.4), age(75.0), age(7300.0), age(200_000.0), age(None)
    ('0 s', '75 s', '2.0 h', '2.3 d', '-')
    """
    if seconds is None:
        return UNKNOWN
    for size, unit in ((86_400.0, "d"), (3600.0, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def clock(epoch_s: float) -> str:
    """Return the time of day, UTC.

    >>> clock(0.0)
    '00:00:00'
    """
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%H:%M:%S")


def moment(iso: str) -> str:
    """Return a short time stamp.

    >>> moment("2026-05-01T12:03:04.567+00:00")
    '2026-05-01 12:03:04'
    """
    return iso[:19].replace("T", " ")


def number(value: float) -> str:
    """Return a weight."""
    return f"{value:g}"


def term(value: float | None) -> str:
    """Return a cost or a term of one, in the unit of its policy.

    >>> term(1234.5), term(1.25), term(None), term(float("nan"))
    ('1,234', '1.2', '-', '-')
    """
    if value is None or isnan(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.1f}"


def engine(engine_info: Mapping[str, object]) -> str:
    """Return kind and version of an engine; empty without any.

    >>> engine({"name": "vllm", "version": "0.33.0", "found": True}), engine({"name": None, "found": True}), engine({})
    ('vllm 0.33.0 (found)', 'engine not found yet', '')
    """
    if not engine_info:
        return ""
    if engine_info["name"] is None:
        return "engine not found yet"
    words = (engine_info["name"], engine_info.get("version"), "(found)" if engine_info["found"] else None)
    return " ".join(str(word) for word in words if word is not None)


def reports_cache(cache: Mapping[str, Any] | None) -> bool:
    """Return whether a replica's cache is known by reports, or should be (`cache_states`)."""
    return cache is not None and (cache["source"] != "history" or _feed_state(cache) != "off" or _has_pushed(cache))


def cache_line(cache: Mapping[str, Any]) -> str:
    """Return the source of a replica's estimated cached tokens, its state and its errors.

    >>> stats = {"source": "push", "complete": True, "blocks": 12_000, "age_s": 0.4, "requests": 9}
    >>> tokens = {"estimated_tokens": 900, "reported_tokens": 1000, "phantom_tokens": 0, "missed_tokens": 100}
    >>> cache_line(stats | tokens | {"feed": None, "pushes": {"lost": 3}})
    'push, 12.0k blocks, newest 0 s ago, lost 3; estimated 900 of 1,000 cached tokens: 0 phantom, 100 missed'
    """
    unused = cache.get("unused")  # an older proxy does not say
    parts = [cache["source"]] if unused is None else [f"history: {unused}"]
    if cache["source"] != "history":
        parts += [] if unused is None else [f"{cache['source']} unused"]
        parts += [] if cache["complete"] else ["incomplete"]
        parts += [f"{count(cache['blocks'])} blocks", f"newest {age(cache['age_s'])} ago"]
    if _feed_state(cache) not in ("off", "live"):
        parts.append(f"feed {_feed_state(cache)}")
    counts = (cache["feed"] or {}) | cache["pushes"]
    parts += [f"{name.replace('_', ' ')} {count(counts[name])}" for name in _COUNTS if counts.get(name)]
    decided = cache.get("decisions") or {}
    if unused is None and decided.get("history", 0) > 0 and cache["source"] != "history":
        parts.append(f"{count(decided['history'])} of {count(sum(decided.values()))} decisions by history")
    line = ", ".join(parts)
    if cache["requests"]:
        sums = {name: count(cache[f"{name}_tokens"]) for name in ("estimated", "reported", "phantom", "missed")}
        line += f"; estimated {sums['estimated']} of {sums['reported']} cached tokens: "
        line += f"{sums['phantom']} phantom, {sums['missed']} missed"
    return line


def routes_line(routes: Mapping[str, Any]) -> str:
    """Return the routes of a policy by origin, their ages and evictions.

    >>> stats = {"max_routes": 100_000, "ttl_s": 3600.0, "routes": {"local": 1200, "remote": 0}}
    >>> routes_line(stats | {"unused_s": {"local": 340.0}, "evicted": {"local": 0, "remote": 3}})
    'routes: 1,200 local of at most 100k, the longest unused 6 min ago (void after 60 min); evicted 3 remote'
    """
    stored = [f"{count(number)} {origin}" for origin, number in routes["routes"].items() if number]
    line = f"routes: {', '.join(stored) or 'none'} of at most {count(routes['max_routes'])}"
    if routes["unused_s"]:
        line += f", the longest unused {age(max(routes['unused_s'].values()))} ago (void after {age(routes['ttl_s'])})"
    evicted = [f"{count(number)} {origin}" for origin, number in routes["evicted"].items() if number]
    return line + (f"; evicted {', '.join(evicted)}" if evicted else "")


def streams_line(streams: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return how many answers broke off and went on elsewhere or not, each by reason; `None` without one.

    >>> streams_line({"continued": {"disconnected": 3, "moved": 9}, "not_continued": {"no_replica": 1}})
    'answers that broke off: 12 went on elsewhere (9 moved, 3 disconnected), 1 ended with an error (1 no_replica)'
    """
    parts = []
    for end, words in (("continued", "went on elsewhere"), ("not_continued", "ended with an error")):
        if reasons := streams.get(end):
            ordered = sorted(reasons.items(), key=lambda each: (-each[1], each[0]))
            by_reason = ", ".join(f"{count(number)} {reason}" for reason, number in ordered)
            parts.append(f"{count(sum(reasons.values()))} {words} ({by_reason})")
    return f"answers that broke off: {', '.join(parts)}" if parts else None


def source_state(source: Mapping[str, Any]) -> str:
    """Return whether a fleet source is up, down, or without a first result."""
    return "up" if source["up"] else "down" if source["error"] is not None else "pending"


def source_line(source: Mapping[str, Any]) -> str:
    """Return a fleet source, its state, and how many replicas the fleet has of it.

    >>> source = {"name": "qwen", "kind": "pods", "up": True, "error": None, "age_s": 2.0, "replicas": 3}
    >>> source_line(source)
    'source qwen (pods): up, 3 replicas, last answer 2 s ago'
    >>> source_line(source | {"up": False, "error": "connection refused"})
    'source qwen (pods): down: connection refused, 3 replicas, last answer 2 s ago'
    """
    state = source_state(source)
    reason = f"{state}: {source['error']}" if state == "down" else state
    answered = "no answer yet" if source["age_s"] is None else f"last answer {age(source['age_s'])} ago"
    n = source["replicas"]
    return f"source {source['name']} ({source['kind']}): {reason}, {n} replica{'' if n == 1 else 's'}, {answered}"


def wanted_line(demand: Mapping[str, Any]) -> str:
    """Return the wanted replicas of a region and model, and why.

    >>> row = {"region": "eu", "model": "llama", "wanted": 5, "replicas": 3, "attainment": 0.94}
    >>> wanted_line(row), wanted_line(row | {"model": None, "attainment": None})
    ('wanted in eu (llama): 5 replicas, 3 serve, 94 % in time', 'wanted in eu: 5 replicas, 3 serve')
    """
    model = "" if demand["model"] is None else f" ({demand['model']})"
    in_time = "" if demand["attainment"] is None else f", {share(demand['attainment'])} in time"
    n = demand["wanted"]
    return (
        f"wanted in {demand['region']}{model}: {n} replica{'' if n == 1 else 's'}, {demand['replicas']} serve{in_time}"
    )


def store_line(store: Mapping[str, Any]) -> str:
    """Return the state of the link to the store of several routers.

    >>> store = {"router": "eu-1/4f", "group": "qwen", "joined": True, "fault": None, "for_s": 60.0, "peers": []}
    >>> store_line(store)
    'router eu-1/4f of group qwen: reports to 0 others for 60 s'
    >>> store_line(store | {"joined": False, "fault": "slow"})
    'router eu-1/4f of group qwen: alone for 60 s, the store is slow'
    """
    name, since = f"router {store['router']} of group {store['group']}", age(store["for_s"])
    if store["joined"]:
        n = sum(peer["counts"] for peer in store["peers"])
        return f"{name}: reports to {n} other{'' if n == 1 else 's'} for {since}"
    why = (
        "its first report is on its way" if store["fault"] is None else f"the store is {_STORE_FAULTS[store['fault']]}"
    )
    return f"{name}: alone for {since}, {why}"


def workers_line(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the processes of a router; `None` for one process.

    >>> row = {"worker": 0, "pid": 7, "state": "ready", "restarts": 0, "retry_s": None}
    >>> workers_line([row, row | {"worker": 1, "state": "waiting", "restarts": 3, "retry_s": 2.0}])
    '2 processes: 1 ready; process 1 waiting, restarted 3 times, next start after 2 s'
    """
    if not rows:
        return None
    parts = [f"{sum(worker['state'] == 'ready' for worker in rows)} ready"]
    for worker in rows:
        if worker["state"] == "ready" and not worker["restarts"]:
            continue
        words = [f"process {worker['worker']} {worker['state']}"]
        if worker["restarts"]:
            words.append(f"restarted {worker['restarts']} time{'' if worker['restarts'] == 1 else 's'}")
        if worker["retry_s"]:
            words.append(f"next start after {age(worker['retry_s'])}")
        parts.append(", ".join(words))
    return f"{len(rows)} process{'' if len(rows) == 1 else 'es'}: {'; '.join(parts)}"


def peer_line(peer: Mapping[str, Any]) -> str:
    """Return a peer, its age, and where it differs.

    >>> peer_line({"router": "eu-2/1a", "age_s": 0.2, "counts": True, "differences": {"freeze": "frozen, not here"}})
    'eu-2/1a: last report 0 s ago; frozen, not here'
    """
    silent = "" if peer["counts"] or "format" in peer["differences"] else ", its load counts no longer"
    return "; ".join([f"{peer['router']}: last report {age(peer['age_s'])} ago{silent}", *peer["differences"].values()])


_STORE_FAULTS = {
    "unreachable": "unreachable",
    "slow": "slow",
    "full": "full",
    "refused": "there, and refuses user, password or command",
    "not_ready": "not ready",
    "error": "there, and answers with an error",
}

#: Counts of a feed and of pushes that an operator wants to see.
_COUNTS = (
    "gaps",
    "replays",
    "failed_replays",
    "rejected_messages",
    "rejected_events",
    "stale",
    "lost",
    "limited",
    "silences",
)


def _feed_state(cache: Mapping[str, Any]) -> str:
    return "off" if cache["feed"] is None else str(cache["feed"]["state"])


def _has_pushed(cache: Mapping[str, Any]) -> bool:
    return any(cache["pushes"].values())


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "region"), counted(2, "region")
    ('1 region', '2 regions')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def first_names(names: Sequence[str], most: int) -> str:
    """Return up to `most` names, and how many more there are.

    >>> first_names(["a", "b", "c"], 2), first_names(["a"], 2)
    ('a, b and 1 more', 'a')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
