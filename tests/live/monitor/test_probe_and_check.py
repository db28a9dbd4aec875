"""`gorgo check --live` and the probes of the proxy agree on every pair of answers."""

from __future__ import annotations

import asyncio
from itertools import product

from gorgo.cli.connectivity import reach_all
from gorgo.config.fleet import ReplicaConfig
from tests.answering import answering
from tests.live.monitor.test_replica_monitor import PING, Watch, watched

STATUSES = (200, 204, 302, 401, 403, 404, 405, 429, 500, 503)
MODELS = "/v1/models"


async def checked() -> dict[tuple[int, int], bool]:
    """Whether check takes the replica for well, by the statuses of both paths."""
    found, statuses = dict[tuple[int, int], bool](), dict[str, int]()
    async with answering(lambda path: statuses.get(path, 404)) as url:
        for ping, models in product(STATUSES, STATUSES):
            statuses.update({PING: ping, MODELS: models})
            replica = ReplicaConfig(name="r", region="a", url=url, engine="sglang")
            (row,) = await asyncio.to_thread(reach_all, [replica], environ={}, timeout_s=5.0)
            found[ping, models] = row.error is None
    return found


def probed() -> dict[tuple[int, int], bool]:
    """Whether the first probe of a proxy is answered."""
    return {(ping, models): is_probed(ping, models) for ping, models in product(STATUSES, STATUSES)}


def is_probed(ping: int, models: int) -> bool:
    answers: list[bool] = []

    async def test(watch: Watch) -> None:
        watch.engine.answers |= {PING: (ping, b""), MODELS: (models, b"")}
        await watch.watcher.probe()
        answers.append(watch.view.rtt_ms is not None)

    watched(test)
    return answers == [True]


def test_check_live_and_probes_agree_on_every_pair_of_answers() -> None:
    found = asyncio.run(checked())
    assert found == probed()
    well = {pair for pair, is_well in found.items() if is_well}
    assert well == {(ping, models) for ping, models in found if ping < 300 or (ping in (404, 405) and models < 300)}
