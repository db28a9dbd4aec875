"""packaging/locked.py: which lines of a lock file some requirements need."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.packaging.conftest import ROOT

LOCKED = runpy.run_path(str(ROOT / "packaging/locked.py"))
LOCK = """\
alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:ab
    # via
    #   beta
Beta_Two==2.0 ; sys_platform == 'linux' \\
    --hash=sha256:ba
    # via gorgo-router (pyproject.toml)
"""


def planned(*names: str, direct: bool = False) -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}, "is_direct": direct} for name in names]


def test_what_pip_would_install_is_copied_with_its_hashes() -> None:
    assert LOCKED["picked"](LOCK, planned("alpha")) == (
        "alpha==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab\n"
    )


def test_names_are_the_same_however_they_are_spelt() -> None:
    assert LOCKED["picked"](LOCK, planned("beta-two")).startswith("Beta_Two==2.0 ; sys_platform == 'linux' \\\n")


def test_a_file_that_was_named_is_in_no_lock() -> None:
    assert LOCKED["picked"](LOCK, planned("gorgo-router", direct=True)) == ""


def test_what_the_lock_lacks_is_named() -> None:
    with pytest.raises(SystemExit, match=r"requirements\.lock lacks delta, gamma"):
        LOCKED["picked"](LOCK, planned("gamma", "alpha", "delta"))


def test_constraints_are_versions_without_hashes() -> None:
    assert LOCKED["constraints"](LOCK) == "alpha==1.0\nBeta_Two==2.0 ; sys_platform == 'linux'\n"


def test_every_package_of_the_lock_is_read() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert len(LOCKED["constraints"](lock).splitlines()) == sum("==" in line[:60] for line in lock.splitlines())


def test_every_installation_from_the_lock_resolves_nothing_so_that_a_new_release_elsewhere_breaks_none() -> None:
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "--require-hashes" in line]
    assert len(installs) == 3, "the environment, the one that tests the wheel, and the one of the documentation"
    assert all("--no-deps" in line for line in installs)
