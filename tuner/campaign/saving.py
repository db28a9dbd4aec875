"""A campaign's state as JSON, and back.

Owns the format and its version. What is left out on purpose: windows, blocks under way, versions of weights, orders
that were not answered. A process that loads a state puts its arm again, under a new version, so that nothing that was
routed before can be counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, get_args

from gorgo.errors import GorgoError, TunerError
from tuner.objective import SampleCursor, WindowStats
from tuner.optimizers.base import generator_of, generator_state
from tuner.optimizers.registry import load_optimizer
from tuner.space import LogBox

if TYPE_CHECKING:
    from tuner.campaign.machine import Campaign
    from tuner.campaign.options import CampaignOptions

Phase = Literal["new", "warming", "comparing", "frozen", "stopped"]

FORMAT = 1


def dump(campaign: Campaign) -> dict[str, Any]:
    ledger = campaign.ledger
    return {
        "format": FORMAT,
        "mode": campaign.options.mode,
        "phase": campaign.phase,
        "stop_reason": campaign.stop_reason,
        "start": dict(campaign.start),
        "incumbent": dict(campaign.incumbent),
        "audited": campaign.audited,
        "saturated_since": campaign.saturated_since,
        "number": ledger.number,
        "anchor": ledger.anchor,
        "reference": None if ledger.reference is None else asdict(ledger.reference),
        "started_s": ledger.started_s,
        "opened_s": ledger.opened_s,
        "cursor": [campaign.cursor.boot_id, campaign.cursor.last_seq],
        "rng": generator_state(campaign.rng),
        "optimizer": campaign.optimizer.state(),
        "trial": None if campaign.trial is None else campaign.trial.state(),
    }


def load(kind: type[Campaign], box: LogBox, options: CampaignOptions, state: Mapping[str, Any]) -> Campaign:
    """Raises `TunerError` for another format, another mode, or a state that is damaged."""
    if state.get("format") != FORMAT or state.get("mode") != options.mode:
        found = f"format {state.get('format')!r}, mode {state.get('mode')!r}"
        raise TunerError(f"saved campaign has {found}; expected format {FORMAT}, mode {options.mode!r}")
    try:
        return _load(kind, box, options, state)
    except GorgoError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TunerError(f"saved campaign is damaged: {error!r}") from error


def _load(kind: type[Campaign], box: LogBox, options: CampaignOptions, state: Mapping[str, Any]) -> Campaign:
    start = {str(name): float(value) for name, value in state["start"].items()}
    start |= {spec.name: start[spec.name] for spec in box.specs}  # all of them are there
    optimizer = load_optimizer(box, state["optimizer"])
    campaign = kind(box, optimizer, options, start=start, rng=generator_of(state["rng"]))
    if state["phase"] not in get_args(Phase):
        raise TunerError(f"saved campaign is in phase {state['phase']!r}; expected one of {', '.join(get_args(Phase))}")
    campaign.phase, campaign.stop_reason = state["phase"], state["stop_reason"]
    campaign.incumbent = {spec.name: float(state["incumbent"][spec.name]) for spec in box.specs}
    campaign.audited, campaign.saturated_since = bool(state["audited"]), state["saturated_since"]
    campaign.cursor = SampleCursor(state["cursor"][0], int(state["cursor"][1]))
    ledger, reference = campaign.ledger, state["reference"]
    ledger.number, ledger.anchor = int(state["number"]), state["anchor"]
    ledger.reference = None if reference is None else WindowStats(**reference)
    ledger.started_s, ledger.opened_s = state["started_s"], state["opened_s"]
    if state["trial"] is not None:
        campaign.trial = campaign.make_trial()
        campaign.trial.load(state["trial"])
    return campaign
