"""Latency: models of TCP round trips, prefill, batch concurrency and TTFT."""
