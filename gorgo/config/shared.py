"""`shared` in regions.yaml: the store in which several routers of one fleet report to each other."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.config.values import EnvironmentName, FilePath, Name, StoreUrl, Text, strict


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """A Redis or Valkey server, and the group of routers that use it. A change needs a restart."""

    #: `rediss` for TLS. A password would be in logs and process lists, so it is not accepted here.
    url: StoreUrl
    #: Routers of one group have one fleet and one fingerprint key; prefix of all their keys in the store.
    group: Name
    #: Variable with the group's fingerprint key: hashes of prompts mean the same to all its routers.
    key_env: EnvironmentName
    #: The server's default user without one.
    username: Text | None = None
    #: Variable with the password.
    password_env: EnvironmentName | None = None
    #: The only trusted authorities (PEM), with `rediss`.
    ca_file: FilePath | None = None
    #: Name of this router in the group; default: that of the host.
    router: Name | None = None


def checked_shared(shared: SharedConfig | None) -> SharedConfig | None:
    """Return `shared` if its keys fit each other."""
    if shared is None:
        return None
    if shared.ca_file is not None and not shared.url.startswith("rediss:"):
        raise ValueError("a rediss:// url beside ca_file")
    if shared.username is not None and shared.password_env is None:
        raise ValueError("password_env beside username")
    return shared
