"""`gorgo calibrate`: the constants of an engine, measured over HTTP or fitted to a request log."""

from gorgo.lab.calibrate.calibration import Calibration
from gorgo.lab.calibrate.run import CalibrateOptions, calibrate_engine, calibrate_log

__all__ = ["CalibrateOptions", "Calibration", "calibrate_engine", "calibrate_log"]
