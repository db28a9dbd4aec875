"""Pushes of engines without KV events: their caches as own hashes, whole every few seconds and evicted in between."""
