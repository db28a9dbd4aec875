"""Tuning in virtual time: the live campaign on a simulated fleet, and the search of a recorded window."""
