"""The short form of the differential fuzz, and that it finds what it is for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from gorgo.live.listener.connection.reader import Head, RepeatedHead
from tests.attacks.differential import __main__, fuzz
from tests.attacks.differential import readers as client
from tests.attacks.differential import readers as reader
from tests.attacks.differential.fuzz import KINDS, DisagreementError
from tests.attacks.differential.readers import Reading, Request
from tests.proxy.test_fuzz import EXAMPLES

ITEMS = EXAMPLES * 60


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_seeded_bytes_have_one_reading(kind: str) -> None:
    found = fuzz.fuzz(kind, ITEMS, seed=18)
    assert found.items == ITEMS
    # Neither all nor nothing is refused, so both means read something.
    assert min(found.accepted, found.refused_by_both) > ITEMS // 10


def test_some_requests_repeat_a_head_that_the_proxy_recognises(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counter[bool]()
    again = RepeatedHead.again

    def counted(last: RepeatedHead, text: bytes) -> Head | None:
        head = again(last, text)
        found[head is not None] += 1
        return head

    monkeypatch.setattr(RepeatedHead, "again", counted)
    fuzz.fuzz("requests", 300, seed=18)
    assert min(found[True], found[False]) > 20


GET = Request(b"GET", b"/", [(b"host", b"g")])
POST = Request(b"POST", b"/", [(b"host", b"g")], b"ab")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Reading([GET]), Reading([], None, "refused")),
        (Reading([GET, GET]), Reading([GET])),
        (Reading([GET]), Reading([Request(b"GET", b"/a", GET.headers)])),
        (Reading([GET]), Reading([Request(b"GET", b"/", [(b"host", b"h")])])),
        (Reading([POST]), Reading([Request(b"POST", b"/", POST.headers, b"a")])),
        (Reading([], GET), Reading([], None, "refused")),
        (Reading([], POST), Reading([], Request(b"POST", b"/", POST.headers, b"a"))),
        (Reading([], POST), Reading([POST])),
        (Reading([], None), Reading([GET])),
    ],
)
def test_requests_with_two_readings_disagree(ours: Reading, theirs: Reading) -> None:
    assert reader.disagreement(ours, theirs) is not None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Reading([GET], None, "strict"), Reading([GET, GET])),
        (Reading([], None, "strict"), Reading([], None, "refused")),
        (Reading([], POST, "strict"), Reading([Request(b"POST", b"/", POST.headers, b"abc")])),
        (Reading([GET], POST), Reading([GET], POST)),
    ],
)
def test_the_proxy_may_refuse_more(ours: Reading, theirs: Reading) -> None:
    assert reader.disagreement(ours, theirs) is None


WHOLE = client.ReadingClient(200, [(b"a", b"b")], b"ab", complete=True, reusable=True)


@pytest.mark.parametrize(
    ("theirs", "agrees"),
    [
        (WHOLE, True),
        (client.ReadingClient(200, [(b"a", b"b")], b"ab", complete=True, reusable=False), False),
        (client.ReadingClient(200, [(b"a", b"b")], b"a", complete=True, reusable=True), False),
        (client.ReadingClient(201, [(b"a", b"b")], b"ab", complete=True, reusable=True), False),
        (client.ReadingClient(200, [(b"a", b"b")], b"ab", complete=False, refused="broken"), False),
    ],
)
def test_a_response_that_h11_reads_otherwise_disagrees(theirs: client.ReadingClient, agrees: bool) -> None:
    assert (client.disagreement_client(WHOLE, theirs) is None) is agrees
    assert client.disagreement_client(client.ReadingClient(refused="strict"), theirs) is None


def test_a_disagreement_is_reported_with_its_number_and_its_smallest_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lenient(pieces: Sequence[bytes]) -> Reading:
        return reader.read_h11([b"".join(pieces).replace(b"\x0b", b" ")])

    monkeypatch.setattr(reader, "read", lenient)
    with pytest.raises(DisagreementError, match=r"requests, item (\d+) of seed 18: ") as raised:
        fuzz.fuzz("requests", 20_000, seed=18)
    text = str(raised.value)
    number = text.split()[2]
    smallest = text.split("smallest: ")[1].split("\n")[0]
    assert "\\x0b" in smallest
    assert len(smallest) < 150
    assert __main__.main(["requests", "--first", number, "--count", "1"]) == 1
    assert smallest in capsys.readouterr().err


def test_the_long_form_goes_on_at_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for first, count in ((0, 30), (0, 10), (10, 20)):
        assert __main__.main(["responses", "--first", str(first), "--count", str(count)]) == 0
        found.append(json.loads(capsys.readouterr().out))
    whole, *parts = found
    assert whole["accepted"] == sum(part["accepted"] for part in parts)
    assert whole["items"] == sum(part["items"] for part in parts) == 30
