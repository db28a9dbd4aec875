"""Upstream: HTTP calls to replicas and the state of their connections."""
