"""`gorgo tune`, `gorgo tune-offline` and `gorgo history`."""
