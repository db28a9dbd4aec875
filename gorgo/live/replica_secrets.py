"""What of the environment a replica and the proxy prove themselves with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.values import MIN_TOKEN_CHARS
from gorgo.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class ReplicaSecrets:
    """What a replica and the proxy prove themselves with. `repr` omits both, so that no log can show them."""

    #: Sent with each request.
    api_key: str | None = field(default=None, repr=False)
    #: Of the engine's pushes.
    push_token: str | None = field(default=None, repr=False)


def replica_secrets(replica: ReplicaConfig, environ: Mapping[str, str]) -> ReplicaSecrets:
    """Return what the environment has for the replica. Raises `ConfigError` if a variable is not set."""
    return ReplicaSecrets(api_key(replica, environ), push_token(replica, environ))


def api_key(replica: ReplicaConfig, environ: Mapping[str, str]) -> str | None:
    """Return the replica's own key. Raises `ConfigError` if its variable is not set."""
    return _secret(replica, replica.api_key_env, environ, "the replica's API key")


def push_token(replica: ReplicaConfig, environ: Mapping[str, str]) -> str | None:
    """Return the token of the engine's pushes. Raises `ConfigError` if its variable is not set, or can be guessed."""
    token = _secret(replica, replica.push_token_env, environ, "the token of the replica's pushes")
    if token is not None and len(token) < MIN_TOKEN_CHARS:
        found = f"the environment variable {replica.push_token_env} has {len(token)} characters"
        raise InvalidValueError(f"replica {replica.name!r}", found, f"at least {MIN_TOKEN_CHARS}")
    return token


def _secret(replica: ReplicaConfig, variable: str | None, environ: Mapping[str, str], content: str) -> str | None:
    if variable is None:
        return None
    secret = environ.get(variable, "").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        lacking = "is not set" if not secret else "holds what no header can"
        found = f"the environment variable {variable} {lacking}"
        raise InvalidValueError(f"replica {replica.name!r}", found, f"it to hold {content}")
    return secret
