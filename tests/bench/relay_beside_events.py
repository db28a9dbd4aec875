"""The relay of `gorgo serve` while eight replicas report two million KV events a minute to it, or to another process.

Targets: p99 of the time to first byte within 5 %, and the processor time of the events under 10 % of a core. The
publishers send the same in all windows; in half of them a process that drops it receives it in the proxy's place
(`kv_sink`). So the quotient is the proxy's share, without that of publishers on the same machine. Windows are in the
order ABBA. The processor time is that of the proxy and its helpers in windows of their own, without requests.

`WINDOWS=96 python -m tests.bench relay_beside_events` doubles the default number of windows.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from gorgo.live.extras import EVENTS, is_installed
from tests.bench.first_bytes import Windows, first_byte_times, print_windows
from tests.bench.kv_publishers import TOPIC, Publishers, publishers
from tests.bench.kv_sink import sink
from tests.proxy.fakes import DONE, USAGE, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

WINDOWS, WINDOW_S = 48, 2.5
WARM = 500
#: Windows without requests, one of each kind.
IDLE_WINDOW_S = 6.0
#: After a switch: what was under way has arrived.
SETTLE_S, SWITCH_TIMEOUT_S = 0.3, 120.0


def run() -> None:
    """Print p50 and p99 with and without events, and the processor time of the events."""
    if not is_installed(EVENTS):
        print("pyzmq is not installed (extra `events`)")
        return
    with publishers() as publishing, sink(publishing.ports):
        asyncio.run(_measure(publishing, int(os.environ.get("WINDOWS", WINDOWS))))


async def _measure(publishing: Publishers, windows: int) -> None:
    answer = stream(delta("a"), delta("b"), USAGE, DONE)
    with tempfile.TemporaryDirectory() as folder:
        async with running(answer) as engine:
            rows = {
                f"r{place}": {"url": engine.url, "kv_events": {"endpoint": f"tcp://127.0.0.1:{port}", "topic": TOPIC}}
                for place, port in enumerate(publishing.ports)
            }
            (Path(folder) / "regions.yaml").write_bytes(regions(rows, proxy={"policy": "gorgo-ms"}))
            async with served(Path(folder)) as gorgo:
                await first_byte_times(gorgo, WARM)
                spent = {on: await _spent(gorgo, publishing, on=on) for on in (False, True)}
                found: dict[bool, Windows] = {True: [], False: []}
                for window in range(windows):
                    on = window % 4 in (0, 3)
                    await _switch(gorgo, publishing, on=on)
                    before = await _events(gorgo)
                    found[on].append(await first_byte_times(gorgo, seconds=WINDOW_S))
                    assert (await _events(gorgo) > before) == on
    print_windows("events", found[True], found[False])
    share, events_per_s = spent[True][0] - spent[False][0], spent[True][1]
    print(f"{events_per_s * 60 / 1e6:.2f} M events a minute take {share:.1%} of a core")


async def _switch(gorgo: Served, publishing: Publishers, *, on: bool) -> None:
    """Wait until events arrive, or until none does any longer."""
    publishing.switch(on=on)
    async with asyncio.timeout(SWITCH_TIMEOUT_S):
        arrive = None
        while arrive != on:
            before = await _events(gorgo)
            await asyncio.sleep(SETTLE_S)
            arrive = await _events(gorgo) > before


async def _spent(gorgo: Served, publishing: Publishers, *, on: bool) -> tuple[float, float]:
    """Return the proxy's share of a core without requests, and the events of a second."""
    await _switch(gorgo, publishing, on=on)
    before, spent_s = await _events(gorgo), _processor_s(gorgo.process.pid)
    await asyncio.sleep(IDLE_WINDOW_S)
    spent_s = _processor_s(gorgo.process.pid) - spent_s
    return spent_s / IDLE_WINDOW_S, (await _events(gorgo) - before) / IDLE_WINDOW_S


async def _events(gorgo: Served) -> float:
    """Return the events that the proxy has received from all replicas."""
    replicas = (await gorgo.admin.get("/admin/fleet")).json()["replicas"]
    return float(sum(row["cache"]["feed"]["events"] for row in replicas))


def _processor_s(pid: int) -> float:
    """Return the processor time of a process and of its children, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(_processor_s(int(child)) for child in children)
