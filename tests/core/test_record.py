"""Values that are made for each request."""

from __future__ import annotations

import pickle
from dataclasses import asdict, field, replace
from typing import Any

import pytest

from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.record import record


@record
class Pair:
    left: int
    right: list[int] = field(default_factory=list)


def test_a_record_is_a_dataclass_with_slots() -> None:
    assert Pair(1) == Pair(1, [])
    assert asdict(replace(Pair(1), left=2)) == {"left": 2, "right": []}
    assert not hasattr(Pair(1), "__dict__")


def test_a_field_without_a_hash_is_compared_all_the_same() -> None:
    @record
    class Labelled:
        name: str
        labels: dict[str, str] = field(default_factory=dict, hash=False)

    assert hash(Labelled("a")) == hash(Labelled("a", {"b": "c"}))
    assert Labelled("a") != Labelled("a", {"b": "c"})
    assert repr(Labelled("a")) == "Labelled(name='a', labels={})"


@pytest.mark.parametrize("hidden", [{"repr": False}, {"compare": False}])
def test_what_a_struct_cannot_leave_out_is_refused(hidden: dict[str, Any]) -> None:
    class Hiding:
        name: str = field(default="", **hidden)

    with pytest.raises(TypeError, match="field 'name' of a record: expected one that is compared and shown"):
        record(Hiding)


def test_equal_records_have_one_hash() -> None:
    assert hash(Outcome(AttemptResult.BUSY, status=503)) == hash(Outcome(AttemptResult.BUSY, status=503))


def test_a_record_reaches_another_process() -> None:
    outcome = Outcome(AttemptResult.COMPLETED, status=200, cached_tokens=7)
    assert pickle.loads(pickle.dumps(outcome)) == outcome


def test_type_checkers_take_a_record_for_frozen() -> None:
    declared = record.__dataclass_transform__  # type: ignore[attr-defined]
    assert {**declared, **declared["kwargs"]}["frozen_default"]  # Python 3.11 has it among the others
