"""What may be a row: every kind of field, and both sides of every boundary."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tests.tuner.history.examples import generation
from tuner.campaign.generation import Generation
from tuner.history import CampaignRow, EventRow
from tuner.history.rows import row_of, weights_in

CAMPAIGN = {
    "id": 1,
    "started_s": 5.0,
    "finished_s": None,
    "outcome": None,
    "target": "t",
    "policy": "gorgo",
    "options": {"alpha": 0.05},
}
EVENT = {"at_s": 5.0, "kind": "freeze", "weights": None, "reason": "r"}
GENERATION = asdict(generation())
#: The last second of the year 9999.
LAST_S = 253_402_300_799.0


@pytest.mark.parametrize(
    ("kind", "values", "change"),
    [
        (CampaignRow, CAMPAIGN, {"started_s": 0.0}),
        (CampaignRow, CAMPAIGN, {"started_s": 0}),
        (CampaignRow, CAMPAIGN, {"started_s": LAST_S, "finished_s": LAST_S}),
        (CampaignRow, CAMPAIGN, {"outcome": "converged", "finished_s": 0.0}),
        (CampaignRow, CAMPAIGN, {"options": {}}),
        (EventRow, EVENT, {"at_s": LAST_S, "weights": {}}),
        (EventRow, EVENT, {"at_s": 0.0, "weights": {"w_rtt": 1}}),
        (Generation, GENERATION, {"started_s": 0.0, "finished_s": LAST_S}),
        (Generation, GENERATION, {"accepted": False, "objective_ms": None, "weights_version": None}),
    ],
)
def test_what_a_field_can_have_is_a_row(kind: type[Any], values: dict[str, Any], change: dict[str, Any]) -> None:
    assert asdict(row_of(kind, values | change)) == values | change


@pytest.mark.parametrize(
    ("kind", "values", "name", "value"),
    [
        (CampaignRow, CAMPAIGN, "id", True),
        (CampaignRow, CAMPAIGN, "id", 1.0),
        (CampaignRow, CAMPAIGN, "id", None),
        (CampaignRow, CAMPAIGN, "started_s", -0.001),
        (CampaignRow, CAMPAIGN, "started_s", LAST_S + 1.0),
        (CampaignRow, CAMPAIGN, "started_s", None),
        (CampaignRow, CAMPAIGN, "started_s", True),
        (CampaignRow, CAMPAIGN, "finished_s", -1.0),
        (CampaignRow, CAMPAIGN, "finished_s", LAST_S + 1.0),
        (CampaignRow, CAMPAIGN, "target", None),
        (CampaignRow, CAMPAIGN, "policy", 7),
        (CampaignRow, CAMPAIGN, "outcome", 7),
        (CampaignRow, CAMPAIGN, "options", None),
        (CampaignRow, CAMPAIGN, "options", []),
        (CampaignRow, CAMPAIGN, "options", {"alpha": float("nan")}),
        (EventRow, EVENT, "at_s", -1.0),
        (EventRow, EVENT, "at_s", LAST_S + 1.0),
        (EventRow, EVENT, "kind", None),
        (EventRow, EVENT, "weights", {"w\n": 1.0}),
        (EventRow, EVENT, "weights", {"w": "1"}),
        (Generation, GENERATION, "finished_s", LAST_S + 1.0),
        (Generation, GENERATION, "accepted", 1),
        (Generation, GENERATION, "n", False),
        (Generation, GENERATION, "weights", None),
        (Generation, GENERATION, "objective_ms", "1"),
    ],
)
def test_what_a_field_cannot_have_is_refused_by_its_name(
    kind: type[Any], values: dict[str, Any], name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=name if name != "options" else "options|JSON"):
        row_of(kind, values | {name: value})


def test_weights_are_numbers_by_printable_names() -> None:
    assert weights_in({"a": 1, "b": 0.5}) == {"a": 1, "b": 0.5}
    refused: tuple[object, ...] = (None, [], {"a": None}, {"a": True}, {"\ud800": 1.0})
    for wrong in refused:
        with pytest.raises(ValueError, match="expected numbers by name"):
            weights_in(wrong)


@pytest.mark.parametrize(("length", "shown"), [(58, "'" + "x" * 58 + "'"), (59, "'" + "x" * 56 + "...")])
def test_a_long_value_is_cut_after_sixty_characters(length: int, shown: str) -> None:
    with pytest.raises(ValueError, match="weights are") as caught:
        weights_in("x" * length)
    assert str(caught.value) == f"weights are {shown}; expected numbers by name"
