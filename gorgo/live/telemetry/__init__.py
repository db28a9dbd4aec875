"""Telemetry: metrics, traces and the request log."""
