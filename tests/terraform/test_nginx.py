"""nginx itself with the router's file: keys, routes, and answers that try to direct it."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

KEY = "client-0123456789abcdef"
#: Folders of the router's machine in nginx's file.
PLACES = ("/run/credentials/gorgo-tls.service", "/run/gorgo-tls", "/var/lib/gorgo-tls", "/etc/gorgo")


class Proxy(BaseHTTPRequestHandler):
    """Answers as a proxy whose engine tries to direct nginx."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Accel-Redirect", "/metrics")
        self.send_header("X-Accel-Limit-Rate", "50")
        self.send_header("X-Accel-Buffering", "yes")
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@dataclass(frozen=True, slots=True)
class Front:
    port: int
    authority: Path

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        context = ssl.create_default_context(cafile=str(self.authority))
        context.check_hostname = False
        connection = HTTPSConnection("127.0.0.1", self.port, context=context, timeout=10)
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def made(core: dict[str, Any], folder: Path, port: int, proxy: int) -> Path:
    """Write nginx's file with the machine's folders below `folder`, and what it includes."""
    written = yaml.safe_load(core["router"]["user_data"])["write_files"]
    (text,) = [one["content"] for one in written if one["path"] == "/etc/gorgo/nginx.conf"]
    text = text.replace("listen 443 ssl http2;", f"listen 127.0.0.1:{port} ssl http2;")
    text = text.replace("server 127.0.0.1:8080;", f"server 127.0.0.1:{proxy};")
    text = text.replace("worker_processes auto;", "worker_processes 1;")
    if os.geteuid() == 0:
        text = text.replace("daemon off;", "daemon off;\nuser root;")
    for place in PLACES:
        text = text.replace(place, f"{folder}{place}")
        (folder / place[1:]).mkdir(parents=True)
    secrets = folder / PLACES[0][1:]
    (secrets / "bearer.map").write_text(f'"~^(?i:Bearer) +{KEY}$" 1;\n')
    (secrets / "key.map").write_text(f'"~^{KEY}$" 1;\n')
    (folder / "etc/gorgo/metrics.nginx.conf").write_text(core["configuration"]["metrics.nginx.conf"])
    certified = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    certified += ["-keyout", str(secrets / "tls.key"), "-out", str(secrets / "tls.crt")]
    subprocess.run(certified, check=True, capture_output=True)
    (folder / "nginx.conf").write_text(text)
    return folder / "nginx.conf"


@pytest.fixture(scope="module")
def front(rendered: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """nginx before `Proxy`, on ports of their own."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None or shutil.which("openssl") is None:
        pytest.skip("NGINX CHECK SKIPPED: needs nginx and openssl")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    Thread(target=proxy.serve_forever, daemon=True).start()
    conf = made(rendered["core"], folder, port, proxy.server_port)
    command = [nginx, "-e", "stderr", "-c", str(conf)]
    checked = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with (folder / "said").open("wb") as said, subprocess.Popen(command, stderr=said) as process:
        try:
            deadline = time.monotonic() + 10
            while not listens(port):
                assert process.poll() is None, (folder / "said").read_text()
                assert time.monotonic() < deadline, (folder / "said").read_text()
            yield Front(port, folder / PLACES[0][1:] / "tls.crt")
        finally:
            process.terminate()
            process.wait(10)
            proxy.shutdown()
            proxy.server_close()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer {KEY}"}, {"x_api_key": KEY}],
    ids=["bearer", "scheme in lower case", "x-api-key"],
)
def test_a_client_s_key_opens(front: Front, headers: dict[str, str]) -> None:
    assert front.get("/v1/models", **headers) == (200, b"/v1/models")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"x_api_key": KEY.upper()},
        {"x_api_key": KEY[:-1]},
        {"x_api_key": KEY + "0"},
        {"x_api_key": f"Bearer {KEY}"},
        {"authorization": KEY},
        {"authorization": f"Bearer {KEY} x"},
        {"x_api_key": "~^.*$"},
    ],
)
def test_any_other_spelling_of_a_key_does_not(front: Front, headers: dict[str, str]) -> None:
    assert front.get("/v1/models", **headers)[0] == 401


def test_an_answer_does_not_direct_nginx(front: Front) -> None:
    assert front.get("/v1/" + "x" * 100, x_api_key=KEY) == (200, b"/v1/" + b"x" * 100)
    assert front.get("/health") == (200, b"/health")


@pytest.mark.parametrize(
    "path", ["/metrics", "//metrics", "/%6detrics", "/v1/../metrics", "/metrics?x=1", "/metrics/tuner"]
)
def test_metrics_are_for_their_networks_in_every_spelling(front: Front, path: str) -> None:
    assert front.get(path, x_api_key=KEY)[0] == 403
