"""Hostile input of every kind, and how long it delays everybody else."""
