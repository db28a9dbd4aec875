"""Monitor: probes and scrapes of every replica."""
