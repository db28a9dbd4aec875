"""Tuning in virtual time: the live campaign on a simulated fleet, and the twin that searches a recorded window."""

from tuner.offline.calibration import calibrated
from tuner.offline.driver import CampaignDriver
from tuner.offline.rehearsal import TunedRun, tune_in_simulation
from tuner.offline.twin import Search, TwinOptions, search_twin
from tuner.offline.verdict import TwinResult, decide, weights_file

__all__ = [
    "CampaignDriver",
    "Search",
    "TunedRun",
    "TwinOptions",
    "TwinResult",
    "calibrated",
    "decide",
    "search_twin",
    "tune_in_simulation",
    "weights_file",
]
