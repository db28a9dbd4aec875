"""Settings of the Router from regions.yaml; the memory of a machine or a container, from the files of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorgo.config.load import parse_config
from gorgo.config.model import LimitsConfig
from gorgo.config.router_settings import max_buffered_bytes, memory_bytes, router_limits

GIB = 2**30


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc__meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\n"}


def test_bounds_of_routes_are_those_of_multi_depth() -> None:
    text = b"""
    proxy: {region: a, policy: multi-depth, multi_depth: {max_routes: 500, ttl_s: 60}}
    regions: [{name: a}]
    replicas: [{name: r, region: a, url: "http://127.0.0.1:1"}]
    """
    limits = router_limits(parse_config(text))
    assert (limits.max_routes, limits.route_ttl_s) == (500, 60.0)
    usual = router_limits(parse_config(text.replace(b", multi_depth: {max_routes: 500, ttl_s: 60}", b"")))
    assert (usual.max_routes, usual.route_ttl_s) == (100_000, 3600.0)


def test_machine_without_groups_has_its_own_memory(tmp_path: Path) -> None:
    assert memory_bytes(tree(tmp_path, **MACHINE)) == 8 * GIB


def test_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        "proc__self__cgroup": "0::/pod/app\n",
        "sys__fs__cgroup__pod__app__memory.max": "max\n",
        "sys__fs__cgroup__pod__memory.max": f"{2 * GIB}\n",
    }
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == 2 * GIB


def test_container_of_version_2_sees_its_own_group_as_the_outermost(tmp_path: Path) -> None:
    files = {"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": f"{GIB}\n"}
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == GIB


@pytest.mark.parametrize("folder", ["sys__fs__cgroup__memory__docker__x__", "sys__fs__cgroup__memory__"])
def test_group_of_version_1_counts_and_no_limit_is_none(tmp_path: Path, folder: str) -> None:
    files = {"proc__self__cgroup": "9:cpu:/other\n4:memory:/docker/x\n", f"{folder}memory.limit_in_bytes": f"{GIB}\n"}
    assert memory_bytes(tree(tmp_path, **MACHINE, **files)) == GIB
    unlimited = {f"{folder}memory.limit_in_bytes": "9223372036854771712\n"}
    assert memory_bytes(tree(tmp_path, **unlimited)) == 8 * GIB


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) is None


def test_default_is_a_quarter_and_the_file_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorgo.config.router_settings.memory_bytes", lambda: GIB)
    assert max_buffered_bytes(LimitsConfig()) == GIB // 4
    assert max_buffered_bytes(LimitsConfig(max_buffered_bytes=7)) == 7
    monkeypatch.setattr("gorgo.config.router_settings.memory_bytes", lambda: None)
    assert max_buffered_bytes(LimitsConfig()) == GIB // 2
