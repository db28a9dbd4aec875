"""packaging/healthcheck.py as a container engine runs it: by its exit code."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.packaging.conftest import ROOT


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
