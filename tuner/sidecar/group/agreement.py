"""The weights that a group of proxies has agreed on, and the samples that count for them. Without input and output.

Theory of operation: each proxy numbers its own versions, so the group has numbers of its own. A put that all proxies
took is a new number; it names one version of each. A sample counts for the number whose version routed it, and for
none otherwise. When the proxies may have had different weights for a while, a new epoch begins: no number of before
counts any more, and the campaign measures again what it measured, after a put to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gorgo.core.lru import Lru

#: Versions of one proxy whose samples may still come: a put a minute for an hour. Requests end sooner.
MAX_VERSIONS = 64


@dataclass(frozen=True, slots=True)
class Reported:
    """The version and the weights that a proxy reported last."""

    version: int
    values: Mapping[str, float]


class Agreement:
    """The agreed weights of a group, and what each proxy reported last.

    Parameters
    ----------
    names:
        Of the proxies, each once.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.number = 0
        self.epoch = 1
        self.reason = ""
        self.values: Mapping[str, float] | None = None
        self._reported: dict[str, Reported | None] = dict.fromkeys(self.names)
        self._numbers = {name: Lru[int, int](MAX_VERSIONS) for name in self.names}

    @property
    def in_step(self) -> bool:
        """Whether all proxies reported the agreed weights."""
        return self.values is not None and not self.out_of_step()

    def out_of_step(self) -> list[str]:
        """Return the proxies whose weights are unknown or are not the agreed ones."""
        return [name for name, found in self._reported.items() if found is None or found.values != self.values]

    def has(self, values: Mapping[str, float]) -> bool:
        """Return whether all proxies reported these weights."""
        return all(found is not None and found.values == values for found in self._reported.values())

    def reported(self, name: str) -> Reported | None:
        """Return what a proxy reported last; None while that is unknown."""
        return self._reported[name]

    def number_of(self, name: str, version: int) -> int | None:
        """Return the group's number of a proxy's version; None for a version whose samples do not count."""
        return self._numbers[name].get(version)

    def differing(self, found: Mapping[str, Reported]) -> list[str]:
        """Return the proxies that report something else than expected."""
        return [name for name, one in found.items() if one != self._reported[name]]

    def record_reports(self, found: Mapping[str, Reported]) -> None:
        """Record what the proxies report; weights that all of them have are agreed on, under a new number."""
        changed = bool(self.differing(found))
        self._reported |= found
        values = [one.values for one in self._reported.values() if one is not None]
        alike = len(values) == len(self.names) and all(one == values[0] for one in values)
        if changed or (alike and not self._counted):
            self.number += 1
            if alike:
                self.values = dict(values[0])
                self._count()

    def agreed(self, values: Mapping[str, float], versions: Mapping[str, int]) -> None:
        """Record a put that all proxies took."""
        assert set(versions) == set(self.names), "a put to all"
        self.values = dict(values)
        self._reported = {name: Reported(version, self.values) for name, version in versions.items()}
        self.number += 1
        self._count()

    def changed(self, name: str, found: Reported | None) -> None:
        """Record a change of one proxy, None for one without an answer; it is not agreed on."""
        self._reported[name] = found

    def begin_epoch(self, reason: str) -> None:
        """Discard the samples of all numbers until now: the proxies may have had different weights.

        Does nothing if none counts, because an epoch has just begun.
        """
        if not any(self._numbers.values()):
            return
        self.epoch += 1
        self.reason = reason
        for versions in self._numbers.values():
            versions.clear()

    @property
    def _counted(self) -> bool:
        """Whether samples of the versions in force count."""
        numbers = {None if one is None else self.number_of(name, one.version) for name, one in self._reported.items()}
        return len(numbers) == 1 and None not in numbers

    def _count(self) -> None:
        for name, found in self._reported.items():
            assert found is not None, "all have reported"
            self._numbers[name].put(found.version, self.number)
