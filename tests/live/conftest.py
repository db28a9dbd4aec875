"""Fixtures of the proxy's tests: what routes is tested below the HTTP front end that is there."""

from tests.proxy.conftest import start, wrong_tokens_are_answered_at_once

__all__ = ["start", "wrong_tokens_are_answered_at_once"]
