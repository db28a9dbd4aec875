"""`gorgo tune --every-address`: the proxies behind one name, and the end of a tuner whose proxies have changed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import typer

from gorgo.cli.tune import tune
from gorgo.cli.tune.tune import Changes, addresses_of

NAMES = {"pods": ["10.0.0.2", "10.0.0.1", "fd00::1"], "one": ["10.0.0.9"]}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name server of the test's."""
    known = {name: list(addresses) for name, addresses in NAMES.items()}

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        if host not in known:
            raise socket.gaierror("unknown name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host] for _ in "ab"]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_a_name_is_all_of_its_addresses_once_and_in_a_stable_order(names: dict[str, list[str]]) -> None:
    expected = ["http://10.0.0.1:9090", "http://10.0.0.2:9090", "http://[fd00::1]:9090", "http://10.0.0.9:80"]
    assert addresses_of(["http://pods:9090", "http://one", "http://one:80"]) == expected
    with pytest.raises(typer.BadParameter, match=r"--url http://none:1: expected a name with addresses: unknown name"):
        addresses_of(["http://none:1"])


async def test_other_addresses_end_the_tuner_and_a_name_server_that_is_down_does_not(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "RESOLVE_S", 0.0)
    urls, stop = ["http://pods:9090"], asyncio.Event()
    pods = names.pop("pods")
    before = [f"http://{'[' + each + ']' if ':' in each else each}:9090" for each in pods]
    async with Changes(urls, before, stop) as changes:
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
        assert not stop.is_set()
        names["pods"] = pods[::-1]
        for _ in range(5):
            await asyncio.to_thread(lambda: None)
        assert not stop.is_set(), "another order of the same"
        names["pods"] = pods[1:]
        await asyncio.wait_for(stop.wait(), 5)
        assert changes.found
