"""packaging/healthcheck.py as a container engine runs it: by its exit code."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.packaging.conftest import ROOT
from tests.proxy.authority import Authority, needs_openssl


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test's output is its own."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def checked(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "packaging/healthcheck.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_who_answers_well_is_healthy(url: str) -> None:
    done = checked(f"{url}/ready")
    assert (done.returncode, done.stderr) == (0, "")


def test_who_answers_badly_is_not_and_says_why(url: str) -> None:
    done = checked(f"{url}/stopping")
    assert done.returncode == 1
    assert "503" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_does_not_answer_is_not(url: str) -> None:
    done = checked("http://127.0.0.1:1/ready")
    assert done.returncode == 1
    assert "refused" in done.stderr


@pytest.mark.parametrize("words", [[], ["file:///etc/passwd"], ["http://a", "http://b"]])
def test_anything_else_than_an_address_is_refused(words: list[str]) -> None:
    done = checked(*words)
    assert done.returncode == 1
    assert "usage" in done.stderr


# -- gRPC


@pytest.fixture(scope="module", params=["grpc", pytest.param("grpcs", marks=needs_openssl)])
def picker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gRPC server with the health service: one name serves, one does not."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    servicer.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if request.param == "grpc":
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        chain, key = (Path(path).read_bytes() for path in Authority(tmp_path_factory.mktemp("tls")).pair("picker"))
        credentials = grpc.ssl_server_credentials([(key, chain)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"{request.param}://127.0.0.1:{port}"
    server.stop(None).wait()


def test_picker_that_serves_is_healthy(picker: str) -> None:
    done = checked(f"{picker}/liveness")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("service", ["readiness", "no-such"])
def test_picker_that_does_not_serve_is_not_and_says_so(picker: str, service: str) -> None:
    done = checked(f"{picker}/{service}")
    assert (done.returncode, done.stderr) == (1, f"{picker}/{service}: not serving, or no such service\n")


def test_listener_of_http_1_is_no_picker(url: str) -> None:
    done = checked(url.replace("http:", "grpc:") + "/liveness")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_picker_that_is_not_there_is_not_healthy() -> None:
    assert "refused" in checked("grpc://127.0.0.1:1/liveness").stderr
