"""Tuning in virtual time: the live campaign on a simulated fleet, and the search of a recorded window."""

from tuner.offline.calibration import calibrated
from tuner.offline.search import SearchOptions, SearchResult, search_weights
from tuner.offline.simulated_campaign import CampaignDriver, CampaignRun, simulate_campaign
from tuner.offline.verdict import SearchVerdict, decide, weights_file

__all__ = [
    "CampaignDriver",
    "CampaignRun",
    "SearchOptions",
    "SearchResult",
    "SearchVerdict",
    "calibrated",
    "decide",
    "search_weights",
    "simulate_campaign",
    "weights_file",
]
