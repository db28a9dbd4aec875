"""Which numbers a campaign takes."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.errors import TunerError
from tuner.campaign.options import CampaignOptions

EVERY_NUMBER = [
    "window",
    "hop",
    "warm_up_s",
    "block_s",
    "discard_s",
    "rest_blocks",
    "pairs",
    "harm_pairs",
    "futility_pairs",
    "alpha",
    "min_block_samples",
    "max_voids",
    "margin",
    "e2e_margin",
    "max_share",
    "hard_e2e_factor",
    "hard_e2e_s",
    "hard_errors",
    "saturated_ttft_ms",
    "saturated_share",
    "patience_s",
    "max_generations",
    "budget_s",
]


@pytest.mark.parametrize("name", EVERY_NUMBER)
def test_no_number_may_be_negative_endless_or_none_and_few_may_be_nothing(name: str) -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(TunerError, match=f"^{name} is"):
            CampaignOptions(**{name: value})  # type: ignore[arg-type]
    nothing: dict[str, Any] = {name: 0}
    if name in ("warm_up_s", "discard_s", "rest_blocks", "margin", "e2e_margin"):
        CampaignOptions(**nothing)
    else:
        with pytest.raises(TunerError, match=rf"^{name} is 0; expected a (finite number|share) above 0"):
            CampaignOptions(**nothing)


@pytest.mark.parametrize("name", ["alpha", "max_share", "hard_errors", "saturated_share"])
def test_a_share_is_at_most_all(name: str) -> None:
    CampaignOptions(**{name: 1.0})  # type: ignore[arg-type]
    with pytest.raises(TunerError, match=f"{name} is 1.01; expected a share above 0, at most 1"):
        CampaignOptions(**{name: 1.01})  # type: ignore[arg-type]


def test_what_is_discarded_is_less_than_a_block_and_a_hop_at_most_a_window() -> None:
    CampaignOptions(block_s=20.0, discard_s=19.9)
    with pytest.raises(TunerError, match="discard_s is 20 of blocks of 20 s; expected less"):
        CampaignOptions(block_s=20.0, discard_s=20.0)
    CampaignOptions(window=8, hop=8)
    with pytest.raises(TunerError, match="hop is 9 of a window of 8; expected no more"):
        CampaignOptions(window=8, hop=9)


@pytest.mark.parametrize(
    ("mode", "guard", "guarded"),
    [
        ("switchback", True, True),
        ("paper", True, False),
        ("switchback", False, False),
    ],
)
def test_the_guard_belongs_to_the_switchback_alone(mode: str, guard: bool, guarded: bool) -> None:
    assert CampaignOptions(mode=mode, guard=guard).guarded == guarded  # type: ignore[arg-type]


def test_the_default_mode_probes_and_the_published_one_does_not() -> None:
    assert (CampaignOptions().algorithm, CampaignOptions(mode="paper").algorithm) == ("es-probes", "es")
