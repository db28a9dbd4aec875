"""Fixtures of the proxy's tests: what routes is tested below the HTTP front end that is there."""

from tests.proxy.conftest import pytest_asyncio_loop_factories, start, wrong_tokens_are_answered_at_once

__all__ = ["pytest_asyncio_loop_factories", "start", "wrong_tokens_are_answered_at_once"]
