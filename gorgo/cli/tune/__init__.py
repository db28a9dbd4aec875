"""`gorgo tune` and `gorgo history`."""
