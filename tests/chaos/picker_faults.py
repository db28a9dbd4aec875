"""`python -m tests.chaos.picker_faults [--short] [--json]`: requests through Envoy while its picker fails.

One picker behind two Envoys, of which one fails open, as `gorgo picker --print-envoy` has it, and the other closed. A
steady load goes through both; the picker is stalled (SIGSTOP), killed (SIGKILL), stopped (SIGTERM) and started again,
or slow: each of its answers is 50 ms late. Per time since the fault began: how much later than before it first bytes
come, and errors.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import aiohttp
import yaml

from gorgo.config.load import parse_config
from gorgo.lab.demo import Processes
from gorgo.picker.envoy import envoy_config
from tests.picker.envoy.envoy import PROGRAM
from tests.ports import free_ports
from tests.proxy.fakes import DONE, USAGE, delta, running, stream

# --- A link between Envoy and a picker on which the picker's answers come late.


HOST = "127.0.0.1"
_RECEIVED_MAX = 1 << 16


class LateLink:
    """Passes on bytes of TCP, those from `port` after `late_s`, in order.

    Parameters
    ----------
    port:
        Of the picker.
    """

    def __init__(self, port: int) -> None:
        self.late_s = 0.0
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listen; return the port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            far, far_out = await asyncio.open_connection(HOST, self._port)
        except OSError:
            near_out.close()
            return
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        ways = [_pass(near, far_out), self._delay(far, late), _deliver(late, near_out)]
        under_way = [asyncio.ensure_future(each) for each in ways]
        try:
            # The end of any of them is that of the connection.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in under_way:
                each.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            near_out.close()
            far_out.close()

    async def _delay(self, source: asyncio.StreamReader, late: asyncio.Queue[tuple[float, bytes]]) -> None:
        while data := await source.read(_RECEIVED_MAX):
            late.put_nowait((monotonic() + self.late_s, data))


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(_RECEIVED_MAX):
        sink.write(data)
        await sink.drain()


async def _deliver(late: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
    """Write each piece when it is due; one that is due before an earlier one waits for it."""
    while True:
        due_s, data = await late.get()
        await asyncio.sleep(max(0.0, due_s - monotonic()))
        sink.write(data)
        await sink.drain()


STALLED, KILLED, STOPPED, SLOW = "stalled", "killed", "stopped", "slow"
OPEN, CLOSED = "open", "closed"
LATE_S = 0.05
REPLICAS = 3
#: For a process to listen; and the longest answer: Envoy's wait for a picker (30 s) and something more.
START_S, PATIENCE_S = 120.0, 45.0
#: Requests of both Envoys in a fault all of which wait.
MAX_OPEN = 2000
_BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello"}]}).encode()
_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, s, and how many requests a second each Envoy gets."""

    before_s: float
    fault_s: float
    after_s: float
    per_s: float
    #: Bounds of the rows, s since the fault began.
    bounds: tuple[float, ...]


FULL = Plan(before_s=5.0, fault_s=12.0, after_s=8.0, per_s=20.0, bounds=(0.0, 2.0, 5.0, 12.0, 15.0, 20.0))
#: 600 requests of each Envoy.
RESTART = Plan(before_s=4.0, fault_s=3.0, after_s=3.0, per_s=60.0, bounds=(0.0, 3.0, 6.0))
SHORT = Plan(before_s=2.0, fault_s=6.0, after_s=4.0, per_s=10.0, bounds=(0.0, 4.0, 6.0, 8.0, 10.0))


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: when it was sent, how long its first byte took (`None`: none came), and what came."""

    at_s: float
    first_s: float | None
    status: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Requests sent within a time since the fault began. Latencies are beyond the median of before the fault."""

    fault: str
    fails: str
    from_s: float
    to_s: float
    requests: int
    errors: int
    statuses: Sequence[int]
    added_ms_p50: float | None
    added_ms_most: float | None


class Scene:
    """What runs: replicas in this process, a picker, and two Envoys."""

    def __init__(self, folder: Path, processes: Processes, replicas: Sequence[str], *, late: bool) -> None:
        self._folder = folder
        self._processes = processes
        self._pickers = 0
        self._ports = dict(zip(("picker", "admin", OPEN, CLOSED), free_ports(4), strict=True))
        self._config = folder / "regions.yaml"
        self._text = yaml.safe_dump(
            {
                "proxy": {"region": "here", "bind": f"{HOST}:1", "admin_bind": f"{HOST}:{self._ports['admin']}"},
                "picker": {"bind": f"{HOST}:{self._ports['picker']}"},
                "regions": [{"name": "here"}],
                "replicas": [{"name": f"r{n}", "region": "here", "url": url} for n, url in enumerate(replicas)],
            }
        )
        self._config.write_text(self._text)
        self.link = LateLink(self._ports["picker"]) if late else None
        self.urls = {mode: f"http://{HOST}:{self._ports[mode]}" for mode in (OPEN, CLOSED)}

    async def start(self) -> None:
        await self.start_picker()
        port = self._ports["picker"] if self.link is None else await self.link.open()
        async with aiohttp.ClientSession() as session:
            for mode in (OPEN, CLOSED):
                file = self._folder / f"envoy-{mode}.yaml"
                file.write_text(yaml.safe_dump(self._envoy(mode, port)))
                words = [str(PROGRAM), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
                self._processes.start_command(f"envoy-{mode}", words)
                await _answering(session, self.urls[mode] + "/health")

    async def start_picker(self) -> None:
        self._pickers += 1
        name = f"picker-{self._pickers}"
        self._processes.start(name, ["picker", "--config", str(self._config), "--log-level", "error"])
        await asyncio.to_thread(self._processes.wait_for_line, name, "listening on", timeout_s=START_S)

    def signal(self, number: signal.Signals) -> None:
        process = self._processes._running[f"picker-{self._pickers}"]
        os.kill(process.pid, number)
        if number is signal.SIGKILL:
            process.wait()

    async def await_end(self) -> None:
        """Wait until a picker that was stopped has ended."""
        await asyncio.to_thread(self._processes.wait, f"picker-{self._pickers}", timeout_s=START_S)

    async def close(self) -> None:
        if self.link is not None:
            await self.link.close()

    def _envoy(self, mode: str, picker_port: int) -> dict[str, Any]:
        text = re.sub(rf"{HOST}:1$", f"{HOST}:{self._ports[mode]}", self._text, count=1, flags=re.MULTILINE)
        whole = envoy_config(parse_config(text.encode()))
        static = whole["static_resources"]
        (endpoints,) = static["clusters"][1]["load_assignment"]["endpoints"]
        endpoints["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
        decision = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]
        decision["typed_config"]["failure_mode_allow"] = mode == OPEN
        return whole


async def _answering(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


@asynccontextmanager
async def _scene(folder: Path, *, late: bool) -> AsyncIterator[Scene]:
    folder.mkdir()
    with Processes(folder, {**os.environ, "PYTHONUNBUFFERED": "1"}) as processes:
        script = stream(delta("a"), delta("b"), USAGE, DONE)
        async with running(script) as first, running(script) as second, running(script) as third:
            scene = Scene(folder, processes, [each.url for each in (first, second, third)], late=late)
            try:
                await scene.start()
                yield scene
            finally:
                await scene.close()


async def measure(fault: str, plan: Plan, folder: Path, *, modes: Sequence[str] = (OPEN, CLOSED)) -> list[Row]:
    """Return the rows of one fault, of the Envoys that get load."""
    connector = aiohttp.TCPConnector(limit=MAX_OPEN)
    async with _scene(folder, late=fault == SLOW) as scene, aiohttp.ClientSession(connector=connector) as session:
        begins_s = monotonic() + plan.before_s
        loads = {
            mode: asyncio.create_task(_load(session, url, begins_s, plan))
            for mode, url in scene.urls.items()
            if mode in modes
        }
        await asyncio.sleep(begins_s - monotonic())
        back = await _break(scene, fault)
        await asyncio.sleep(begins_s + plan.fault_s - monotonic())
        await back()
        return [row for mode, load in loads.items() for row in rows_of(fault, mode, await load, plan)]


async def _break(scene: Scene, fault: str) -> Any:
    """Begin the fault; return what ends it."""
    if fault == SLOW:
        link = scene.link
        assert link is not None
        link.late_s = LATE_S

        async def in_time() -> None:
            link.late_s = 0.0

        return in_time
    if fault == KILLED:
        scene.signal(signal.SIGKILL)
        return scene.start_picker
    if fault == STOPPED:
        scene.signal(signal.SIGTERM)

        async def starts_again() -> None:
            await scene.await_end()
            await scene.start_picker()

        return starts_again
    scene.signal(signal.SIGSTOP)

    async def goes_on() -> None:
        scene.signal(signal.SIGCONT)

    return goes_on


async def _load(session: aiohttp.ClientSession, url: str, begins_s: float, plan: Plan) -> list[Seen]:
    """Send requests at an even pace; times count from the beginning of the fault."""
    tasks = []
    # By number: a sum of a thousand intervals ends before or after the last one, as its rounding has it.
    for number in range(round((plan.before_s + plan.fault_s + plan.after_s) * plan.per_s)):
        due_s = begins_s - plan.before_s + number / plan.per_s
        await asyncio.sleep(due_s - monotonic())
        tasks.append(asyncio.create_task(_ask(session, url, due_s, begins_s)))
    return await asyncio.gather(*tasks)


async def _ask(session: aiohttp.ClientSession, url: str, due_s: float, begins_s: float) -> Seen:
    first_s, status, body = None, 0, b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with session.post(f"{url}/v1/chat/completions", data=_BODY, headers=_HEADERS) as answer:
                status = answer.status
                async for chunk in answer.content.iter_any():
                    first_s = first_s or monotonic() - due_s
                    body += chunk
    except (aiohttp.ClientError, TimeoutError):
        return Seen(due_s - begins_s, first_s, status, complete=False)
    return Seen(due_s - begins_s, first_s, status, complete=status == 200 and body.endswith(DONE))


def rows_of(fault: str, mode: str, seen: Sequence[Seen], plan: Plan) -> list[Row]:
    """Return a row of all before the fault, and one for each time since it began."""
    usual_s = median(one.first_s for one in seen if one.at_s < 0 and one.first_s is not None)
    bounds = (-plan.before_s, *plan.bounds)
    rows = []
    for from_s, to_s in pairwise(bounds):
        found = [one for one in seen if from_s <= one.at_s < to_s]
        added_ms = [(one.first_s - usual_s) * 1e3 for one in found if one.complete and one.first_s is not None]
        wrong = [one.status for one in found if not one.complete]
        middle, most = (median(added_ms), max(added_ms)) if added_ms else (None, None)
        rows.append(Row(fault, mode, from_s, to_s, len(found), len(wrong), sorted(set(wrong)), middle, most))
    return rows


async def measure_all(plan: Plan, folder: Path, faults: Sequence[str] = (STALLED, KILLED, SLOW)) -> list[Row]:
    """Return the rows of all faults, one after the other."""
    return [row for fault in faults for row in await measure(fault, plan, folder / fault)]


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as lines of columns."""
    print("fault    fails   since the fault, s  requests  errors            added TTFT p50, ms   most, ms")
    for row in rows:
        since = f"{row.from_s:g} to {row.to_s:g}"
        errors = f"{row.errors} {' '.join(map(str, row.statuses))}"
        middle = "-" if row.added_ms_p50 is None else f"{row.added_ms_p50:.1f}"
        most = "-" if row.added_ms_most is None else f"{row.added_ms_most:.0f}"
        print(f"{row.fault:<8} {row.fails:<7} {since:>18} {row.requests:>9}  {errors:<17} {middle:>18} {most:>10}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.picker_faults", description=__doc__)
    parser.add_argument("--short", action="store_true", help="less than a minute")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gorgo-picker-faults-") as folder:
        rows = asyncio.run(measure_all(SHORT if asked.short else FULL, Path(folder)))
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
