"""The systemd units for machines that were set up by hand."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gorgo.config.model import LimitsConfig
from tests.packaging.commands import parsed
from tests.packaging.conftest import ROOT

FOLDER = ROOT / "packaging/systemd"
UNITS = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.service"))}
TEMPLATES = ROOT / "terraform/modules/core/templates"
#: Of 10, by `systemd-analyze security`: what is left is the network, which both are for.
EXPOSURE = 1.5
#: Lines that say how far a process is shut in.
_CONFINING = re.compile(
    r"^(?:Protect|Private|Restrict|NoNew|Capability|SystemCallArch|Lock|UMask|StateDirectoryMode).*", re.M
)


def setting(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", UNITS[unit], re.MULTILINE)


def calls(unit: str) -> list[list[str]]:
    """Words after `gorgo` of every line that calls it, with what systemd puts in for its variables."""
    lines = [line for key in ("ExecStartPre", "ExecStart") for line in setting(unit, key)]
    state = f"/var/lib/{setting(unit, 'StateDirectory')[0]}"
    words = [shlex.split(line.replace("${STATE_DIRECTORY}", state)) for line in lines]
    assert all(line[0] == "/opt/gorgo/bin/gorgo" for line in words)
    return [line[1:] for line in words]


def test_both_programs_that_go_on_have_a_unit() -> None:
    started = {name: parsed(calls(name)[-1])[0] for name in UNITS}
    assert started == {"gorgo.service": "serve", "gorgo-tuner.service": "tune"}


def test_every_call_is_one_that_the_command_line_takes() -> None:
    values = [parsed(words) for name in UNITS for words in calls(name)]
    by_command = dict(values)
    assert by_command["check"]["config"] == by_command["serve"]["config"] == Path("/etc/gorgo/regions.yaml")
    assert by_command["serve"]["state"] == Path("/var/lib/gorgo/state.json")
    assert by_command["tune"]["database"] == "sqlite:////var/lib/gorgo-tuner/history.sqlite3"
    assert by_command["tune"]["url"] == ["http://127.0.0.1:9090"]


def test_tokens_are_credentials_and_in_no_environment_file() -> None:
    for name in UNITS:
        assert setting(name, "LoadCredential") == ["admin-token:/etc/gorgo/admin-token"], name
        assert "GORGO_ADMIN_TOKEN_FILE=%d/admin-token" in setting(name, "Environment")[0], name


def test_streams_may_finish_before_they_are_killed() -> None:
    (stop_s,) = setting("gorgo.service", "TimeoutStopSec")
    assert float(stop_s) >= LimitsConfig().shutdown_grace_s + 10
    assert int(setting("gorgo.service", "LimitNOFILE")[0]) >= 2 * LimitsConfig().max_in_flight + 1024


def test_both_come_back_and_are_nobody_in_particular() -> None:
    for name, again in (("gorgo.service", "always"), ("gorgo-tuner.service", "on-failure")):
        assert setting(name, "DynamicUser") == ["yes"], name
        assert setting(name, "Restart") == [again], name
        assert setting(name, "StartLimitIntervalSec") == ["0"], name


@pytest.mark.parametrize("name", sorted(UNITS))
def test_they_are_shut_in_at_least_as_far_as_terraform_s(name: str) -> None:
    theirs = set(_CONFINING.findall((TEMPLATES / f"{name}.tftpl").read_text()))
    assert len(theirs) > 10
    assert theirs <= set(_CONFINING.findall(UNITS[name]))


def analyzed(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("UNIT VERIFICATION SKIPPED: there is no systemd-analyze")
    return subprocess.run(["systemd-analyze", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_systemd_accepts_them(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    folder.mkdir(parents=True)
    for name in ("basic", "multi-user", "network-online", "shutdown", "sysinit"):
        (folder / f"{name}.target").write_text("[Unit]\n")
    for name, text in UNITS.items():
        (folder / name).write_text(text)
    for program in ("opt/gorgo/bin/gorgo", "bin/kill"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    verify = ("verify", "--man=no", "--generators=no", f"--root={tmp_path}")
    done = analyzed(*verify, *UNITS, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_little_that_they_could_reach() -> None:
    for name in UNITS:
        done = analyzed(
            "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE * 10:g}", name, folder=FOLDER
        )
        if "unrecognized option" in done.stderr:
            pytest.skip("UNIT SECURITY CHECK SKIPPED: needs systemd 250 or later")
        assert done.returncode == 0, done.stdout + done.stderr
