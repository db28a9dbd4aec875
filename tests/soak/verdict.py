"""What a soak has measured, and what is wrong with it. Pure: records in, sentences out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.soak.ledgers import Ledgers

#: Memory may grow by this share after warm-up.
MAX_GROWTH = 0.05
#: Memory of a process that serves a few requests jitters by pages of its allocator; less than this is no growth, bytes.
NOISE_BYTES = 1 << 20
#: Of a replica's connections, those on which the last probe and the last scrape went: kept for a while, and not yet
#: open at the first look.
KEPT_PER_REPLICA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """One run.

    Parameters
    ----------
    fresh:
        Before the first request.
    warm, end:
        With all slow streams open, after the warm-up and after the last short request.
    after:
        When everybody has left.
    replicas, shorts, streams:
        How many there were, and were asked for.
    unsent:
        Short requests for which there was no time, those to warm up included.
    answered, expected, streaming:
        Answers that came to their end, how many there have to be, and slow streams open at the last short request.
    problems:
        What clients saw that was wrong, and how often.
    wall_s, warm_up_s:
        Of the short requests counted, and of those before.
    cpu_s:
        The proxy's, for the short requests counted and the streams beside them.
    resident:
        The proxy's memory at moments in between, bytes.
    exit_code:
        After SIGTERM.
    """

    fresh: Ledgers
    warm: Ledgers
    end: Ledgers
    after: Ledgers
    replicas: int
    shorts: int
    unsent: int
    streams: int
    answered: int
    expected: int
    streaming: int
    streamed_tokens: int
    wall_s: float
    warm_up_s: float
    cpu_s: float
    exit_code: int
    problems: Mapping[str, int] = field(default_factory=dict)
    resident: Sequence[int] = ()

    @property
    def fds_allowed(self) -> int:
        """Open files when everybody has left."""
        return fds_allowed(self.fresh, self.replicas)

    @property
    def growth(self) -> float:
        """Of memory from the end of the warm-up, as a share."""
        return self.end.resident / self.warm.resident - 1.0


def fds_allowed(fresh: Ledgers, replicas: int) -> int:
    """Open files of a proxy that was used, by those of one that was not."""
    return fresh.fds + KEPT_PER_REPLICA * replicas


def violations(soak: Soak) -> list[str]:
    """Each as a sentence; none is a pass."""
    return [*_answers(soak), *_memory(soak), *_left_over(soak)]


def _answers(soak: Soak) -> list[str]:
    found = [f"{soak.unsent} short requests were not sent in time"] if soak.unsent else []
    found += [f"{count} answers: {problem}" for problem, count in soak.problems.items()]
    if soak.answered != soak.expected:
        found.append(f"{soak.answered} whole answers of {soak.expected}")
    if soak.streaming != soak.streams:
        found.append(f"{soak.streaming} of {soak.streams} slow streams were open at the last short request")
    if soak.end.in_flight < soak.streams:
        found.append(f"the Router counted {soak.end.in_flight} in flight while {soak.streams} streams were open")
    if soak.end.retries_spent:
        found.append(f"{soak.end.retries_spent} retries were spent on engines that do not fail")
    return found


def _memory(soak: Soak) -> list[str]:
    grown = soak.end.resident - soak.warm.resident
    if grown > NOISE_BYTES and soak.growth > MAX_GROWTH:
        return [f"memory grew by {soak.growth:.1%} after warm-up ({grown / 2**20:.1f} MiB), {MAX_GROWTH:.0%} at most"]
    return []


def _left_over(soak: Soak) -> list[str]:
    after, fresh = soak.after, soak.fresh
    found = [f"{name} is {count} when everybody has left" for name, count in after.open_ledgers().items()]
    for name, now, most in (("tasks", after.tasks, fresh.tasks), ("open files", after.fds, soak.fds_allowed)):
        if now > most:
            found.append(f"{now} {name} when everybody has left, {most} at most")
    found += [look.faults for look in (soak.warm, soak.end, after) if look.faults]
    if soak.exit_code:
        found.append(f"exit code {soak.exit_code} after SIGTERM")
    return found
