"""The two descriptions as JSON: YAML in the package, read once, at the first request for it.

Owns their delivery. What they say is in `client.yaml` and `admin.yaml`, written by hand and held to the routes by
tests. Reading one takes milliseconds with PyYAML's C part and a third of a second without; so it is read in a thread,
and by nobody who does not ask.
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
    """Of the data listener."""
    return _served("client.yaml")


@cache
def admin_document() -> bytes:
    """Of the admin listener."""
    return _served("admin.yaml")


def _served(name: str) -> bytes:
    text = files("gorgo.proxy.openapi").joinpath(name).read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    document["info"]["version"] = __version__
    return json.dumps(document).encode()
