"""The calls of the sidecar that read and change weights, at one proxy or at a group.

Owns the choice of the call for a command, and that nothing is read or changed by a process that is not the leader.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tuner.campaign.actions import Freeze, PutWeights, RollBack
from tuner.objective import SampleCursor
from tuner.proxy_client import ProxyClient, ProxyWeights
from tuner.sidecar.commands import CommandQueue
from tuner.sidecar.group.proxies import ProxyGroup
from tuner.sidecar.reader import SampleBatchResult, read_new


async def always() -> None:
    """Confirm that this process leads: a tuner without other candidates."""


class WeightsCalls:
    """The calls of one campaign.

    Parameters
    ----------
    client:
        One proxy or a group.
    orders:
        Versions and names for the calls.
    allow_out_of_range:
        Whether to put weights outside the policy's own box.
    confirm:
        Raises `LeadershipLost` if this process does not lead any more.
    """

    def __init__(
        self,
        client: ProxyClient | ProxyGroup,
        orders: CommandQueue,
        *,
        allow_out_of_range: bool,
        confirm: Callable[[], Awaitable[None]] = always,
    ) -> None:
        self.client = client
        self._orders, self._allow_out_of_range, self._confirm = orders, allow_out_of_range, confirm

    @property
    def group(self) -> ProxyGroup | None:
        """Return the group; None for one proxy."""
        return self.client if isinstance(self.client, ProxyGroup) else None

    async def read_new(self, cursor: SampleCursor) -> list[SampleBatchResult]:
        """Return all samples after the cursor; a group has cursors of its own."""
        if isinstance(self.client, ProxyGroup):
            return await self.client.read_new()
        return await read_new(self.client, cursor.boot_id, cursor.last_seq)

    async def routing(self) -> ProxyWeights:
        await self._confirm()
        return await self.client.routing()

    async def read(self) -> ProxyWeights:
        """Return the weights in force, with their author if they are not the expected ones."""
        found = await self.routing()
        return found if found.version == self._orders.version else await self.client.weights()

    async def execute(self, order: PutWeights | RollBack | Freeze) -> ProxyWeights:
        """Execute a command; weights that may be in force whatever the answer is are recorded before."""
        await self._confirm()
        if isinstance(order, Freeze):
            return await self.client.freeze(
                reason=order.reason,
                by=self._orders.by,
                weights=order.values,
                allow_out_of_range=self._allow_out_of_range,
            )
        version = self._orders.version
        if version is None:
            version = (await self.client.routing()).version
        self._orders.mark_sent(order.values)
        put = self.client.roll_back if isinstance(order, RollBack) else self.client.put_weights
        return await put(
            order.values,
            expected_version=version,
            reason=order.reason,
            by=self._orders.by,
            allow_out_of_range=self._allow_out_of_range,
        )
