"""Addresses of replicas as Envoy knows them: none that the name of a replica must not stand for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gorgo.picker.state import Endpoints


async def test_a_name_that_stands_for_a_refused_address_has_none_for_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["169.254.169.254", "10.0.0.5"]

    async def resolve(_: str, port: int, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in answers]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    urls, check = {"a": "http://engine.example:8000"}, {"169.254.169.254": "it is link-local"}.get
    endpoints = Endpoints(urls, {"a": check})
    await endpoints.resolve()
    assert endpoints.address("a") == "10.0.0.5:8000"
    answers[:] = ["169.254.169.254"]
    await endpoints.resolve()
    assert endpoints.address("a") == "10.0.0.5:8000"  # as without an answer
    # Another configuration allows less.
    endpoints.configure(urls, {"a": {"10.0.0.5": "it is link-local"}.get})
    assert endpoints.address("a") is None
