from __future__ import annotations

from gorgo.live.stored_responses import StoredResponses


def head(number: int) -> bytes:
    return b'{"object":"response", "id" : "resp_%d"}' % number


def test_the_least_recently_used_is_forgotten_first() -> None:
    homes = StoredResponses(limit=2)
    homes.record(head(1), "a", client=None)
    homes.record(head(2), "b", client=None)
    assert homes.find("resp_1", client=None) == "a"
    homes.record(head(3), "c", client=None)
    assert (
        homes.find("resp_1", client=None),
        homes.find("resp_2", client=None),
        homes.find("resp_3", client=None),
    ) == ("a", None, "c")
    assert len(homes) == 2


def test_only_the_id_of_a_response_counts() -> None:
    homes = StoredResponses()
    homes.record(b'{"id":"msg_1"} {"id":"resp_' + b"x" * 200 + b'"}', "a", client=None)
    assert len(homes) == 0
