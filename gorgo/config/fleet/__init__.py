"""The replicas of regions.yaml, and the sources of others."""
