"""The OpenAPI documents as JSON, read from YAML at the first request.

Tests compare them with the routes. Reading one takes milliseconds with PyYAML's C part and a third of a second without,
so callers read it in a thread.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from gorgo import __version__


@cache
def client_document() -> bytes:
    """Return the document of the data listener."""
    return _served("client.yaml")


@cache
def admin_document() -> bytes:
    """Return the document of the admin listener."""
    return _served("admin.yaml")


def _served(name: str) -> bytes:
    text = files("gorgo.live.openapi").joinpath(name).read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    document["info"]["version"] = __version__
    return json.dumps(document).encode()
