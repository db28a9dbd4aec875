"""GORGO: a router for LLM replicas in several regions."""

__version__ = "0.1.0"
