"""Real routers with one fault each, a real Prometheus: each fault raises its alert within five minutes.

The windows of the rules are minutes, so the test takes four to five. All faults are at once, on three routers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from gorgo.lab.demo.run import Processes
from tests.proxy.authority import OPENSSL, needs_openssl
from tests.proxy.fakes import DONE, ROLE, FakeReplica, Script, answer, chat, delta, event, hang, reset_after, running
from tests.system.prometheus_process import prometheus, promtool

__all__ = ["promtool"]
CHAT = "/v1/chat/completions"
LIMIT_S = 300.0
#: Before the faults.
WELL_S = 20.0
#: Of each router: between two requests of its one client, and how long that client waits for an answer, s.
EVERY_S, PATIENCE_S = 0.1, 4.0
TOKENS = [delta("a") for _ in range(8)]
USAGE = event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": len(TOKENS)}})
#: Between two tokens of a good replica, and of one that decodes slowly, s.
STEP_S, SLOW_STEP_S = 0.01, 0.1
_READY = r"gorgo serve listening on (\S+) "

#: Alert, the label that tells which, and its value.
EXPECTED = {
    ("GorgoOutage", "job", "outage"),
    ("GorgoErrorBudgetFast", "job", "outage"),
    ("GorgoCertificateExpired", "job", "outage"),
    ("GorgoBrokenStreams", "replica", "cut"),
    ("GorgoReplicaOut", "replica", "hung"),
    ("GorgoDecodeSlow", "replica", "slow"),
    ("GorgoCannotWrite", "job", "full"),
}


@needs_openssl
async def test_each_fault_raises_its_alert_within_five_minutes(promtool: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(running(decoding(STEP_S)))
            for name in ("good", "fine", "cut", "hung", "slow", "bad", "other")
        }
        processes = stack.enter_context(Processes(tmp_path, {"PATH": "/usr/bin:/bin"}))
        full = stack.enter_context(small_disk(tmp_path / "disk"))
        urls = {
            "faults": start(
                processes, tmp_path, "faults", {name: engines[name] for name in ("good", "fine", "cut", "hung", "slow")}
            ),
            "outage": start(processes, tmp_path, "outage", {"bad": engines["bad"]}, tls=expired(tmp_path)),
            "full": start(processes, tmp_path, "full", {"other": engines["other"]}, log=full / "requests.jsonl"),
        }
        targets = {job: f"{url}/metrics" for job, url in urls.items()}
        url = await asyncio.to_thread(stack.enter_context, prometheus(tmp_path, targets))
        for router in urls.values():
            await stack.enter_async_context(traffic(router))
        await asyncio.sleep(WELL_S)
        assert await firing(url) <= {("GorgoCertificateExpired", "job", "outage")}

        begun_s = time.monotonic()
        engines["cut"].scripts = [every_fourth(reset_after(ROLE, delta("a"), delta("b")))]
        engines["slow"].scripts = [decoding(SLOW_STEP_S)]
        engines["hung"].scripts, engines["hung"].silent = [hang()], "/ping"
        engines["bad"].scripts = [answer(500, b'{"error": {"message": "no"}}')]
        (full / "others").write_bytes(bytes(free_bytes(full)))
        seen: dict[tuple[str, str, str], float] = {}
        while EXPECTED - set(seen) and time.monotonic() - begun_s < LIMIT_S:
            await asyncio.sleep(1.0)
            for alert in await firing(url):
                seen.setdefault(alert, time.monotonic() - begun_s)
        processes.check_alive()
    after = {alert: round(after_s) for alert, after_s in seen.items()}
    sys.stdout.write(f"alerts by the seconds after their faults: {after}\n")
    assert EXPECTED - set(seen) == set()


def decoding(step_s: float) -> Script:
    """A stream with its usage, a token after another."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in (ROLE, *TOKENS):
            await response.write(chunk)
            await asyncio.sleep(step_s)
        await response.write(USAGE + DONE)
        await response.write_eof()
        return response

    return script


def every_fourth(broken: Script) -> Script:
    """Three good answers and a broken one: what breaks always is ejected, and then its alert is another."""
    count, good = itertools.count(1), decoding(STEP_S)

    async def script(request: web.Request, body: bytes) -> web.StreamResponse:
        return await (good if next(count) % 4 else broken)(request, body)

    return script


async def firing(url: str) -> set[tuple[str, str, str]]:
    """Return the alerts that fire, each with its job or replica."""
    async with httpx.AsyncClient(trust_env=False) as client:
        found = (await client.get(f"{url}/api/v1/alerts")).json()["data"]["alerts"]
    alerts = [each["labels"] for each in found if each["state"] == "firing"]
    return {
        (labels["alertname"], name, labels[name])
        for labels in alerts
        for name in ("replica", "job")
        if name in labels and not (name == "job" and "replica" in labels)
    }


def start(
    processes: Processes,
    folder: Path,
    job: str,
    engines: Mapping[str, FakeReplica],
    *,
    tls: tuple[Path, Path] | None = None,
    log: Path | None = None,
) -> str:
    """Start one router, and return its URL."""
    rows = "\n".join(f"  - {{name: {name}, region: here, url: '{each.url}'}}" for name, each in engines.items())
    secured = "" if tls is None else f", tls: {{cert: '{tls[0]}', key: '{tls[1]}'}}"
    config = folder / f"{job}.yaml"
    config.write_text(
        f"proxy: {{region: here, bind: '127.0.0.1:0', admin_bind: '127.0.0.1:0', policy: round-robin{secured}}}\n"
        f"regions: [{{name: here}}]\nreplicas:\n{rows}\n"
    )
    more = [] if log is None else ["--request-log", str(log)]
    processes.start(job, ["serve", "--config", str(config), *more])
    return processes.wait_for_line(job, _READY)[1]


@asynccontextmanager
async def traffic(url: str) -> AsyncIterator[None]:
    """Send streamed requests at a steady rate until the end of the block."""
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=PATIENCE_S, trust_env=False) as client:

        async def send() -> None:
            try:
                await client.post(CHAT, content=chat(stream=True), headers={"content-type": "application/json"})
            except httpx.HTTPError:
                return  # what becomes of it is Prometheus' to say

        async def run() -> None:
            async with asyncio.TaskGroup() as requests:
                while True:
                    requests.create_task(send())
                    await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ALERT TEST SKIPPED: a file system of a bounded size needs root: {done.stderr.strip()}")
    try:
        yield place
    finally:
        # The router may still write to it, which is stopped after this.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def expired(folder: Path) -> tuple[Path, Path]:
    """A certificate that expired in 2020, and its key."""
    assert OPENSSL is not None
    cert, key, settings = folder / "expired.crt", folder / "expired.key", folder / "ca.cnf"
    database = folder / "ca"
    database.mkdir()
    (database / "index.txt").touch()
    (database / "serial").write_text("01\n")
    settings.write_text(
        f"[ca]\ndefault_ca = own\n[own]\ndatabase = {database}/index.txt\nserial = {database}/serial\n"
        f"new_certs_dir = {database}\ndefault_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n"
        "[req]\ndistinguished_name = name\n[name]\n"
    )
    asked = folder / "expired.csr"
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=127.0.0.1"]
    request = ["req", "-config", settings, *new, "-keyout", key, "-out", asked]
    times = ["-startdate", "20200101000000Z", "-enddate", "20200201000000Z"]
    signing = ["ca", "-batch", "-config", settings, "-selfsign", "-keyfile", key, "-in", asked, "-out", cert, "-notext"]
    for command in (request, [*signing, *times]):
        subprocess.run([OPENSSL, *map(str, command)], check=True, capture_output=True)
    return cert, key
