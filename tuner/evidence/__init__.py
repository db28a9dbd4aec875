"""What the tuner is said to show, measured: `make tuning-table`."""
