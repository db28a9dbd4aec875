"""Why requests failed: the error of each as a cause that many share, and the remedy of a cause.

Owns the texts. Errors are those of records: of the simulator, of a router's answers, of the replaying client. A
result row stores the count of each cause; the remedy is shown beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Causes counted separately in a row; further ones are counted together.
MAX_CAUSES = 20
#: Longest cause that is taken from an unknown error.
MAX_CHARACTERS = 80
OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Cause:
    """A pattern of errors, the cause in words (`{}` is the pattern's number), and its remedy."""

    pattern: re.Pattern[str]
    words: str
    remedy: str = ""


def _cause(pattern: str, words: str, remedy: str = "") -> _Cause:
    return _Cause(re.compile(pattern, re.IGNORECASE), words, remedy)


_LOAD = "a lower --load or more replicas"
#: The first that matches counts; sizes before statuses, since both are in one error.
_CAUSES: Sequence[_Cause] = (
    _cause(
        r"input \(\d+ tokens\) is longer.*?context length\D{0,12}(\d+)",
        "prompt over the engine's {} tokens",
        "--max-input leaves them out",
    ),
    _cause(
        r"context length\D{0,12}(\d+)",
        "prompt and answer over the engine's {} tokens",
        "--max-input leaves them out, --max-output shortens the answers",
    ),
    _cause(r"fit the KV pool of (\d+) tokens", "over the engine's KV pool of {} tokens", "--max-input leaves them out"),
    _cause(r"deadline_unreachable", "deadline unreachable", f"{_LOAD}, or a later deadline"),
    _cause(r"queue_full", "queue of the proxy full", _LOAD),
    _cause(r"replicas_busy", "every replica busy", _LOAD),
    _cause(r"connections_exhausted", "no connection to the replica free", _LOAD),
    _cause(r"too_many_in_flight|\bquota|requests_per_minute", "client over its quota", "`clients` in regions.yaml"),
    _cause(r"\bno_replica\b", "no replica could take the request", "gorgo status says why"),
    _cause(r"upstream_failed", "no replica could answer", "gorgo status says why"),
    _cause(r"model_not_found", "unknown model", "--model names another"),
    _cause(r"(?:_|^)timeout|^http 504", "no answer in time", _LOAD),
    _cause(r"^http 40[13]\b", "key refused", "GORGO_API_KEY holds the key"),
    _cause(r"^http 429\b", "refused for load (429)", _LOAD),
    _cause(r"^http (\d{3})\b", "HTTP {}", "gorgo status shows the replicas"),
    _cause(r"connect_failed|ConnectError|ConnectorError|ConnectionRefused", "connection refused", "is the router up?"),
    _cause(r"^disconnected|ClientPayload|ServerDisconnected|ConnectionReset|ReadError", "connection broken"),
)


def cause_of(error: str) -> str:
    """Return the cause of an error in words, the same for all requests that failed alike.

    Example
    -------
    >>> cause_of("The input (40000 tokens) is longer than the model's context length (32768 tokens).")
    "prompt over the engine's 32,768 tokens"
    >>> cause_of('http 429: {"error": {"code": "queue_full"}}'), cause_of("truncated: the stream ended")
    ('queue of the proxy full', 'truncated')
    """
    for one in _CAUSES:
        if found := one.pattern.search(error):
            number = next(iter(found.groups()), None)
            shown = number if number is None or "HTTP" in one.words else f"{int(number):,}"
            return one.words.format(shown)
    return error.partition(":")[0][:MAX_CHARACTERS]


def count_cause(counts: dict[str, int], error: str) -> None:
    """Count the cause of one more failed request, in at most `MAX_CAUSES` kinds."""
    cause = cause_of(error)
    if cause not in counts and len(counts) >= MAX_CAUSES:
        cause = OTHER
    counts[cause] = counts.get(cause, 0) + 1


def failure_lines(failures: Mapping[str, int], requests: int) -> list[str]:
    """Return a line per cause, the most frequent first: count, requests, cause and remedy.

    Example
    -------
    >>> failure_lines({"no answer in time": 2}, 1500)
    ['2 of 1,500: no answer in time; a lower --load or more replicas']
    """
    ranked = sorted(failures.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count:,} of {requests:,}: {'; '.join(filter(None, (cause, _remedy(cause))))}" for cause, count in ranked]


def _remedy(cause: str) -> str:
    plain = re.sub(r"\d[\d,]*", "{}", cause)
    return next((one.remedy for one in _CAUSES if one.words in (plain, cause)), "")
