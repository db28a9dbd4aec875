"""The model of a vLLM-like engine: scheduler, running requests, blocks."""
