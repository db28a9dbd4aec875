"""A fleet of real processes for `gorgo diagnose`: engines for all tests, a router and the command for each."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gorgo.cli.diagnose import Gathered, gather_evidence
from gorgo.cli.diagnosis import FAULTS
from gorgo.engines.kv_sources import read_sglang, read_vllm
from tests.cli.diagnose.meddler import Faults, meddling, relaying
from tests.cli.test_processes import environ, gorgo, running

#: Two replicas near, one far; all three have a second model for their vLLM dialect's tests.
NAMES = ("near-0", "near-1", "far-0")
_REGIONS = {"near-0": "near", "near-1": "near", "far-0": "far"}
SGLANG, VLLM = "2xL40S-Qwen3.5-35B-A3B-FP8-fitted", "2xL40S-Qwen3.5-35B-A3B-FP8-vLLM"
WORDS = " ".join(f"This sentence has the number {number}." for number in range(60))


def document(urls: dict[str, str], *, profile: str = SGLANG) -> dict[str, Any]:
    """The file of a healthy fleet."""
    return {
        "proxy": {"region": "near", "policy": "gorgo-ms", "probe_interval_s": 1.0},
        "regions": [{"name": "near"}, {"name": "far"}],
        "replicas": [
            {
                "name": name,
                "region": _REGIONS[name],
                "url": url,
                "models": ["gorgo-sim"],
                "accelerator": "2xL40S",
                "request_usage": True,
            }
            for name, url in urls.items()
        ],
        "models": [{"name": "gorgo-sim", "tokenizer": "simulated"}],
        "simulation": {"rtt_ms": {"near": 2, "far": 30}, "profile": profile, "seed": 0},
    }


@dataclass
class Engines:
    """Running `gorgo engine` processes."""

    urls: dict[str, str]
    events: dict[str, str]
    profile: str


@contextmanager
def engines(folder: Path, *, profile: str = SGLANG, names: Sequence[str] = NAMES) -> Iterator[Engines]:
    """Engines that publish their events."""
    config = folder / "engines.yaml"
    config.write_text(yaml.safe_dump(document(dict.fromkeys(names, "http://127.0.0.1:1"), profile=profile)))
    with ExitStack() as stack:
        urls, events = {}, {}
        for name in names:
            words = ("engine", "--replica", name, "--config", config, "--port", "0", "--kv-events", "tcp://127.0.0.1:0")
            said, _ = stack.enter_context(running(rf"gorgo engine {name} listening on (http://\S+)", *words))
            urls[name], events[name] = said[1], _announced(said[1])
        yield Engines(urls, events, profile)


def _announced(url: str) -> str:
    """Return where an engine says that it publishes its events."""
    for path, read in (("/server_info", read_sglang), ("/kv_event_sources", read_vllm)):
        answer = httpx.get(url + path, timeout=60)
        sources = read(answer.json(), host="127.0.0.1") if answer.status_code == 200 else None
        if sources:
            return sources[0].endpoint
    raise AssertionError(f"{url} announces no events")


@dataclass
class Lab:
    """One fleet in the making, then running."""

    folder: Path
    engines: Engines
    stack: ExitStack
    file: dict[str, Any]
    serve: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    most_files: int | None = None
    #: Of a file that the router writes: more is as on a full disk.
    most_file_bytes: int | None = None
    #: Called once the router runs, with a client of its data listener, and one of its admin listener.
    after: list[Callable[[httpx.Client, httpx.Client], None]] = field(default_factory=list)

    def replica(self, name: str) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = (row for row in self.file["replicas"] if row["name"] == name)
        return found

    def meddle(self, name: str, **faults: Any) -> None:
        url = self.stack.enter_context(meddling(self.engines.urls[name], Faults(**faults)))
        self.replica(name)["url"] = url

    def events(self, **changes: str | None) -> None:
        """Configure the events of all replicas; those of `changes` come by a relay, and `None` is from nowhere."""
        for name, endpoint in self.engines.events.items():
            key = name.replace("-", "_")
            if key in changes:
                change = changes[key]
                endpoint = self.stack.enter_context(relaying(None if change is None else endpoint, change or ""))
            self.replica(name)["kv_events"] = {"endpoint": endpoint}

    def diagnose(self) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
        """Run the router and the command; return the findings, the exit code and the whole answer."""
        config = self.folder / "regions.yaml"
        config.write_text(yaml.safe_dump(self.file))
        variables = {**environ(), **self.variables}
        words = ["serve", "--config", str(config), "--bind", "127.0.0.1:0", "--admin-bind", "127.0.0.1:0", *self.serve]

        def limit() -> None:
            if self.most_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self.most_files, self.most_files))
            if self.most_file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.most_file_bytes, self.most_file_bytes))

        # Its own log is a file too, which such a limit would end.
        path = self.folder / "serve.log" if self.most_file_bytes is None else Path(os.devnull)
        log = self.stack.enter_context(path.open("w"))
        process = subprocess.Popen(
            gorgo(*words), stdout=subprocess.PIPE, stderr=log, text=True, env=variables, preexec_fn=limit
        )
        try:
            assert process.stdout is not None
            said = re.search(r"listening on (http://\S+) \(admin (http://\S+)\)", process.stdout.readline())
            assert said is not None, (process.wait(20), path.read_text())
            token = {"authorization": f"Bearer {variables['GORGO_ADMIN_TOKEN']}"}
            with (
                httpx.Client(base_url=said[1], timeout=60, verify=False) as client,
                httpx.Client(base_url=said[2], timeout=60, headers=token) as admin,
            ):
                _wait_until_measured(admin)
                for step in self.after:
                    step(client, admin)
            command = gorgo("diagnose", "--config", config, "--url", said[2], "--json", *self.words)
            done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)
        finally:
            process.kill()
            process.communicate()
        assert done.returncode in (0, 1), done.stderr
        answer = json.loads(done.stdout)
        assert answer["took"]["tokens"] <= 50
        findings = answer["findings"]
        assert all(FAULTS[row["fault"]] == row["anchor"] for row in findings)
        return findings, done.returncode, answer


def _wait_until_measured(admin: httpx.Client) -> None:
    """Wait until each replica that answers has been probed and scraped; one that does not stays out."""
    for _ in range(60):
        rows = admin.get("/admin/fleet").json()["replicas"]
        if all(row["rtt_ms"] is not None and row["scrape_age_s"] is not None for row in rows):
            return
        time.sleep(0.1)


@contextmanager
def lab(folder: Path, found: Engines) -> Iterator[Lab]:
    """A healthy fleet, to be changed."""
    with ExitStack() as stack:
        file = document(found.urls, profile=found.profile)
        yield Lab(folder, found, stack, copy.deepcopy(file))


def unlike(number: int, words: int) -> str:
    """Return a prompt that has nothing in common with that of another number."""
    return " ".join(hashlib.sha256(f"{number} {place}".encode()).hexdigest()[:7] for place in range(words))


def chat(client: httpx.Client, text: str, **more: Any) -> int:
    """Send one chat; return its status."""
    headers = more.pop("headers", {})
    body = {"model": "gorgo-sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    return client.post("/v1/chat/completions", json=body | more, headers=headers).status_code


def chats(client: httpx.Client, texts: Sequence[str], *, at_once: int = 4, **more: Any) -> list[int]:
    """Send chats, some at a time; return their statuses."""
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda text: chat(client, text, **copy.deepcopy(more)), texts))


def usual_traffic(client: httpx.Client, _: httpx.Client) -> None:
    """Conversations that share a system prompt, each at its own pace."""
    texts = [f"{WORDS} Question {number} of conversation {number % 5}." for number in range(24)]
    statuses = chats(client, texts, at_once=2)
    assert set(statuses) == {200}, statuses


#: No router runs there.
NOWHERE = "http://127.0.0.1:9"


def gathered(folder: Path, urls: Mapping[str, str], **more: Any) -> Gathered:
    """Return what `gorgo diagnose` sees of engines that run already, without a router before them."""
    replicas = [{"name": name, "region": "here", "url": url, **more} for name, url in urls.items()]
    file = {"proxy": {"region": "here"}, "regions": [{"name": "here"}], "replicas": replicas}
    config = folder / "regions.yaml"
    config.write_text(yaml.safe_dump(file))
    return gather_evidence(config, url=NOWHERE, request_log=None, tuner_url=None)
