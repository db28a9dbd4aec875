"""Traces: reading, filtering, and the text of their prompts."""

from gorgo.lab.traces.filters import TraceFilters, next_turns, parse_offset, parse_window, scheduled_s
from gorgo.lab.traces.load import load_trace, read_requests
from gorgo.lab.traces.rows import BLOCK_TOKENS, TraceRequest
from gorgo.lab.traces.text import prompt_text, request_text

__all__ = [
    "BLOCK_TOKENS",
    "TraceFilters",
    "TraceRequest",
    "load_trace",
    "next_turns",
    "parse_offset",
    "parse_window",
    "prompt_text",
    "read_requests",
    "request_text",
    "scheduled_s",
]
