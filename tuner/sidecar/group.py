"""The group: the admin APIs of several proxies as one proxy's, for the sidecar.

Owns the calls, all proxies at a time, and what is decided between them without input and output: which weights a group
has agreed on (`Agreement`), one put at all proxies or at none (`GroupPut`), and the order of the samples
(`MergedSamples`). Without one of the proxies nothing is read or put, so the campaign waits for it; a roll-back goes to
those that can be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from gorgo.core.lru import Lru
from gorgo.errors import ProxyRefused, ProxyUnreachable, WeightsError
from tuner.objective import TunerSample
from tuner.proxy_client import ProxyClient, ProxyWeights, SampleBatch, SampleBatchResult, SampleSource, read_new

# The weights that a group of proxies has agreed on, and the samples that count for them. Without input and output.
#
# Theory of operation: each proxy numbers its own versions, so the group has numbers of its own. A put that all proxies
# took is a new number; it names one version of each. A sample counts for the number whose version routed it, and for
# none otherwise. When the proxies may have had different weights for a while, a new epoch begins: no number of before
# counts any more, and the campaign measures again what it measured, after a put to all.


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
        return [name for name, reported in self._reported.items() if reported is None or reported.values != self.values]

    def has(self, values: Mapping[str, float]) -> bool:
        """Return whether all proxies reported these weights."""
        return all(reported is not None and reported.values == values for reported in self._reported.values())

    def reported(self, name: str) -> Reported | None:
        """Return what a proxy reported last; None while that is unknown."""
        return self._reported[name]

    def number_of(self, name: str, version: int) -> int | None:
        """Return the group's number of a proxy's version; None for a version whose samples do not count."""
        return self._numbers[name].get(version)

    def differing(self, reports: Mapping[str, Reported]) -> list[str]:
        """Return the proxies that report something else than expected."""
        return [name for name, one in reports.items() if one != self._reported[name]]

    def record_reports(self, reports: Mapping[str, Reported]) -> None:
        """Record what the proxies report; weights that all of them have are agreed on, under a new number."""
        changed = bool(self.differing(reports))
        self._reported |= reports
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

    def changed(self, name: str, reported: Reported | None) -> None:
        """Record a change of one proxy, None for one without an answer; it is not agreed on."""
        self._reported[name] = reported

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
        for name, reported in self._reported.items():
            assert reported is not None, "all have reported"
            self._numbers[name].put(reported.version, self.number)


# One put of weights at all proxies of a group or at none: which calls, and what undoes them. Without input and output.
#
# Theory of operation: every call expects the version that its proxy reported last, so no change of another client is
# overwritten. If one proxy does not take the weights, those that did get their earlier weights again. A call without
# an answer may have been executed: that proxy is read, and undone too if it has the weights of this put.


@dataclass(frozen=True, slots=True)
class PutCall:
    """One call for one proxy."""

    values: Mapping[str, float]
    expected_version: int


class GroupPut:
    """One put. Every proxy's answer is passed to `applied`, `refused` or `unanswered` once.

    Parameters
    ----------
    agreement:
        Of the group; every proxy has reported a version.
    values:
        To put.
    """

    def __init__(self, agreement: Agreement, values: Mapping[str, float]) -> None:
        self.versions: dict[str, int] = {}
        self.unknown: set[str] = set()
        self._agreement, self._values = agreement, dict(values)
        self._before: dict[str, Reported] = {}
        for name in agreement.names:
            before = agreement.reported(name)
            assert before is not None, "proxies are read before a put"
            self._before[name] = before

    def calls(self) -> dict[str, PutCall]:
        """Return the calls of the put, for all proxies at a time."""
        return {name: PutCall(self._values, before.version) for name, before in self._before.items()}

    @property
    def complete(self) -> bool:
        """Whether all proxies took the weights."""
        return len(self.versions) == len(self._before)

    @property
    def disturbed(self) -> bool:
        """Whether a proxy may have had the weights."""
        return bool(self.versions or self.unknown)

    def applied(self, name: str, version: int) -> None:
        """Record a proxy that took the weights."""
        self.versions[name] = version
        self.unknown.discard(name)
        self._agreement.changed(name, Reported(version, self._values))

    def refused(self, name: str) -> None:
        """Record a proxy that changed nothing."""
        self.unknown.discard(name)

    def unanswered(self, name: str) -> None:
        """Record a call that may have been executed or not."""
        self.unknown.add(name)
        self._agreement.changed(name, None)

    def found(self, name: str, reported: Reported) -> None:
        """Record what a proxy without an answer reports later."""
        if reported.version != self._before[name].version and reported.values == self._values:
            self.applied(name, reported.version)
        else:
            self.refused(name)
            self._agreement.changed(name, reported)

    def undo(self) -> dict[str, PutCall]:
        """Return the calls that give back their earlier weights to the proxies that took the new ones."""
        return {name: PutCall(self._before[name].values, version) for name, version in self.versions.items()}

    def undone(self, name: str, version: int) -> None:
        """Record a proxy that has its earlier weights again."""
        del self.versions[name]
        self._agreement.changed(name, Reported(version, self._before[name].values))

    def finish_put(self) -> None:
        """Record a put that all proxies took."""
        self._agreement.agreed(self._values, self.versions)


# Samples of several proxies as one sequence: each once, by the tuner's clock, under the group's number.
#
# A cursor is the boot id and the number of each proxy. Clocks of hosts differ by seconds: every proxy says its own time
# with its samples, and arrivals are converted by the difference.


@dataclass(frozen=True, slots=True)
class MemberSamples:
    """New samples of one proxy, and what its clock lacks to the tuner's, s."""

    results: list[SampleBatchResult]
    behind_s: float


class DatedSource(SampleSource):
    """Reads samples of one proxy and compares the clocks.

    Parameters
    ----------
    url, source:
        The proxy.
    clock:
        The tuner's, s.
    """

    def __init__(self, url: str, source: SampleSource, clock: Callable[[], float]) -> None:
        self._url, self._source, self._now = url, source, clock
        self.behind_s = 0.0

    async def samples(self, after: int) -> SampleBatch:
        began_s = self._now()
        batch = await self._source.samples(after)
        if batch.now_s is None:
            raise ProxyRefused(f"{self._url}/admin/samples: no now_s in the answer; a group needs newer proxies")
        self.behind_s = (began_s + self._now()) / 2 - batch.now_s  # half of the round trip is its error
        return batch


class MergedSamples:
    """The cursors of a group, and the numbers of its merged samples."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._cursors: dict[str, tuple[str | None, int]] = dict.fromkeys(agreement.names, (None, 0))
        self._last_seq = 0

    def cursor(self, name: str) -> tuple[str | None, int]:
        """Return boot id and last number of a proxy."""
        return self._cursors[name]

    def merge_new(self, samples_by_proxy: Mapping[str, MemberSamples]) -> SampleBatchResult:
        """Return the new samples of all proxies, in the order in which they ended.

        Raises `ProxyRefused` if two addresses are one proxy: each of its samples would count twice.
        """
        boots = {name: self._boot(name, one) for name, one in samples_by_proxy.items()}
        self._refuse_one_proxy_twice(boots)
        for name, boot in boots.items():
            if self._cursors[name][0] not in (None, boot):
                self._agreement.changed(name, None)
                self._agreement.begin_epoch(f"{name} has restarted")
        samples: list[TunerSample] = []
        lost, unreadable = 0, list[str]()
        for name, one in samples_by_proxy.items():
            for result in one.results:
                lost += result.lost
                unreadable += [f"{name}: {message}" for message in result.unreadable]
            samples += self._new(name, one)
        samples.sort(key=lambda sample: sample.arrived_s + sample.e2e_s)
        self._last_seq += lost + len(unreadable)  # the campaign finds the gap
        numbered = []
        for sample in samples:
            self._last_seq += 1
            numbered.append(replace(sample, seq=self._last_seq))
        boot_id = f"group {self._agreement.epoch}"
        return SampleBatchResult(boot_id, tuple(numbered), lost, tuple(unreadable), self._agreement.reason)

    def _boot(self, name: str, one: MemberSamples) -> str | None:
        return one.results[-1].boot_id if one.results else self._cursors[name][0]

    def _refuse_one_proxy_twice(self, boots: Mapping[str, str | None]) -> None:
        names = dict[str | None, str]()
        for name, boot in boots.items():
            if boot is not None and (other := names.setdefault(boot, name)) != name:
                raise ProxyRefused(f"{other} and {name} are one proxy; expected the admin address of each, once")

    def _new(self, name: str, one: MemberSamples) -> list[TunerSample]:
        """Return the samples of weights that the group agreed on, and advance the cursor past all."""
        counted = []
        for result in one.results:
            boot, last = self._cursors[name]
            last = last if boot == result.boot_id else 0
            for sample in result.samples:
                if sample.seq <= last:
                    continue
                last = sample.seq
                number = self._agreement.number_of(name, sample.weights_version)
                if number is not None:
                    arrived_s = sample.arrived_s + one.behind_s
                    counted.append(replace(sample, weights_version=number, arrived_s=arrived_s))
            self._cursors[name] = (result.boot_id, last)
        return counted


Answer = TypeVar("Answer")
Failure = ProxyUnreachable | ProxyRefused
CONFLICT = 409


class ProxyGroup:
    """Several proxies as one.

    Parameters
    ----------
    clients:
        Of the proxies, two or more. The time-out of each bounds how long a put takes, and its undoing.
    clock:
        The tuner's, s.
    """

    def __init__(self, clients: Sequence[ProxyClient], *, clock: Callable[[], float]) -> None:
        self._clients = {client.url: client for client in sorted(clients, key=lambda client: client.url)}
        self.url = " ".join(self._clients)
        self.agreement = Agreement(self._clients)
        self.unreachable: dict[str, str] = {}
        self.undone_puts = 0
        #: Whether weights of one proxy are another client's; until a campaign says so, none are.
        self.is_foreign: Callable[[ProxyWeights], bool] = lambda _found: False
        self._now = clock
        self._merged = MergedSamples(self.agreement)
        self._records: dict[str, ProxyWeights] = {}
        self._unsettled = set(self._clients)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> ProxyGroup:
        for client in self._clients.values():
            await self._open.enter_async_context(client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._open.aclose()

    # -- reading

    async def read_new(self) -> list[SampleBatchResult]:
        """Return the samples that ended since the last call; no cursor moves unless all proxies answer."""
        return [self._merged.merge_new(await self._all(self._samples_of))]

    async def routing(self) -> ProxyWeights:
        """Return the weights of the group; who changed them only if they have changed."""
        answers = await self._all(lambda client: client.routing())
        if self.agreement.differing(_reports(answers)):
            return await self.weights()
        self.agreement.record_reports(_reports(answers))
        self._records = {name: _with_author(one, self._records[name]) for name, one in answers.items()}
        return self._as_one()

    async def weights(self) -> ProxyWeights:
        """Return the weights of the group; `source` and `by` are of a proxy that another client has changed, if any."""
        self._records = await self._all(lambda client: client.weights())
        differing = self.agreement.differing(_reports(self._records))
        self._unsettled |= set(differing)
        if differing and self._foreign() is None:
            self.agreement.begin_epoch(f"{', '.join(differing)} had other weights than the group")
        self.agreement.record_reports(_reports(self._records))
        return self._as_one()

    def belong_to(self, is_foreign: Callable[[ProxyWeights], bool], *, new: bool) -> None:
        """Let a campaign decide whose weights are foreign; a new one starts from those found."""
        self.is_foreign = is_foreign
        if new:
            self._unsettled.clear()

    def require_one_set(self, given: Mapping[str, float]) -> None:
        """Raise `WeightsError` if the proxies differ in weights that a new campaign would start from."""
        for name, value in self._records[next(iter(self._records))].values.items():
            values = {url: record.values.get(name) for url, record in self._records.items()}
            if name not in given and any(one != value for one in values.values()):
                shown = ", ".join(f"{one} at {url}" for url, one in values.items())
                raise WeightsError(f"{name} is {shown}; expected one value: put it at all, or set initial_weights")

    # -- writing

    async def put_weights(
        self,
        values: Mapping[str, float],
        *,
        expected_version: int,
        reason: str,
        by: str,
        allow_out_of_range: bool = False,
    ) -> ProxyWeights:
        """Put weights at all proxies, or at none. Raises as one proxy does, after the undoing."""
        if expected_version != self.agreement.number:
            raise ProxyRefused("the group's weights have changed", status=CONFLICT)
        if any(self.agreement.reported(name) is None for name in self._clients):
            raise ProxyRefused("the weights of a proxy are unknown", status=CONFLICT)
        put = GroupPut(self.agreement, values)

        async def call(client: ProxyClient, what: PutCall, why: str) -> ProxyWeights:
            return await client.put_weights(
                what.values,
                expected_version=what.expected_version,
                reason=why,
                by=by,
                allow_out_of_range=allow_out_of_range,
            )

        calls = put.calls()
        done, failed = await self._each(calls, lambda client: call(client, calls[client.url], reason))
        for name, answer in done.items():
            put.applied(name, answer.version)
        for name, failure in failed.items():
            put.unanswered(name) if isinstance(failure, ProxyUnreachable) else put.refused(name)
        if put.complete:
            put.finish_put()
            return self._settled(done)
        if put.disturbed:
            self.undone_puts += 1
            self.agreement.begin_epoch("a put did not reach all proxies and was undone")
            await self._find_unanswered(put)
            undo = put.undo()
            why = f"undone, because not all proxies took it: {reason}"
            undone, _ = await self._each(undo, lambda client: call(client, undo[client.url], why))
            for name, answer in undone.items():
                put.undone(name, answer.version)
        raise _one_of(failed)

    async def roll_back(
        self,
        values: Mapping[str, float],
        *,
        expected_version: int,
        reason: str,
        by: str,
        allow_out_of_range: bool = False,
    ) -> ProxyWeights:
        """Put weights at all proxies that can be reached, and raise the failure of another one afterwards.

        The version of each proxy is compared, not the group's. Weights of another client stay.
        """
        del expected_version
        answers, failed = await self._each(self._clients, lambda client: client.weights())
        for name in self.agreement.differing(_reports(answers)):
            if self.is_foreign(answers[name]):
                failed[name] = ProxyRefused(f"{name}: another client has set the weights", status=CONFLICT)
        behind = {name: one for name, one in answers.items() if name not in failed and one.values != values}
        if not failed and not behind:
            behind = answers  # a new version for all, so that samples of before do not count

        async def call(client: ProxyClient) -> ProxyWeights:
            return await client.put_weights(
                values,
                expected_version=behind[client.url].version,
                reason=reason,
                by=by,
                allow_out_of_range=allow_out_of_range,
            )

        done, refused = await self._each(behind, call)
        failed |= refused
        if not failed:
            self.agreement.agreed(values, {name: one.version for name, one in (answers | done).items()})
            return self._settled(answers | done)
        self.agreement.begin_epoch("weights were rolled back at some proxies only")
        for name, one in _reports(done).items():
            self.agreement.changed(name, one)
        for name, failure in refused.items():
            if isinstance(failure, ProxyUnreachable):
                self.agreement.changed(name, None)
        raise _one_of(failed)

    async def freeze(
        self, *, reason: str, by: str, weights: Mapping[str, float] | None = None, allow_out_of_range: bool = False
    ) -> ProxyWeights:
        """Freeze all proxies; one that is frozen with these weights already stays so."""
        done, failed = await self._each(
            self._clients,
            lambda client: client.freeze(reason=reason, by=by, weights=weights, allow_out_of_range=allow_out_of_range),
        )
        for name, one in _reports(done).items():
            self.agreement.changed(name, one)
        if failed:
            raise _one_of(failed)
        self.agreement.agreed(done[next(iter(done))].values, {name: one.version for name, one in done.items()})
        return self._settled(done)

    # -- the group as one proxy

    def _as_one(self) -> ProxyWeights:
        foreign = self._foreign()
        first = next(iter(self._records.values()))
        policies = {one.policy for one in self._records.values()}
        if len(policies) > 1:
            shown = ", ".join(f"{one.policy} at {url}" for url, one in self._records.items())
            raise ProxyRefused(f"the proxies route by different policies: {shown}; expected one")
        frozen = next((f"{one.frozen} ({url})" for url, one in self._records.items() if one.frozen is not None), None)
        number = self.agreement.number
        if foreign is not None:
            url, one = foreign
            by = f"{one.by or one.source or 'another client'} at {url}"
            return ProxyWeights(first.policy, number, dict(one.values), frozen, one.source, by)
        values = first.values if self.agreement.values is None else self.agreement.values
        return ProxyWeights(first.policy, number, dict(values), frozen, "configuration", None)

    def _foreign(self) -> tuple[str, ProxyWeights] | None:
        for name in self._clients:
            if name in self._unsettled and name in self._records and self.is_foreign(self._records[name]):
                return name, self._records[name]
        return None

    def _settled(self, answers: Mapping[str, ProxyWeights]) -> ProxyWeights:
        """Return the agreed weights after a change of all proxies."""
        self._records = dict(answers)
        self._unsettled.clear()
        return self._as_one()

    # -- calls

    async def _samples_of(self, client: ProxyClient) -> MemberSamples:
        dated = DatedSource(client.url, client, self._now)
        results = await read_new(dated, *self._merged.cursor(client.url))
        return MemberSamples(results, dated.behind_s)

    async def _find_unanswered(self, put: GroupPut) -> None:
        """Read the proxies without an answer to a put: it may have been executed."""
        answers, _ = await self._each(set(put.unknown), lambda client: client.routing())
        for name, one in _reports(answers).items():
            put.found(name, one)

    async def _all(self, call: Callable[[ProxyClient], Awaitable[Answer]]) -> dict[str, Answer]:
        """Return the answers of all proxies, or raise the failure of one."""
        done, failed = await self._each(self._clients, call)
        if failed:
            raise _one_of(failed)
        return done

    async def _each(
        self, names: Mapping[str, object] | set[str] | list[str], call: Callable[[ProxyClient], Awaitable[Answer]]
    ) -> tuple[dict[str, Answer], dict[str, Failure]]:
        """Call the named proxies at a time; return answers and failures in the order of the group."""
        done = dict[str, Answer]()
        failed = dict[str, Failure]()

        async def one(name: str) -> None:
            try:
                done[name] = await call(self._clients[name])
            except (ProxyUnreachable, ProxyRefused) as failure:
                failed[name] = failure

        called = [name for name in self._clients if name in names]
        async with asyncio.TaskGroup() as tasks:
            for name in called:
                tasks.create_task(one(name))
        for name in called:
            self.unreachable.pop(name, None)
        self.unreachable |= {name: str(error) for name, error in failed.items() if isinstance(error, ProxyUnreachable)}
        return {name: done[name] for name in called if name in done}, failed


def _reports(answers: Mapping[str, ProxyWeights]) -> dict[str, Reported]:
    return {name: Reported(one.version, dict(one.values)) for name, one in answers.items()}


def _with_author(answer: ProxyWeights, before: ProxyWeights) -> ProxyWeights:
    """Return a short answer with the author of the same weights in a full one."""
    return ProxyWeights(answer.policy, answer.version, answer.values, answer.frozen, before.source, before.by)


def _one_of(failed: Mapping[str, Failure]) -> Failure:
    """Return a proxy without an answer before one that refused: only the latter can be acted on at once."""
    failures = list(failed.values())
    return next((one for one in failures if isinstance(one, ProxyUnreachable)), failures[0])
