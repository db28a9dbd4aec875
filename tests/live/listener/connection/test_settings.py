"""hypercorn's configuration as connections use it; a failure here after an upgrade says what moved."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypercorn.config import Config

import gorgo
from gorgo.live.listener.connection import client_connection
from gorgo.live.listener.connection.client_connection import ServerSettings
from gorgo.live.listener.heads import PartialHeads
from tests.sources import syntax_tree


def imported(path: Path) -> set[str]:
    """The modules of hypercorn that a file imports."""
    found: set[str] = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("hypercorn", "h11", "h2")}


def test_hypercorn_is_used_in_its_seam_and_elsewhere_its_configuration_alone() -> None:
    root = Path(gorgo.__file__).parent
    files = {path.relative_to(root).as_posix(): imported(path) for path in root.rglob("*.py")}
    assert {name: found for name, found in files.items() if found} == {
        "live/listener/connection/client_connection.py": {"hypercorn.config"},
        "live/listener/hypercorn_server.py": {"hypercorn.asyncio", "hypercorn.config"},
    }


def test_timeouts_and_bounds_are_those_of_the_configuration() -> None:
    config = Config()
    config.keep_alive_timeout, config.keep_alive_max_requests, config.root_path = 7, 9, "/p"
    made = ServerSettings(None, config, PartialHeads())
    assert (made.keep_alive_s, made.requests_per_connection, made.root_path) == (7.0, 9, "/p")
    assert (config.backlog, config.graceful_timeout) == (100, 3.0)


def test_own_headers_are_made_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000.25]
    monkeypatch.setattr(client_connection, "time", lambda: now[0])
    config = Config()
    made = ServerSettings(None, config, PartialHeads())
    first = made.own_headers()
    assert first.startswith(b"date: ")
    assert first.endswith(b" GMT\r\nserver: hypercorn-h11\r\n")
    config.include_date_header = False
    now[0] += 0.5
    assert made.own_headers() is first
    now[0] += 0.5
    assert made.own_headers() == b"server: hypercorn-h11\r\n"


async def test_failures_are_logged_by_the_configured_log(caplog: pytest.LogCaptureFixture) -> None:
    await ServerSettings(None, Config(), PartialHeads()).log.exception("a fault")
