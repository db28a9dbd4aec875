"""Prefix index: the estimate of which replica has which KV blocks."""
