"""Prompt: from a request body to its text, fingerprint and token estimate."""
