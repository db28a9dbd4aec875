"""Tuning in virtual time: the live campaign on a simulated fleet, and the search of a recorded window."""

from tuner.offline.composition import calibrated
from tuner.offline.search import SearchOptions, SearchResult, SearchVerdict, decide, search_weights, weights_file
from tuner.offline.simulated_campaign import CampaignDriver, CampaignRun, simulate_campaign

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
