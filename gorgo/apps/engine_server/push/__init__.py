"""Pushes of what a simulated engine caches, to the admin listener of a proxy."""
