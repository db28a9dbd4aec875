"""Policies side by side in virtual time."""
