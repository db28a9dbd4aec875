"""Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gorgo.core.numeric import Floats
from gorgo.live.training.service import NICENESS
from tests.bench.first_bytes import first_byte_times
from tests.proxy.fakes import DONE, USAGE, delta, running, stream
from tests.proxy.followed import regions
from tests.proxy.served import Served, served

# --- Quantiles of times in short neighbouring windows of several kinds, as ratios with bootstrap intervals.
#
# A block has two windows of each kind, in an order and then in the reverse one (ABBA, the next block BAAB), so that a
# machine that drifts favours none. The ratio is the median over blocks of the ratio of a quantile within a block: a
# machine that is disturbed for a second spoils a block, not the quantile of all times. Blocks are drawn again with
# replacement for the interval. The same is done for the two windows of one kind: what is left between these is chance.


#: Times of a block by kind: those of its first and of its second window.
Block = Mapping[str, tuple[Sequence[float], Sequence[float]]]
DRAWS, SEED = 4000, 0
QUANTILES = (0.5, 0.99)


def print_ratios(blocks: Sequence[Block], *, over: str) -> None:
    """Print p50 and p99 of each kind, ms, its ratios to the kind `over`, and the ratio of two halves of that."""
    print(f"{'time to first byte':<31}  {'requests':>8}  {'p50 ms':>7}  {'p99 ms':>7}")
    pooled = {kind: [[*block[kind][0], *block[kind][1]] for block in blocks] for kind in blocks[0]}
    for kind, times in pooled.items():
        p50, p99 = np.median(_quantiles(times), axis=0)
        print(f"{kind:<31}  {sum(map(len, times)):>8,}  {p50:>7.2f}  {p99:>7.2f}")
    for kind, times in pooled.items():
        if kind != over:
            _print_ratio(f"{kind} / {over}", times, pooled[over])
    _print_ratio("by chance", *([block[over][half] for block in blocks] for half in (0, 1)))


def _print_ratio(name: str, times: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> None:
    logs = np.log(_quantiles(times)) - np.log(_quantiles(others))
    ratios = [median_ratio(logs[:, column]) for column in range(len(QUANTILES))]
    print(f"{name:<41}  " + "  ".join(f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in ratios))


def median_ratio(logs: Floats) -> tuple[float, float, float]:
    """Return the median of ratios that are given as logarithms, with its 95 % interval.

    >>> median_ratio(np.log([2.0, 2.0, 2.0]))
    (2.0, 2.0, 2.0)
    """
    rng = np.random.default_rng(SEED)
    drawn = np.median(logs[rng.integers(len(logs), size=(DRAWS, len(logs)))], axis=1)
    value, low, high = np.exp([np.median(logs), *np.quantile(drawn, (0.025, 0.975))]).round(12)
    return float(value), float(low), float(high)


def _quantiles(times: Sequence[Sequence[float]]) -> Floats:
    return np.array([np.quantile(each, QUANTILES) for each in times])


# --- Time to first byte through `gorgo serve` while a round trains beside it, against windows in which none does.
#
# Target: p99 within 5 %. The policy is `lodestar` with a model. In windows without a round its process is stopped: it
# is the same process with the same memory, and a change takes no time. Two other neighbours say what the machine does
# to the same times: they only count, at the same priority, one in the same slices and pauses, one all the time.


#: A round trains for longer than the windows.
LEARNING = {"first_samples": 5000, "round_samples": 10, "epochs": 1000}
BLOCKS, WINDOW_S = 24, 0.5
WARM = 5500
TRAINS, STOPPED = "a round trains", "nothing beside"
SLICES, COUNTS = "a process counts in slices", "a process counts"
#: Of the windows of a block, and reversed after it; the next block begins with another one.
KINDS = (TRAINS, STOPPED, SLICES, COUNTS)
#: What only counts: it has no memory to speak of, and speaks to nobody.
_PACED = "from gorgo.live.training.worker import pace; pace()"
_COUNT = f"import os; os.nice({NICENESS})\n{{}}\nwhile True: pass"


def run() -> None:
    """Print p50 and p99 with and without a round, ms, and their ratios."""
    print_ratios(asyncio.run(_measure(int(os.environ.get("BLOCKS", BLOCKS)))), over=STOPPED)


async def _measure(blocks: int) -> list[Block]:
    """Return the times of each window, ms."""
    answer = stream(delta("a"), delta("b"), USAGE, DONE)
    with tempfile.TemporaryDirectory() as folder:
        async with running(answer) as replica:
            proxy = {"policy": "lodestar", "learning": LEARNING}
            text = regions({"a": replica, "b": {"url": replica.url}}, proxy=proxy)
            (Path(folder) / "regions.yaml").write_bytes(text)
            async with served(Path(folder)) as gorgo:
                await first_byte_times(gorgo, WARM)
                while (await _training(gorgo))["state"] != "training":
                    await first_byte_times(gorgo, 5)
                pids = {TRAINS: int(str((await _training(gorgo))["pid"]))}
                pids |= {kind: _counting(kind) for kind in (SLICES, COUNTS)}
                await asyncio.sleep(2.0)  # the processes have started
                try:
                    found = [await _block(gorgo, pids, block) for block in range(blocks)]
                    assert (await _training(gorgo))["state"] == "training", "one round for all windows"
                    return found
                finally:
                    for pid in pids.values():
                        os.kill(pid, signal.SIGKILL)  # one that is stopped does not hear of the proxy's end


def _counting(kind: str) -> int:
    words = _COUNT.format(_PACED if kind == SLICES else "")
    return subprocess.Popen([sys.executable, "-c", words]).pid


async def _block(gorgo: Served, pids: Mapping[str, int], block: int) -> Block:
    first = block % len(KINDS)
    order = (*KINDS[first:], *KINDS[:first])
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for kind in (*order, *reversed(order)):
        for beside, pid in pids.items():
            os.kill(pid, signal.SIGCONT if beside == kind else signal.SIGSTOP)
        times[kind].append(await first_byte_times(gorgo, seconds=WINDOW_S))
    return {kind: (first, second) for kind, (first, second) in times.items()}


async def _training(gorgo: Served) -> dict[str, object]:
    found: dict[str, object] = (await gorgo.admin.get("/admin/model")).json()["training"]
    return found
