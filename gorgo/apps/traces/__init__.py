"""Traces: reading, filtering, and the text of their prompts."""

from gorgo.apps.traces.filters import TraceFilters, parse_offset, scheduled_s
from gorgo.apps.traces.load import load_trace, read_requests
from gorgo.apps.traces.rows import BLOCK_TOKENS, TraceRequest
from gorgo.apps.traces.text import prompt_text, request_text
from gorgo.apps.traces.window import parse_window

__all__ = [
    "BLOCK_TOKENS",
    "TraceFilters",
    "TraceRequest",
    "load_trace",
    "parse_offset",
    "parse_window",
    "prompt_text",
    "read_requests",
    "request_text",
    "scheduled_s",
]
