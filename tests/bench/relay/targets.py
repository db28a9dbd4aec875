"""The relays under test: how each is started, as its operator would start it, or why it cannot be.

`direct` is the engine itself. nginx comes from PATH. `sglang-router` and py-spy are installed once, each into an
environment of its own in the user's cache, so that neither is a dependency of the project.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from tests.bench.relay.wire import KEY, MODEL
from tests.ports import free_port

#: Pinned, so that ratios of two runs compare like with like.
SGLANG_ROUTER, PY_SPY = "sglang-router==0.3.2", "py-spy==0.4.3"

_INSTALL_S_MAX = 300
_ROOT = Path(__file__).parents[3]
_STOP_S_MAX = 10


class UnavailableError(Exception):
    """This relay cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a relay."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    version: str
    #: Where it runs, None for here: which tree's modules Python finds.
    tree: Path | None = None
    tls: bool = False
    #: Of a relay of two routers: where they listen.
    port: int | None = None
    second_port: int | None = None
    #: Longest time until it answers.
    start_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a relay listens, which replicas it has, and a folder of its own."""

    port: int
    replicas: Sequence[int]
    folder: Path


def gorgo(place: Place) -> Launch:
    """`gorgo serve` as an operator runs it: routing, accounting, metrics, request log, client keys and deadlines."""
    return _gorgo(place, "")


def gorgo_retaining(continuations: int) -> Callable[[Place], Launch]:
    """Return the launch of one whose answers can go on elsewhere so many times: with 0 it retains none."""
    return lambda place: _gorgo(place, "", f"limits: {{continuations: {continuations}}}\n")


def gorgo_plain(place: Place) -> Launch:
    """The same on the HTTP of stock libraries."""
    launch = gorgo(place)
    return replace(launch, arguments=[*launch.arguments, "--plain"], version="gorgo serve --plain")


def gorgo_tls(place: Place) -> Launch:
    """The same with TLS to clients."""
    cert, key = place.folder / "cert.pem", place.folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(cert), "-subj", "/CN=127.0.0.1", "-days", "2"],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"no certificate from openssl: {error}") from error
    return replace(_gorgo(place, f"tls: {{cert: '{cert}', key: '{key}'}}, "), tls=True)


def _gorgo(place: Place, more: str, sections: str = "") -> Launch:
    # The engine computes nothing, so that nothing is ever queued for it.
    capacity = "{kv_tokens: 100000000, max_running_requests: 4096, prefill_tokens_per_s: 100000000}"
    replicas = "".join(
        f"  - {{name: replica-{number}, region: here, url: 'http://127.0.0.1:{port}', models: [{MODEL}], "
        f"capacity: {capacity}}}\n"
        for number, port in enumerate(place.replicas)
    )
    keys = place.folder / "clients.keys"
    keys.write_text(f"bench:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    keys.chmod(0o600)
    config = place.folder / "regions.yaml"
    config.write_text(
        f"proxy:\n  {{region: here, policy: gorgo-ms, {more}"
        f"bind: '127.0.0.1:{place.port}', admin_bind: '127.0.0.1:{free_port()}'}}\n"
        f"clients: {{keys_file: '{keys}'}}\n"
        f"{sections}regions: [{{name: here}}]\nreplicas:\n{replicas}"
    )
    log = ["--request-log", str(place.folder / "requests.jsonl")]
    return Launch(
        arguments=[sys.executable, "-m", "gorgo", "serve", "--config", str(config), *log],
        environment={"GORGO_ADMIN_TOKEN": secrets.token_hex(16)},
        version=f"gorgo-ms (hypercorn {version('hypercorn')}, httptools {version('httptools')})",
    )


def floor(place: Place) -> Launch:
    """A pure pipe in Python without routing: what no relay on these libraries can be cheaper than."""
    return Launch(
        arguments=[sys.executable, "-m", "tests.bench.relay.floor", str(place.port), *map(str, place.replicas)],
        environment={},
        version=f"a pipe (uvloop {version('uvloop')}, httptools {version('httptools')})",
        tree=_ROOT,
    )


def other_gorgo(where: str) -> Callable[[Place], Launch]:
    """`gorgo serve` as it was at the commit `where`, or as it is in that folder, on the packages of today."""

    def launch(place: Place) -> Launch:
        if Path(where).is_dir():
            return replace(gorgo(place), tree=Path(where).resolve(), version=f"gorgo in {where}")
        tree = place.folder / "tree"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", where], cwd=_repository(), capture_output=True, check=False)
        if archive.returncode:
            raise UnavailableError(f"git archive {where}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        return replace(gorgo(place), tree=tree, version=f"gorgo at {where}")

    return launch


def _repository() -> Path:
    """Return the root of the repository: of its compiled copy, a folder in it, no commit has anything."""
    found = subprocess.run(
        ["git", "rev-parse", "--show-toplevel"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    return Path(found.stdout.strip() or _ROOT)


def nginx(place: Place) -> Launch:
    """nginx as a plain streaming reverse proxy with keep-alive on both sides and no access log."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise UnavailableError("no nginx on PATH (Debian: apt install nginx-light)")
    folder = place.folder
    servers = " ".join(f"server 127.0.0.1:{port};" for port in place.replicas)
    paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log warn;\n"
        "events { worker_connections 8192; }\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; {paths}\n"
        "  client_body_buffer_size 1m; client_max_body_size 32m; keepalive_requests 10000000;\n"
        f"  upstream replicas {{ {servers} keepalive 1024; keepalive_requests 10000000; }}\n"
        f"  server {{ listen 127.0.0.1:{place.port} backlog=2048;\n"
        '    location / { proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";\n'
        "      proxy_buffering off; proxy_read_timeout 600s; } } }\n"
    )
    told = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr
    return Launch(
        arguments=[program, "-e", f"{folder}/error.log", "-c", str(config)], environment={}, version=told.strip()
    )


def sglang_router(place: Place) -> Launch:
    """sglang-router with its cache-aware policy, which is the one that does comparable work."""
    python = installed(SGLANG_ROUTER) / "python"
    urls = [f"http://127.0.0.1:{port}" for port in place.replicas]
    options = ["--policy", "cache_aware", "--log-level", "error"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return Launch(
        arguments=[
            *(str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(place.port)),
            *("--worker-urls", *urls),
            *options,
        ],
        environment={},
        version=f"{SGLANG_ROUTER} cache_aware",
    )


#: In the order of the table's columns, direct before them.
RELAYS: Mapping[str, Callable[[Place], Launch]] = {
    "nginx": nginx,
    "sglang-router": sglang_router,
    "floor": floor,
    "gorgo": gorgo,
    "gorgo, TLS": gorgo_tls,
}


def installed(requirement: str) -> Path:
    """The `bin` folder of an environment that holds `requirement`; made on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "gorgo-bench" / requirement.replace("==", "-")
    ready = folder / ".ready"
    if not ready.exists():
        print(f"installing {requirement} into {folder}", file=sys.stderr, flush=True)
        try:
            venv.create(folder, with_pip=True, clear=True)
            command = [
                str(folder / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--only-binary=:all:",
                requirement,
            ]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_S_MAX)
        except (subprocess.SubprocessError, OSError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise UnavailableError(f"{requirement} could not be installed: {' '.join(map(str, why))}") from error
        ready.touch()
    return folder / "bin"


def start(launch: Launch, folder: Path) -> subprocess.Popen[bytes]:
    """Start a relay in a process group of its own; what it says goes to `folder`/log."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            list(launch.arguments),
            env={**os.environ, **launch.environment},
            cwd=launch.tree,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a relay and everything below it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            continue
