"""Kinds of model: how each is fitted to rows, and how it predicts a TTFT."""
