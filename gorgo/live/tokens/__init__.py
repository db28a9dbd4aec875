"""Exact tokens of prompts: tokenizers, chat templates, and the hashes of token blocks."""
