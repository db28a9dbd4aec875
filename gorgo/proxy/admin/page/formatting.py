"""Numbers and times for readers. Unknown is a dash, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

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


def engine(found: Mapping[str, object]) -> str:
    """Return kind and version of an engine; empty without any.

    >>> engine({"name": "vllm", "version": "0.33.0", "found": True}), engine({"name": None, "found": True}), engine({})
    ('vllm 0.33.0 (found)', 'engine not found yet', '')
    """
    if not found:
        return ""
    if found["name"] is None:
        return "engine not found yet"
    words = (found["name"], found.get("version"), "(found)" if found["found"] else None)
    return " ".join(str(word) for word in words if word is not None)
