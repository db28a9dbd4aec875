"""Linters and schemas of others on what cannot be run without a container engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tests.system.environments import Environment, InstallError, lint_environment

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def linters() -> Environment:
    """hadolint, and check-jsonschema with the compose specification's schema in it."""
    try:
        return lint_environment()
    except InstallError as error:
        pytest.skip(f"CONTAINER LINTERS SKIPPED: {error}")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say_about_the_containerfile(linters: Environment, tmp_path: Path) -> None:
    hadolint = linters.folder / "bin/hadolint"
    (tmp_path / "Bad").write_text("FROM python\nRUN cd /tmp\n")
    assert "DL3006" in run(hadolint, tmp_path / "Bad").stdout
    done = run(hadolint, "packaging/Containerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_compose_file_is_one_by_the_specification_s_schema(linters: Environment, tmp_path: Path) -> None:
    check = (linters.folder / "bin/check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    (tmp_path / "bad.yaml").write_text("services: {a: {image: b, red_only: true}}\n")
    assert run(*check, tmp_path / "bad.yaml").returncode == 1
    done = run(*check, "packaging/compose.yaml", "packaging/compose.two.yaml")
    assert done.returncode == 0, done.stdout


def test_prometheus_itself_accepts_its_file(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("PROMETHEUS CONFIGURATION CHECK SKIPPED: there is no promtool (Debian: apt-get install prometheus)")
    text = (ROOT / "packaging/prometheus.yml").read_text()
    rules = ROOT / "terraform/modules/observability/gorgo-rules.yml"
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/gorgo-rules.yml", str(rules)))
    done = run("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
