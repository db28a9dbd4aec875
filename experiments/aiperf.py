"""Load by NVIDIA's aiperf, a tool of other people, and its records as those of a replay.

Theory of operation. aiperf sends bodies that it is given, at the times that it is given, so that both tools send the
same bytes at the same times. It numbers the requests by their place in the schedule, and its own clock begins with the
first one. It needs a tokenizer in the form of a hub cache although the engines count the tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.environments import Environment
from gorgo.errors import GorgoError
from gorgo.lab.prompt_text import body_of
from gorgo.lab.replay_client import ReplayRecord
from gorgo.lab.traces import TraceRequest

_FLAGS = ("--streaming", "--fixed-schedule", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics")


@dataclass(frozen=True, slots=True)
class Aiperf:
    """What the tool wrote: its summary, and an entry per request."""

    summary: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]]

    def average(self, name: str) -> float:
        return float(self.summary[name]["avg"])

    def middle(self, name: str) -> float:
        return float(self.summary[name]["p50"])


def trace_lines(requests: Sequence[TraceRequest], *, model: str, time_scale: float) -> Iterator[str]:
    """Yield the requests as lines of aiperf's trace: their time in ms, and the body that a replay sends."""
    for request in requests:
        line = {"timestamp": 1e3 * request.timestamp_s * time_scale, "payload": json.loads(body_of(request, model))}
        yield json.dumps(line) + "\n"


def run_aiperf(
    aiperf: Environment, url: str, trace: Path, out: Path, *,
    model: str, tokenizer: str, hub_cache: Path, timeout_s: float, more: Sequence[str] = (),
) -> Aiperf:  # fmt: skip
    """Send a trace; raises `GorgoError` with the end of what aiperf says."""
    options = {
        "--model": model, "--url": url, "--endpoint-type": "chat", "--tokenizer": tokenizer, "--input-file": str(trace),
        "--custom-dataset-type": "mooncake_trace", "--ui": "none", "--output-artifact-dir": str(out),
    }  # fmt: skip
    words = [word for pair in options.items() for word in pair]
    command = [str(aiperf.folder / "bin" / "aiperf"), "profile", *words, *_FLAGS, *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache), "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise GorgoError(f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    return Aiperf(json.loads((out / "profile_export_aiperf.json").read_text()), [json.loads(line) for line in lines])


def replay_records(found: Aiperf, requests: Sequence[TraceRequest], *, time_scale: float) -> Iterator[ReplayRecord]:
    """Yield aiperf's records of requests, whose latencies count from the scheduled time as those of a replay do."""
    begun_ns = min(one["metadata"]["request_start_ns"] for one in found.requests)
    for one in found.requests:
        about, metrics = one["metadata"], one["metrics"]
        request = requests[about["session_num"]]
        scheduled_s = request.timestamp_s * time_scale
        sent_s = (about["request_start_ns"] - begun_ns) / 1e9
        record = ReplayRecord(
            id=str(request.index), scheduled_s=scheduled_s, sent_s=sent_s, input_tokens=request.input_tokens,
        )  # fmt: skip
        if one.get("error"):
            record.error = str(one["error"].get("message") or one["error"])
        else:
            late_s = sent_s - scheduled_s
            record.ttft_ms = metrics["time_to_first_token"]["value"] + 1e3 * late_s
            record.e2e_s = metrics["request_latency"]["value"] / 1e3 + late_s
            record.output_tokens = round(metrics["output_sequence_length"]["value"])
            record.cached_tokens = round(metrics.get("usage_prompt_cache_read_tokens", {"value": 0})["value"])
        yield record
