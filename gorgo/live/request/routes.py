"""Routes that carry a prompt."""

from __future__ import annotations

#: In the order of the documents.
INFERENCE_ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)
