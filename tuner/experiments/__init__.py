"""Experiments with the tuner, and the verdicts on what it is said to show: `make tuning-table`."""
