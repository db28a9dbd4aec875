"""Old keys of regions.yaml: the error says what became of each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gorgo.config.document import Path
from gorgo.config.explain import RENAMED, keys_at
from gorgo.config.load import parse_config
from gorgo.errors import ConfigError

OLD = {
    "proxy.policies": "proxy.policy",
    "regions.limits.first_s": "regions.limits.first_token_timeout_s",
    "queueing": "overload",
    "queueing.wait_ms": "overload.queue_wait_ms",
    "limits.gap_s": "a constant now, since no other value helped",
    "replicas.url": "replicas.address",
}
FILE = b"""
proxy: {region: us, policies: random}
regions:
  - name: us
    limits: {first_s: 2}
queueing:
  wait_ms: 5
limits: {gap_s: 3, max_attempst: 2}
replicas:
  - {name: a, region: us, url: "http://a"}
"""


def test_each_old_key_is_named_with_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for old, new in OLD.items():
        monkeypatch.setitem(RENAMED, old, new)
    with pytest.raises(ConfigError) as refused:
        parse_config(FILE)
    header, *lines = str(refused.value).split("\n")
    assert header == "regions.yaml: 6 errors"
    assert lines[:5] == [
        "  proxy.policies (line 2): unknown key (renamed); expected proxy.policy",
        "  regions[0].limits.first_s (line 5): unknown key (renamed); expected regions.limits.first_token_timeout_s",
        "  queueing (line 6): unknown key (renamed); expected overload",
        "  queueing.wait_ms (line 7): unknown key (renamed); expected overload.queue_wait_ms",
        "  limits.gap_s (line 8): unknown key (removed: a constant now, since no other value helped); "
        "expected the file without it",
    ]
    assert lines[5].startswith("  limits.max_attempst (line 8): unknown key (did you mean 'max_attempts'?); expected")


@pytest.mark.parametrize("old", RENAMED)
def test_a_file_with_an_old_key_is_refused_with_its_new_name_or_value(old: str) -> None:
    document: dict[str, Any] = {
        "proxy": {"region": "us"},
        "regions": [{"name": "us"}],
        "replicas": [{"name": "a", "region": "us", "url": "http://a"}],
    }
    *sections, key = old.split(".")
    place: Any = document
    for section in sections:
        place = place.setdefault(section, {})
        place = place[0] if isinstance(place, list) else place
    place[key] = 1
    with pytest.raises(ConfigError) as refused:
        parse_config(json.dumps(document).encode())
    shown = old.replace("regions.", "regions[0].").replace("replicas.", "replicas[0].")
    new = RENAMED[old]
    expected = f"(removed: {new})" if " " in new else f"(renamed); expected {new}"
    assert str(refused.value).split("\n") == [
        "regions.yaml: 1 error",
        f"  {shown} (line 1): unknown key {expected}" + ("; expected the file without it" if " " in new else ""),
    ]


def test_the_table_has_keys_that_are_gone_and_new_ones_that_exist() -> None:
    for old, new in RENAMED.items():
        assert not exists(old), old
        assert " " in new or exists(new), new


def test_a_key_of_the_file_is_found_by_its_dotted_name() -> None:
    for key in (
        "proxy.policy",
        "regions.limits.first_token_timeout_s",
        "clients.rules.name",
        "replicas.capacity.kv_tokens",
    ):
        assert exists(key)
    for key in ("proxy.policies", "regions.max_attempts", "limits.max_attempts.more"):
        assert not exists(key)


def exists(dotted: str) -> bool:
    """Whether the file may have this key, in a mapping or in the entries of a list."""
    path: Path = ()
    for part in dotted.split("."):
        path = next(((*above, part) for above in (path, (*path, 0)) if part in keys_at(above)), ())
        if not path:
            return False
    return True
