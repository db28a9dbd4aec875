"""regions.yaml text to frozen dataclasses."""
