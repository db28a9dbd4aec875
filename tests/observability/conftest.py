"""A proxy with or without a collector."""

from tests.proxy.conftest import start

__all__ = ["start"]
