"""A campaign to its saved state and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.campaign.machine import Campaign
from tuner.campaign.options import CampaignOptions
from tuner.campaign.state import CampaignState, damage_as_error
from tuner.objective import SampleCursor
from tuner.optimizers.base import generator_of, generator_state
from tuner.optimizers.registry import load_optimizer
from tuner.space import LogBox


def campaign_state(campaign: Campaign) -> dict[str, Any]:
    """Return all that a restarted process needs, as JSON."""
    ledger = campaign.ledger
    return CampaignState(
        mode=campaign.options.mode,
        phase=campaign.phase,
        stop_reason=campaign.stop_reason,
        start=campaign.start,
        incumbent=campaign.incumbent,
        audited=campaign.audited,
        saturated_since=campaign.saturated_since,
        number=ledger.number,
        anchor=ledger.anchor,
        e2e_lost=ledger.e2e_lost,
        reference=ledger.reference,
        started_s=ledger.started_s,
        opened_s=ledger.opened_s,
        cursor=(campaign.cursor.boot_id, campaign.cursor.last_seq),
        rng=generator_state(campaign.rng),
        optimizer=campaign.optimizer.state(),
        trial=None if campaign.trial is None else campaign.trial.state(),
    ).as_json()


def load_campaign(box: LogBox, options: CampaignOptions, state: Mapping[str, Any]) -> Campaign:
    """Return the campaign of a `campaign_state`; `on_start` comes next. Raises `TunerError` for a damaged state."""
    with damage_as_error():
        saved = CampaignState.from_json(state, mode=options.mode)
        start = {**saved.start, **{spec.name: saved.start[spec.name] for spec in box.specs}}
        campaign = Campaign(
            box, load_optimizer(box, saved.optimizer), options, start=start, rng=generator_of(saved.rng)
        )
        _restore(campaign, saved)
    return campaign


def _restore(campaign: Campaign, saved: CampaignState) -> None:
    campaign.phase, campaign.stop_reason = saved.phase, saved.stop_reason
    campaign.incumbent = {spec.name: saved.incumbent[spec.name] for spec in campaign.box.specs}
    campaign.box.to_log(campaign.incumbent)  # raises `WeightsError` outside the box
    campaign.audited, campaign.saturated_since = saved.audited, saved.saturated_since
    campaign.cursor = SampleCursor(*saved.cursor)
    ledger = campaign.ledger
    ledger.number, ledger.anchor, ledger.reference = saved.number, saved.anchor, saved.reference
    ledger.e2e_lost = saved.e2e_lost
    ledger.started_s, ledger.opened_s = saved.started_s, saved.opened_s
    if saved.trial is not None:
        campaign.trial = campaign.make_trial()
        campaign.trial.load(saved.trial)
