"""The group: the admin APIs of several proxies as one proxy's, for the sidecar.

Owns the calls, all proxies at a time; `agreement` and `put` decide. Weights are put to all or to none. Without one of
the proxies nothing is read or put, so the campaign waits for it; a roll-back goes to those that can be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TypeVar

from gorgo.errors import ProxyRefused, ProxyUnreachable, WeightsError
from tuner.proxy_client import ProxyClient, ProxyWeights
from tuner.sidecar.group.agreement import Agreement, Reported
from tuner.sidecar.group.put import GroupPut, PutCall
from tuner.sidecar.group.samples import DatedSource, MemberSamples, MergedSamples
from tuner.sidecar.reader import SampleBatchResult, read_new

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
        found = await self._all(lambda client: client.routing())
        if self.agreement.differing(_reports(found)):
            return await self.weights()
        self.agreement.record_reports(_reports(found))
        self._records = {name: _with_author(one, self._records[name]) for name, one in found.items()}
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
            values = {url: found.values.get(name) for url, found in self._records.items()}
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
        for name, found in done.items():
            put.applied(name, found.version)
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
            for name, found in undone.items():
                put.undone(name, found.version)
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
        found, failed = await self._each(self._clients, lambda client: client.weights())
        for name in self.agreement.differing(_reports(found)):
            if self.is_foreign(found[name]):
                failed[name] = ProxyRefused(f"{name}: another client has set the weights", status=CONFLICT)
        behind = {name: one for name, one in found.items() if name not in failed and one.values != values}
        if not failed and not behind:
            behind = found  # a new version for all, so that samples of before do not count

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
            self.agreement.agreed(values, {name: one.version for name, one in (found | done).items()})
            return self._settled(found | done)
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

    def _settled(self, found: Mapping[str, ProxyWeights]) -> ProxyWeights:
        """Return the agreed weights after a change of all proxies."""
        self._records = dict(found)
        self._unsettled.clear()
        return self._as_one()

    # -- calls

    async def _samples_of(self, client: ProxyClient) -> MemberSamples:
        dated = DatedSource(client.url, client, self._now)
        results = await read_new(dated, *self._merged.cursor(client.url))
        return MemberSamples(results, dated.behind_s)

    async def _find_unanswered(self, put: GroupPut) -> None:
        """Read the proxies without an answer to a put: it may have been executed."""
        found, _ = await self._each(set(put.unknown), lambda client: client.routing())
        for name, one in _reports(found).items():
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


def _reports(found: Mapping[str, ProxyWeights]) -> dict[str, Reported]:
    return {name: Reported(one.version, dict(one.values)) for name, one in found.items()}


def _with_author(found: ProxyWeights, before: ProxyWeights) -> ProxyWeights:
    """Return a short answer with the author of the same weights in a full one."""
    return ProxyWeights(found.policy, found.version, found.values, found.frozen, before.source, before.by)


def _one_of(failed: Mapping[str, Failure]) -> Failure:
    """Return a proxy without an answer before one that refused: only the latter can be acted on at once."""
    failures = list(failed.values())
    return next((one for one in failures if isinstance(one, ProxyUnreachable)), failures[0])
