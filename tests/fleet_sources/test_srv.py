"""SRV records without a socket: messages of any bytes, resolv.conf, names."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorgo.fleet_sources.dns import HostPort
from gorgo.fleet_sources.srv import (
    ResolverFile,
    SrvError,
    names_to_try,
    read_resolver_file,
    read_srv_answer,
    srv_question,
)
from tests.live.fleet_sources.dns_server import NameServer, srv

NAME = "_http._tcp.engines"


def answer() -> bytes:
    server = NameServer({NAME: [srv("a.engines", 30000), srv("b.engines", 31000)]})
    return server.answer(srv_question(NAME, 7), "tcp")


def test_question_is_one_that_a_server_reads() -> None:
    found = read_srv_answer(answer(), NAME.upper(), 7)
    assert found is not None
    assert found.targets == (HostPort("a.engines", 30000), HostPort("b.engines", 31000))


@pytest.mark.parametrize("number", [6, 8])
def test_answer_to_another_number_is_none(number: int) -> None:
    assert read_srv_answer(answer(), NAME, number) is None


def test_answer_to_another_name_is_none() -> None:
    assert read_srv_answer(answer(), "_http._tcp.others", 7) is None


def test_name_that_points_at_itself_ends() -> None:
    message = srv_question(NAME, 7)
    loop = message[:2] + b"\x81\x80\0\x01\0\x01\0\0\0\0" + b"\xc0\x0c" + b"\0\x21\0\x01"
    with pytest.raises(SrvError):
        read_srv_answer(loop, NAME, 7)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_no_bytes_break_the_reader(noise: bytes, at: int) -> None:
    whole = answer()
    for message in (noise, whole[:at], whole[:at] + noise + whole[at:], whole[:12] + noise):
        with suppress(SrvError):
            read_srv_answer(message, NAME, 7)


@pytest.mark.parametrize("name", ["", "a..b", "a b", "ä.b", "a" * 64, ".".join("a" * 60 for _ in range(5)), "-a"])
def test_what_is_no_name_is_not_sent(name: str) -> None:
    with pytest.raises(SrvError, match="is no name"):
        srv_question(name, 1)


def test_resolver_file_is_read_as_resolvers_do() -> None:
    text = """# comment
nameserver 10.0.0.1 # first
nameserver nonsense
nameserver fe80::1%eth0
nameserver 10.0.0.3
nameserver 10.0.0.4
domain old.example
search llm.svc.cluster.local svc.cluster.local
options timeout:1 ndots:99 rotate
"""
    assert read_resolver_file(text) == ResolverFile(
        ("10.0.0.1", "fe80::1%eth0", "10.0.0.3"), ("llm.svc.cluster.local", "svc.cluster.local"), 15
    )
    assert read_resolver_file("nonsense\n\noptions ndots:x\n") == ResolverFile()


@pytest.mark.parametrize(
    ("name", "ndots", "expected"),
    [
        ("_h._tcp.x.", 5, ["_h._tcp.x"]),
        ("_h._tcp.x", 5, ["_h._tcp.x.a.b", "_h._tcp.x"]),
        ("_h._tcp.x", 1, ["_h._tcp.x", "_h._tcp.x.a.b"]),
    ],
)
def test_names_are_tried_in_the_order_of_resolvers(name: str, ndots: int, expected: list[str]) -> None:
    assert names_to_try(name, ResolverFile(domains=("a.b.",), ndots=ndots)) == expected
