"""Sections of `regions.yaml` with a module of their own."""
