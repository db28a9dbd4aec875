"""Reload: follow `regions.yaml` and apply its changes while requests run."""
