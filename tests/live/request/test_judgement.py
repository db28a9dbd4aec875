"""Retry-After of engines, in seconds or as a date."""

from __future__ import annotations

from email.utils import formatdate
from time import time

import pytest

from gorgo.live.request.parse import failure_of

DATE = (b"Date", b"Wed, 21 Oct 2026 07:28:00 GMT")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"0", 0.0),
        (b"120", 120.0),
        (b"Wed, 21 Oct 2026 07:29:30 GMT", 90.0),
        (b"Wednesday, 21-Oct-26 07:28:01 GMT", 1.0),
        (b"Wed Oct 21 07:28:05 2026", 5.0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"soon", None),
        (b"-1", None),
        (b"1" * 10, None),
        (b"Wed, 99 Oct 2026 99:99:99 GMT", None),
        (b"Wed, 21 Oct 99999 07:28:00 GMT", None),
        (b"\xff" * 29, None),
        (b"Wed, 21 Oct 2026 07:29:30 GMT" * 100, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_after_the_replicas_own(value: bytes, seconds: float | None) -> None:
    failure = failure_of(429, [DATE, (b"Retry-After", value)])
    assert failure is not None
    assert failure.retry_after_s == seconds


def test_a_date_of_a_replica_without_one_of_its_own_counts_from_this_clock() -> None:
    later = formatdate(time() + 60, usegmt=True).encode()
    failure = failure_of(503, [(b"retry-after", later)])
    assert failure is not None
    assert failure.retry_after_s is not None
    assert 50 < failure.retry_after_s <= 60
